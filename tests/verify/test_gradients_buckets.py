"""Parameters that the collectives below a REDUCE_GRAD sum: one each, several in a bucket, or all that are there."""

import dataclasses

import pytest

from pipeproof.schedule.op_table import build_graph
from pipeproof.schedule.ops import OpKind
from pipeproof.stages.describe.gradient_facts import Loss, ParameterGradient
from pipeproof.verify.gradients.diagnose import diagnose
from pipeproof.verify.subject import program_subject
from tests.plans import subject
from tests.verify.gradient_models import SUM, TIED_FACTS, TIED_TEXT, TWO_WAY_TEXT, facts, model, tied, two_way
from tests.verify.gradient_mutants import drop, only, own
from tests.verify.programs import mutated


def is_part(row):
    return row.op.target is not None and row.op.target.kind is OpKind.REDUCE_GRAD


def bucketed(base, lengths):
    """The base with as many collectives below each REDUCE_GRAD as there are lengths, of so many elements."""

    def change(of_ranks):
        for program in of_ranks:
            mine = [row for row in program if is_part(row)]
            place = program.index(mine[0])
            program[:] = [row for row in program if not is_part(row)]
            program[place:place] = [
                dataclasses.replace(row, stop=length) for row, length in zip(mine, lengths, strict=False)
            ]

    return mutated(base, change)


BASE = subject(topology={"pp": 1, "dp": 2}, model={"num_layers": 1})
NUMELS = [row.stop for row in BASE.graph.rows()[0] if is_part(row)]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([sum(NUMELS)], set()),  # one bucket for all
        ([sum(NUMELS) + 24], set()),  # padded
        ([sum(NUMELS[:3]), sum(NUMELS[3:5]), sum(NUMELS[5:]) + 8], set()),
        ([sum(NUMELS[:3]), sum(NUMELS[3:]), 8], {"PP613"}),  # one that has nothing left to sum
        ([sum(NUMELS[:3]) + 24, sum(NUMELS[3:]), 8], set()),  # with padding the content is ambiguous
        ([sum(NUMELS[:3]) - 8, sum(NUMELS[3:]) + 8], set()),  # a boundary inside of a parameter
        ([sum(NUMELS[:3]) - 8, sum(NUMELS[3:])], {"PP614"}),
        ([*NUMELS[1:], NUMELS[0]], set()),  # in another order
        ([sum(NUMELS[:-1])], {"PP601"}),
        ([sum(NUMELS[:3]), sum(NUMELS[3:-1])], {"PP601"}),
        (NUMELS[:-1], {"PP601"}),
    ],
)
def test_a_bucket_takes_as_many_parameters_as_it_has_elements_for(lengths, expected):
    assert own(bucketed(BASE, lengths)) == expected


def with_parts(text, axis, num=1):
    """The text with each REDUCE_GRAD of an axis written as ``num`` collectives below it."""
    for stage in "01":
        for name in ("first", "last"):
            old = f"{stage}REDUCE_GRAD:{axis}{{@{axis} writes=grad[{name}]}}"
            new = " ".join(f"{stage}REDUCE_GRAD:{axis}/{i}.ALL_REDUCE:{axis}{{@{axis}}}" for i in range(num))
            text = text.replace(old, f"{stage}REDUCE_GRAD:{axis} {new}")
    return text


def test_a_collective_over_two_ranks_of_one_stage_sums_all_parameters_of_the_stage():
    """No weight has copies on several stages; the ranks share out the micro-batches of one."""
    text = with_parts(TWO_WAY_TEXT, "pp")
    assert "0REDUCE_GRAD:pp/0.ALL_REDUCE:pp" in text
    assert own(two_way(text)) == set()
    assert own(mutated(two_way(text), drop("0REDUCE_GRAD:pp"))) == {"PP608"}


def test_a_bucket_over_two_ranks_of_one_stage():
    given = facts(
        *(ParameterGradient(f"{name}{stage}", (stage,), numel=4) for stage in (0, 1) for name in "ab"),
        losses=(Loss("main", 1, SUM),),
    )
    text = with_parts(TWO_WAY_TEXT, "pp").replace("ALL_REDUCE:pp{", "ALL_REDUCE:pp{range=0..8 ")
    assert own(two_way(text, given)) == set()
    assert own(two_way(text.replace("range=0..8", "range=0..4"), given)) == {"PP608"}


