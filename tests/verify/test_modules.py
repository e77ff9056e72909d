"""Modules with ranks and replicas of their own: proofs, findings in changed programs, times and memory."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.diagnostics.source import PlanFileError
from pipeproof.schedule.columns import Row
from pipeproof.schedule.kinds import SCHEDULE_KINDS
from pipeproof.schedule.op_table import Group, build_graph
from pipeproof.schedule.ops import OpKind, parse_op
from pipeproof.sim.simulate import simulate
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.verify.check_plan import check_subject
from pipeproof.verify.subject import make_subject
from tests.plans import refusal

ENCODER = {"name": "encoder", "stages": [0, 0]}
LANGUAGE = {"name": "language", "stages": [1, 2]}
CHUNKS = {"name": "language", "stages": [1, 4], "pp": 2}
IMAGE = {"name": "image", "producer": "l0", "consumers": ["l1", "l2"], "shape": ["b", 8]}
COST = {"forward_us": 7, "backward_input_us": 6, "backward_weight_us": 5, "p2p_latency_us": 2}


def plan(modules, kind="1f1b", edges=(), route="direct", frozen=(), **sections):
    num_stages = modules[-1]["stages"][1] + 1
    layers = [{"name": f"l{n}", "out": [{"shape": ["b", 4]}] if n < num_stages - 1 else [],
               "parameters": [{"name": "w", "shape": [4]}]} for n in range(num_stages)]  # fmt: skip
    num_ranks = sum(m.get("pp", m["stages"][1] - m["stages"][0] + 1) * m.get("dp", 1) for m in modules)
    return {
        "pipeproof": 1,
        "model": {"kind": "layers", "layers": layers},
        "modules": [{**module, "frozen": module["name"] in frozen} for module in modules],
        "edges": [{"route": route, **edge} for edge in edges],
        "topology": {"pp": num_ranks},
        "schedule": {"kind": kind, "num_micro_batches": 8, "micro_batch_size": 2},
        "loss": {"normalization": "mean_of_micro_batches"},
        "cost": COST,
    } | sections


def subject_of(modules, **options):
    return make_subject(plan_from_dict(plan(modules, **options)))


def with_dp(encoder, language, stages=LANGUAGE):
    return [{**ENCODER, "dp": encoder}, {**stages, "dp": language}]


def codes(subject, change=lambda rank, row: [row], groups=None):
    """The codes of the errors, without consequences of others, after a change of each row."""
    rows = [[new for row in of_rank for new in change(rank, row)] for rank, of_rank in enumerate(subject.graph.rows())]
    changed = subject.with_graph(build_graph(rows, subject.graph.tensors, groups or subject.graph.groups))
    return {finding.code for finding in check_subject(changed).errors if finding.cause is None}


def about(row):
    return row.op.target if row.op.kind is OpKind.WAIT else row.op


def programs(subject):
    return [" ".join(map(str, program)) for program in subject.plan.programs]


def test_a_replica_computes_its_micro_batches_in_the_order_of_the_schedule():
    subject = subject_of(with_dp(2, 1), schedule={"kind": "1f1b", "num_micro_batches": 4, "micro_batch_size": 2})
    assert programs(subject) == [
        "0F0 0F2 0B0 0B2",
        "0F1 0F3 0B1 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]
    assert subject.plan.ranks_of_stage(0) == (0, 1)
    assert [group.ranks for group in subject.graph.groups] == [(0, 1)]


def test_each_replica_of_the_language_model_is_a_pipeline_of_neighbouring_ranks():
    subject = subject_of(with_dp(1, 2))
    assert [subject.plan.ranks_of_stage(stage) for stage in range(3)] == [(0,), (1, 3), (2, 4)]
    assert [subject.coords_text(rank) for rank in (0, 3)] == ["rank 0 (pp 0, encoder)", "rank 3 (pp 3, language 1)"]
    assert {str(channel) for channel in subject.graph.channels if channel.src == 0} == {"forward 0->1", "forward 0->3"}


def test_stages_before_chunks_have_one_micro_batch_more_in_flight_than_the_first_chunk():
    encoder, first, _ = (program.split() for program in programs(subject_of([ENCODER, CHUNKS], kind="zb_v")))
    before = first[: first.index("1I0")]
    assert encoder.index("0B0") == sum(op.startswith("1F") for op in before) + 1


SINGLE = [name for name, kind in SCHEDULE_KINDS.items() if kind.max_chunks == 1 and kind.name not in (
    "dualpipe", "chimera", "seq1f1b")]  # fmt: skip
SEVERAL = ["interleaved", "interleaved_zb", "zb_v", "v_half", "v_min", "dualpipe_v", "looped_bfs", "optimal"]


@pytest.mark.parametrize("frozen", [(), ("encoder",), ("language",)])
@pytest.mark.parametrize(("kind", "stages"), [(kind, LANGUAGE) for kind in SINGLE] + [(k, CHUNKS) for k in SEVERAL])
def test_both_ways_are_proved(kind, stages, frozen):
    for dp in ((2, 1), (1, 2), (2, 4)):
        assert codes(subject_of(with_dp(*dp, stages), kind=kind, frozen=frozen)) == set()


@st.composite
def random_modules(draw):
    modules, begin = [], 0
    for number in range(draw(st.integers(1, 3))):
        length = draw(st.integers(1 if number else 2, 2))
        sizes = {"pp": draw(st.sampled_from([1, length])), "dp": draw(st.sampled_from([1, 2, 4]))}
        modules.append({"name": f"m{number}", "stages": [begin, begin + length - 1], **sizes})
        begin += length
    frozen = draw(st.sets(st.sampled_from([m["name"] for m in modules]), max_size=len(modules) - 1))
    users = draw(st.sets(st.integers(1, begin - 1), min_size=1))
    return modules, frozen, [{**IMAGE, "consumers": [f"l{n}" for n in users]}]


@given(random_modules(), st.sampled_from(["relay", "direct"]), st.sampled_from(["looped_bfs", "optimal"]),
       st.sampled_from([1, 2]))  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_random_modules_are_proved_and_both_engines_give_the_same_times(of_plan, route, kind, dp):
    modules, frozen, edges = of_plan
    subject = subject_of(modules, kind=kind, frozen=frozen, edges=edges, route=route)
    topology = {**subject.plan.spec.topology.model_dump(include={"pp"}), "dp": dp}
    subject = subject_of(modules, kind=kind, frozen=frozen, edges=edges, route=route, topology=topology)
    assert codes(subject) == set()
    fast, reference = (simulate(subject.plan, engine=engine) for engine in ("fast", "simpy"))
    assert fast.timeline == reference.timeline


def test_a_sample_that_is_sent_to_another_replica():
    subject = subject_of(with_dp(1, 2))
    assert codes(subject, lambda _, row: [replace(row, peer=1)] if str(row.op) == "0SEND_F1" else [row]) == {"PP301"}

    section = {"kind": "custom", "num_micro_batches": 2, "micro_batch_size": 1}
    rows = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0"], ["2F0", "2B0"], ["1F1", "1B1"], ["2F1", "2B1"]]
    for order, expected in (([0, 1, 2, 3, 4], set()), ([0, 3, 4, 1, 2], {"PP124", "PP302"})):
        written = {**section, "programs": [rows[rank] for rank in order]}
        assert codes(subject_of(with_dp(1, 2), schedule=written)) == expected


def test_a_sample_that_one_module_leaves_out():
    subject = subject_of(with_dp(2, 1))
    assert codes(subject, lambda _, row: [] if about(row).micro_batch == 1 else [row]) == {"PP121"}

    def of_encoder_alone(rank, row):
        is_used = rank < 2 and "SEND" not in str(row.op) and "RECV" not in str(row.op)
        return [row] if is_used or about(row).micro_batch != 1 else []

    assert codes(subject, of_encoder_alone) == {"PP121", "PP125"}


def test_a_sample_that_is_sent_twice_and_two_that_are_exchanged_on_a_channel():
    subject, ends, other = subject_of(with_dp(2, 1)), ("0SEND_F1", "1RECV_F1"), {"1RECV_F0": 2, "1RECV_F2": 0}
    assert codes(subject, lambda _, row: [row] * (1 + (str(about(row)) in ends))) == {"PP126"}

    def exchanged(_, row):
        number = other.get(str(row.op), row.op.micro_batch)
        return [replace(row, op=row.op._replace(micro_batch=number))]

    assert codes(subject, exchanged) == {"PP302"}


@pytest.mark.parametrize(("encoder", "language", "scale"), [(2, 1, "1/2"), (2, 1, "2"), (1, 2, "1/2"), (1, 2, "2")])
def test_a_gradient_that_is_divided_by_the_replicas_of_another_module(encoder, language, scale):
    subject = subject_of(with_dp(encoder, language))
    for kind, of_stage in ((OpKind.SEND_BACKWARD, 1), (OpKind.REDUCE_GRAD, 0 if encoder > 1 else 2)):

        def scaled(_, row, kind=kind, of_stage=of_stage):
            return [replace(row, scale=scale) if (row.op.kind, row.op.stage) == (kind, of_stage) else row]

        assert codes(subject, scaled) == {"PP606"}


@pytest.mark.parametrize(("ranks", "expected"), [((0,), {"PP308", "PP603", "PP608"}), ((0, 1, 2), {"PP306"})])
def test_a_group_that_lacks_a_replica_or_has_a_rank_of_another_module(ranks, expected):
    assert codes(subject_of(with_dp(2, 1)), groups=(Group("pp", ranks),)) == expected


def test_a_sum_on_one_side_only_and_a_mean_in_place_of_a_sum():
    sums = (OpKind.REDUCE_GRAD, OpKind.ALL_REDUCE)
    one_side = lambda rank, row: [] if rank == 1 and row.op.kind in sums else [row]  # noqa: E731
    assert codes(subject_of(with_dp(2, 1)), one_side) == {"PP306", "PP608"}
    mean = lambda _, row: [replace(row, reduction="avg") if row.op.kind is OpKind.ALL_REDUCE else row]  # noqa: E731
    assert codes(subject_of(with_dp(2, 1)), mean) == {"PP606"}


def test_a_frozen_module_has_forwards_alone():
    frozen = subject_of(with_dp(2, 1), frozen=["encoder"])
    assert programs(frozen)[:2] == ["0F0 0F2 0F4 0F6", "0F1 0F3 0F5 0F7"]
    kinds = {row.op.kind for rows in frozen.graph.rows()[:2] for row in rows}
    assert kinds == {OpKind.FORWARD, OpKind.SEND_FORWARD, OpKind.WAIT}
    assert not any(tensor.name.startswith("input grad of stage 1") for tensor in frozen.graph.tensors)
    first, *_ = simulate(frozen.plan).memory
    states = {part.value: size for part, size in first.make_up.items()}
    assert (states["parameters"], states["gradients"], states["optimizer"], states["activations"]) == (16, 0, 0, 0)
    assert states["messages"] == 3 * 2 * 4 * 4  # its outputs until the waits, which begin when the last one is made


def test_a_frozen_module_behind_a_trained_one_has_no_gradients_of_weights():
    subject = subject_of([ENCODER, {"name": "adapter", "stages": [1, 1]}, {"name": "language", "stages": [2, 3]}],
                         kind="zb_h1", frozen=["language"])  # fmt: skip
    assert {op.kind.name for op in subject.plan.programs[3]} == {"FORWARD", "BACKWARD"}
    timeline = simulate(subject.plan).timeline
    backward = next(span for span in timeline.spans if str(subject.graph.ops[span.op_id]) == "3B0")
    assert timeline.us(backward.end - backward.start) == COST["backward_input_us"]


@pytest.mark.parametrize(("added", "expected"), [
    (["0STEP"], "PP128"), (["0B0"], "PP124"), (["0REDUCE_GRAD:pp"], "PP124"), (["0W0"], "PP124")])  # fmt: skip
def test_a_frozen_module_with_gradients_or_an_update(added, expected):
    subject = subject_of(with_dp(2, 1), frozen=["encoder"])
    last = {0: "WAIT(0SEND_F6)", 1: "WAIT(0SEND_F7)"}

    def with_added(rank, row):
        return [row, *(Row(parse_op(text)) for text in added)] if str(row.op) == last.get(rank) else [row]

    assert expected in codes(subject, with_added)


def test_one_module_with_one_replica_has_the_operations_of_a_plan_without_modules():
    modules = [{"name": "all", "stages": [0, 2]}]
    without = make_subject(plan_from_dict({**plan(modules), "modules": []}))
    assert subject_of(modules).graph.columns.equals(without.graph.columns)


@pytest.mark.parametrize("frozen", [(), ("encoder",)])
def test_replicas_on_the_ranks_of_the_language_model(frozen):
    programs = "0F0 1F0 0F2 1F1 1B0 0B0 1F2 1B1 1F3 1B2 0B2 1B3", "0F1 2F0 2B0 0F3 2F1 2B1 0B1 2F2 2B2 2F3 2B3 0B3"
    kept = [[op for op in program.split() if not (frozen and op.startswith("0B"))] for program in programs]
    section = {"kind": "custom", "num_micro_batches": 4, "micro_batch_size": 2, "programs": kept}
    section["placement"] = [[0, 1], [0, 2]]
    assert codes(subject_of(with_dp(2, 1), frozen=frozen, schedule=section, topology={"pp": 2})) == set()


@pytest.mark.parametrize(("change", "code", "text"), [
    ({"modules": [{**ENCODER, "dp": 3}, LANGUAGE], "topology": {"pp": 5}}, "PP108", "not divide into 3 equal shares"),
    ({"modules": [ENCODER, {**LANGUAGE, "stages": [2, 3]}]}, "PP106", "begins with stage 2"),
    ({"modules": [ENCODER, {**LANGUAGE, "name": "encoder"}]}, "PP106", "several modules are named `encoder`"),
    ({"modules": [ENCODER, {**LANGUAGE, "stages": [2, 1]}]}, "PP106", "has the stages [2, 1], which are not"),
    ({"modules": [ENCODER, {**LANGUAGE, "stages": [1, 3], "pp": 2}]}, "PP108", "do not divide over its pp 2"),
    ({"modules": [{**ENCODER, "tp": 2}, LANGUAGE]}, "PP106", "tp 2, and each of its ranks holds whole layers"),
    ({"topology": {"pp": 2}}, "PP106", "the modules have 3 ranks (1 x 1 of `encoder` + 2 x 1 of `language`)"),
    ({"modules": [{**ENCODER, "frozen": True}, {**LANGUAGE, "frozen": True}]}, "PP106", "all modules are frozen"),
    ({"run": {"clip_norm": 1.0}, "modules": [{**ENCODER, "frozen": True}, LANGUAGE]}, "PP106", "sums a norm over all"),
    ({"schedule": {"kind": "custom", "num_micro_batches": 2, "micro_batch_size": 1, "placement": [[0], [0], [1, 2]],
                   "programs": [["0F0"]]}}, "PP106", "stage 0 on 2 ranks, and its module's dp is 1"),
])  # fmt: skip
def test_modules_that_do_not_fit_are_refused(change, code, text):
    finding = refusal({**plan([ENCODER, LANGUAGE]), **change})
    assert (finding.code, text in finding.message) == (code, True), finding.message


@pytest.mark.parametrize(("modules", "kind", "text"), [
    (with_dp(1, 1), "zb_v", "2 stages on each rank, and module `language` has 1 stage"),
    (with_dp(1, 1, CHUNKS), "1f1b", "one stage on each rank, and module `language` has 2 stages"),
    ([{**CHUNKS, "stages": [0, 3]}, {**ENCODER, "stages": [4, 4]}], "zb_v", "module `encoder` has 1 stage"),
    ([{**CHUNKS, "stages": [0, 3], "name": "a"}, {**CHUNKS, "stages": [4, 7]}], "zb_v", "`a` has 2 stages on each"),
    (with_dp(1, 2), "dualpipe", "dualpipe has no order for `modules`"),
])  # fmt: skip
def test_kinds_that_cannot_order_the_modules_are_refused(modules, kind, text):
    with pytest.raises(PlanFileError, match=text) as caught:
        make_subject(plan_from_dict(plan(modules, kind=kind)))
    assert {finding.code for finding in caught.value.findings} == {"PP140"}