def test_without_facts_the_collectives_below_one_reduction_are_parts_of_it():
    """The program does not declare the parameters: two of them need not sum the same gradient twice."""
    parts = "0REDUCE_GRAD:dp/0.ALL_REDUCE:dp{group=0} 0REDUCE_GRAD:dp/1.ALL_REDUCE:dp{group=0}"
    text = f"0F0 0B0 0REDUCE_GRAD:dp {parts} 0STEP"
    lines = ["group dp: 0 1", f"rank 0: {text}", f"rank 1: {text}"]
    assert own(program_subject("\n".join(lines))) == set()
    lines[1:] = [line.replace(parts, f"{parts} {parts}") for line in lines[1:]]
    only(program_subject("\n".join(lines)), "PP602")


def sized(**numels):
    """Parameters of one stage by name, each with its number of elements; None where it is not known."""
    return tuple(ParameterGradient(name, (0,), numel=numel) for name, numel in numels.items())


def of_calls(parameters, *calls, step="0STEP", kind="ALL_REDUCE", axis="dp", **sizes):
    """Ranks that sum a stage's gradients by ``calls`` below one REDUCE_GRAD: texts ``NUMBER ATTRIBUTES`` of each."""
    rows = [f"0REDUCE_GRAD:{axis}/{call.split()[0]}.{kind}:{axis}{{{call.partition(' ')[2]}}}" for call in calls]
    text = " ".join(["0F0 0B0", f"0REDUCE_GRAD:{axis}", *rows, step])
    return model(text, facts(*parameters), **(sizes or {"dp": 2}))


def wrong(one):
    """(code, parameter) of each problem, without repetitions on another rank."""
    return {(problem.cause.value, problem.parameter) for problem in diagnose(one)}


LACKS, TWICE, UNEXPECTED, ELEMENTS = "PP601", "PP602", "PP613", "PP614"


@pytest.mark.parametrize(
    ("numels", "calls", "expected"),
    [
        # Without sizes a call sums the parameter of its number, or the next that no call names.
        ({"a": None, "b": None, "c": None}, ["0 @dp range=0..8", "1 @dp range=0..8"], {(LACKS, "c")}),
        ({"a": 4, "b": 4, "c": 4, "d": 4}, ["0 @dp range=0..12", "1 @dp"], {(LACKS, "c"), (LACKS, "d")}),
        ({"a": None, "b": None}, ["0 @dp range=0..8", "1 @dp range=0..8"], set()),
        ({"a": None, "b": None}, ["1 @dp"], {(LACKS, "a")}),
        ({"a": 4, "b": 4, "c": 4}, ["1 @dp", "2 @dp"], {(LACKS, "a")}),
        ({"a": 4, "b": 4, "c": 8}, ["1 @dp", "2 @dp range=0..8"], {(LACKS, "a")}),
        ({"a": None, "b": None, "c": None}, ["0 @dp writes=grad[a]", "1 @dp", "2 @dp"], set()),
        ({"a": None, "b": None, "c": None}, ["0 @dp writes=grad[b]", "2 @dp"], {(LACKS, "c")}),
        # With sizes it sums the parameter of its size, padded or not.
        ({"a": 10, "b": 5}, ["0 @dp range=0..6", "1 @dp range=0..10"], set()),
        ({"a": 10, "b": 5, "c": 7}, ["0 @dp range=0..8", "1 @dp range=0..6", "2 @dp range=0..10"], set()),
        ({"a": 9, "b": 10}, ["0 range=0..10", "1 range=0..9"], set()),
        # Ranges are places in the flat buffer if at most one of several begins at 0, or a single one does not.
        ({"a": 10, "b": 6}, ["0 @dp range=8..16", "1 @dp range=0..8"], set()),
        ({"a": 10, "b": 6}, ["0 @dp range=0..4", "1 @dp range=4..10", "2 @dp range=10..16"], set()),
        ({"a": 10, "b": 6}, ["0 @dp range=0..10", "1 @dp range=8..16"], {(TWICE, "a")}),
        ({"a": 10, "b": 6}, ["0 @dp range=0..8", "1 @dp range=8..16", "2 @dp range=16..24"], {(UNEXPECTED, "")}),
        ({"a": 10, "b": 6}, ["0 @dp range=4..16"], {(ELEMENTS, "a")}),
        ({"a": 6, "b": 6, "c": 8}, ["0 @dp range=0..6", "1 @dp range=0..6", "2 @dp range=2..8"], {(ELEMENTS, "c")}),
    ],
)  # fmt: skip
def test_the_parameters_of_calls_by_their_names_numbers_sizes_and_places(numels, calls, expected):
    assert wrong(of_calls(sized(**numels), *calls)) == expected


@pytest.mark.parametrize(
    ("calls", "unexpected"),
    [
        (["2 @dp range=0..7"], "2"),
        (["2 range=0..7"], "2"),
        (["2 @cp range=0..7"], ""),  # a group of one rank sums nothing
        (["2 @cp range=0..7", "3 @dp range=0..7"], "3"),
        (["2 @dp reduction=avg range=0..8", "3 @dp range=0..7"], "3"),  # an average of equal values
        (["2 @dp reduction=avg range=0..4", "3 @dp range=0..7"], "23"),
    ],
)
def test_calls_that_no_parameter_is_left_for_are_strays_each(calls, unexpected):
    one = of_calls(sized(a=8, b=8), "0 @dp range=0..8", "1 @dp range=0..8", *calls, dp=2, cp=1)
    assert wrong(one) == ({(UNEXPECTED, "")} if unexpected else set())
    found = [(one.graph.ops[problem.ops[0]].index, problem.rank, problem.other_ranks) for problem in diagnose(one)]
    assert found == [(int(number), 0, (1,)) for number in unexpected]


SHARED = (
    ParameterGradient("embedding", (0, 1)),
    ParameterGradient("first", (0,)),
    ParameterGradient("last", (1,)),
)


@pytest.mark.parametrize(
    ("num_first", "num_last", "expected"),
    [(2, 1, set()), (1, 2, {(LACKS, "first"), (TWICE, "embedding")}), (1, 1, {(LACKS, "first")})],
)
def test_a_weight_of_two_stages_of_a_rank_is_summed_with_the_first(num_first, num_last, expected):
    def calls(stage, num):
        rows = [f"{stage}REDUCE_GRAD:dp/{i}.ALL_REDUCE:dp{{@dp}}" for i in range(num)]
        return " ".join([f"{stage}REDUCE_GRAD:dp", *rows])

    text = f"0F0 1F0 1B0 0B0 {calls(0, num_first)} {calls(1, num_last)} 0STEP 1STEP"
    one = model(text, facts(*SHARED, losses=(Loss("main", 1, SUM),)), dp=2)
    assert wrong(one) == expected


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (["1 range=8..16", "0 range=0..8"], set()),  # next to each other
        (["1 range=7..16", "0 range=0..8"], {TWICE}),
        (["0 range=0..8", "1"], set()),  # nothing is known of the second
        (["0 writes=grad[a]", "1 range=0..8"], set()),  # nothing is known of the gradient of the second
    ],
)
def test_parts_of_a_gradient_without_facts(parts, expected):
    rows = [f"0REDUCE_GRAD:dp/{one.split()[0]}.REDUCE_SCATTER:dp{{group=0 {one.partition(' ')[2]}}}" for one in parts]
    lines = [f"rank {rank}: 0F0 0B0 0REDUCE_GRAD:dp {' '.join(rows)} 0STEP" for rank in range(2)]
    assert own(program_subject("\n".join(["group dp: 0 1", *lines]))) == expected


@pytest.mark.parametrize(("second", "expected"), [("{group=0}", set()), ("{group=0 range=8..16}", {ELEMENTS})])
def test_elements_of_a_gradient_without_facts_are_known_if_those_of_all_its_parts_are(second, expected):
    parts = "0REDUCE_GRAD:dp/0.REDUCE_SCATTER:dp{group=0 range=0..8} 0REDUCE_GRAD:dp/1.REDUCE_SCATTER:dp" + second
    lines = [f"rank {i}: 0F0 0B0 0REDUCE_GRAD:dp {parts} 0STEP{{range={8 * i}..{8 * i + 8}}}" for i in range(2)]
    assert own(program_subject("\n".join(["group dp: 0 1", *lines]))) == expected


def test_the_first_part_of_a_gradient_without_facts_ends_its_additions():
    part = "0REDUCE_GRAD:dp/%d.ALL_REDUCE:dp{group=0}"
    lines = [f"rank {rank}: 0F0 0F1 0B0 0REDUCE_GRAD:dp {part % 0} 0B1 {part % 1} 0STEP" for rank in range(2)]
    assert own(program_subject("\n".join(["group dp: 0 1", *lines]))) == {"PP604"}


@pytest.mark.parametrize(
    ("parameters", "calls", "steps", "expected"),
    [
        # Each rank keeps and updates a half of the sum of each call.
        (sized(a=8), ["0 @dp range=0..8 writes=grad[a]"], ("0..4", "4..8"), set()),
        (sized(a=8), ["0 @dp range=0..8 writes=grad[a]"], ("0..3", "3..8"), {(ELEMENTS, "a")}),
        (sized(a=4, b=4, c=8), ["0 @dp range=0..16"], ("0..8", "8..16"), set()),
        (sized(a=4, b=4, c=8), ["0 @dp range=0..16"], ("0..7", "7..16"), {(ELEMENTS, "b")}),
        (
            sized(a=2, b=2, c=4),
            ["0 @dp range=0..4", "1 @dp range=0..4"],
            ("0..8", "0..8"),
            {(ELEMENTS, n) for n in "abc"},
        ),
        # Behind a parameter of unknown size the places in the flat buffer are not known.
        (
            sized(a=4, b=None, c=4),
            [f"{i} @dp range=0..4 writes=grad[{name}]" for i, name in enumerate("abc")],
            ("0..2", "2..4"),
            set(),
        ),
        # In the second of two padded buckets the first element has no known place.
        (sized(a=2, b=2, c=4), ["0 @dp range=0..4", "1 @dp range=0..6"], ("0..8", "0..8"), set()),
    ],
)
def test_elements_that_are_kept_of_buckets(parameters, calls, steps, expected):
    step = "0STEP{range=%s}"
    one, other = (of_calls(parameters, *calls, step=step % range_, kind="REDUCE_SCATTER") for range_ in steps)
    rows = [one.graph.rows()[0], other.graph.rows()[1]]
    assert wrong(one.with_graph(build_graph(rows, (), one.graph.groups))) == expected


def test_a_sum_over_copies_that_names_no_weight_is_of_those_with_copies():
    def call(stage):
        return f"{stage}REDUCE_GRAD:pp {stage}REDUCE_GRAD:pp/0.ALL_REDUCE:pp{{@pp}}"

    given = dataclasses.replace(TIED_FACTS, parameters=TIED_FACTS.parameters[::-1])
    text = TIED_TEXT
    for stage in "01":
        text = text.replace(f"{stage}REDUCE_GRAD:pp{{@pp writes=grad[embedding]}}", call(stage))
    assert own(tied(text, given)) == set()


def test_a_call_below_no_row_is_none_of_another_row_s_calls():
    """The last rank's sum over tp has no REDUCE_GRAD of its own; it is not one more sum over dp."""
    norm = ParameterGradient("norm", (0,), partial_over=("tp",))
    calls = "0REDUCE_GRAD:tp/0.ALL_REDUCE:tp{@tp} 0REDUCE_GRAD:dp "
    calls += "0REDUCE_GRAD:dp/0.ALL_REDUCE:dp{@dp writes=grad[norm]}"
    text = f"0F0 0B0 {calls} 0STEP"
    ranks = [text, text, text, text.replace("0STEP", "0SCALE_GRAD{scale=1} 0STEP")]  # each is then read by itself
    assert own(model("\n".join(ranks), facts(norm), dp=2, tp=2)) == set()
