"""The end of a step in programs: the place of sums, gathers, and findings on other programs."""

import re
from dataclasses import replace

import pytest

from pipeproof.diagnostics.source import PlanFileError
from pipeproof.schedule.formats.text_form import format_program, parse_program
from pipeproof.schedule.op_table import build_graph
from pipeproof.schedule.ops import OpKind
from pipeproof.sim.simulate import simulate
from pipeproof.stages.describe.stage_memory import shard_numel, shard_range
from pipeproof.verify.certificate import graph_digest
from tests.plans import subject
from tests.verify.gradient_mutants import changed, drop, moved, only
from tests.verify.programs import errors, mutated

SHARDED = {"memory": {"shard_optimizer": "dp"}}
CHUNKS = {"kind": "interleaved", "num_chunks": 2}
READY = {**CHUNKS, "reduce_gradients": "when_ready"}
MESH = {"tp": 2, "dp": 2, "sequence_parallel": True}
MOE = {"moe": {"num_experts": 4, "top_k": 2, "ffn_size": 16}}


def ready(topology=(), schedule=(), **sections):
    return subject(topology={"dp": 2, **dict(topology)}, schedule={**READY, **dict(schedule)}, **sections)


def sharded(topology=(), **sections):
    return subject(topology={"dp": 2, **dict(topology)}, **SHARDED, **sections)


def texts(graph, rank, *, after=""):
    """The operations of a rank without collectives below others, from the first with this text on."""
    found = [str(graph.ops[i]) for i in graph.rank_ops(rank) if graph.parent[i] < 0]
    return found[found.index(after) if after else 0 :]


@pytest.mark.parametrize(("numel", "shares"), [(12, 3), (13, 3), (4, 3), (1, 4), (7, 1)])
def test_shares_are_a_cut_of_all_elements(numel, shares):
    ranges = [shard_range(numel, shares, place) for place in range(shares)]
    assert [i for start, stop in ranges for i in range(start, stop)] == list(range(numel))
    assert ranges[0][1] == max(stop - start for start, stop in ranges) == shard_numel(numel, shares)


@pytest.mark.parametrize("model", [{}, {"tied_embedding": True}, MOE])
@pytest.mark.parametrize("schedule", [READY, {"kind": "zb_v", "num_chunks": 2}, {"kind": "1f1b"}])
@pytest.mark.parametrize("topology", [MESH, {"pp": 4, "dp": 3}, {"ep": 2, "dp": 2}])
@pytest.mark.parametrize("clip_norm", [{}, {"run": {"clip_norm": 1.0}}])
def test_plans_are_proved_and_simulated(topology, schedule, model, clip_norm):
    schedule = {**schedule, "reduce_gradients": "when_ready"}
    seen = sharded(topology, schedule=schedule, model={"num_layers": 8, **model}, **clip_norm)
    assert errors(seen) == []
    simulation = simulate(seen.plan)
    assert simulation.engine == "fast"
    assert simulation.makespan > 0


def test_copies_share_out_their_updates_too():
    assert errors(sharded(schedule={"kind": "dualpipe", "num_micro_batches": 4})) == []


def test_sums_of_a_chunk_follow_its_last_backward():
    graph = ready().graph
    assert texts(graph, 0, after="2B3") == [
        "2B3", "2SEND_B3", "WAIT(2B3)", "2REDUCE_GRAD:dp", "0RECV_B2", "WAIT(0RECV_B2)", "WAIT(0SEND_F2)", "0B2",
        "0RECV_B3", "WAIT(0RECV_B3)", "WAIT(0SEND_F3)", "0B3", "WAIT(0B3)", "0REDUCE_GRAD:dp",
        "WAIT(2SEND_B0)", "WAIT(2SEND_B1)", "WAIT(2SEND_B2)", "WAIT(2SEND_B3)",
        "WAIT(2REDUCE_GRAD:dp)", "2STEP", "WAIT(0REDUCE_GRAD:dp)", "0STEP",
    ]  # fmt: skip
    queue = graph.queues.index("gradients")
    on_queue = {graph.ops[i].kind for i in graph.rank_ops(0) if graph.queue[i] == queue}
    assert on_queue == {OpKind.WAIT, OpKind.REDUCE_GRAD, OpKind.ALL_REDUCE}


def test_weights_are_gathered_behind_the_step_that_updates_a_share():
    seen = sharded(model={"vocab_size": 33})
    graph = seen.graph
    assert texts(graph, 0, after="0B3") == ["0B3", "0REDUCE_GRAD:dp", "0STEP", "0GATHER_WEIGHT:dp"]
    (embedding,) = (row for row in graph.rows()[0] if str(row.op) == "0REDUCE_GRAD:dp/0.REDUCE_SCATTER:dp")
    assert embedding.stop == 33 * 16
    norm = next(i for i, weight in enumerate(seen.plan.weights_of(0, 0)) if weight.shape == (16,))
    (gather,) = (row for row in graph.rows()[0] if str(row.op) == f"0GATHER_WEIGHT:dp/{norm}.ALL_GATHER:dp")
    assert gather.stop == 8


def test_what_does_not_divide_is_filled_up():
    rows = subject(topology={"pp": 1, "dp": 3}, **SHARDED).graph.rows()[0]
    sizes = [row.stop for row in rows if row.op.kind in (OpKind.REDUCE_SCATTER, OpKind.ALL_GATHER)]
    sums, gathers = sizes[: len(sizes) // 2], sizes[len(sizes) // 2 :]
    assert sums == [3 * share for share in gathers]
    assert 18 in sums  # of 16


def test_the_norm_is_summed_over_shares_first():
    graph = sharded(MESH, run={"clip_norm": 1.0}).graph
    expected = ["0REDUCE_GRAD:tp", "0REDUCE_GRAD:dp", "0ALL_REDUCE:dp", "0ALL_REDUCE:tp", "0ALL_REDUCE:pp", "0STEP"]
    assert texts(graph, 0, after="0REDUCE_GRAD:tp") == [*expected, "0GATHER_WEIGHT:dp"]


def test_a_stage_with_a_copy_of_a_weight_is_summed_at_the_end():
    graph = ready({"pp": 4}, model={"num_layers": 8, "tied_embedding": True}).graph
    queues = {str(graph.ops[i]): graph.queues[graph.queue[i]] for i in range(graph.num_ops) if graph.queue[i] >= 0}
    at_end = {op for op, queue in queues.items() if op.endswith("REDUCE_GRAD:dp") and queue == "compute"}
    assert at_end == {"0REDUCE_GRAD:dp", "7REDUCE_GRAD:dp"}


def test_a_stage_waits_for_the_other_that_computes_with_its_weight():
    """In a V the embedding and the tied head are on one rank, and the head's stage may add last."""
    seen = subject(
        topology={"dp": 2, "pp": 1},
        schedule={"kind": "custom", "programs": [["0F0", "1F0", "1I0", "0B0", "1W0"]], "num_micro_batches": 1,
                  "placement": [[0, 1]], "reduce_gradients": "when_ready"},
        model={"tied_embedding": True},
    )  # fmt: skip
    found = texts(seen.graph, 0, after="1W0")
    assert found[:4] == ["1W0", "WAIT(1W0)", "0REDUCE_GRAD:dp", "1REDUCE_GRAD:dp"]
    assert errors(seen) == []


def test_the_digest_covers_both():
    digests = {graph_digest(one) for one in (subject(topology={"dp": 2}), sharded(), ready(), ready(**SHARDED))}
    assert len(digests) == 4
    alone = {"topology": {"pp": 2}}
    assert graph_digest(subject(**alone)) == graph_digest(subject(**alone, **SHARDED))


def test_the_text_form_reads_the_same():
    graph = ready(**SHARDED).unfolded().graph
    text = format_program(graph)
    assert "0GATHER_WEIGHT:dp/0.ALL_GATHER:dp" in text
    assert parse_program(text).graph().columns.equals(graph.columns)


WRONG = {
    "nothing is gathered": ((drop("GATHER_WEIGHT"),), "updates a share of `embed.weight`"),
    "nothing of one stage": ((drop("1GATHER_WEIGHT"),), "1STEP updates a share of"),
    "one weight is left out": (
        (drop("0GATHER_WEIGHT:dp/3."),), "0STEP updates a share of `layer.0.attn.wq.weight`, and nothing gathers",
    ),
    "before the step": ((moved("0GATHER_WEIGHT", "0STEP"),), "comes before 0STEP, which updates its elements"),
    "a share too short": ((changed("1GATHER_WEIGHT:dp/2.", stop=3),), "puts in 3 elements of a share of"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_weights_that_are_not_put_together_are_found(name):
    changes, reported = WRONG[name]
    wrong = mutated(sharded(), *changes)
    found = [one for one in errors(wrong) if one.code == "PP612"]
    assert {one.code for one in errors(wrong)} == {"PP612"}
    weights = [weight.name for weight in wrong.plan.weights_of(0, 0)]
    reported = reported.replace("layer.0.attn.wq.weight", weights[3])
    assert any(reported in one.message for one in found), [one.message for one in found]


def test_a_gather_over_a_part_of_the_ranks_is_found():
    """Two pairs of four dp ranks: nothing hangs, and each pair has weights of its own."""
    seen = sharded({"pp": 1, "dp": 4}).unfolded()
    (whole,) = (i for i, one in enumerate(seen.graph.groups) if one.axis == "dp")
    pairs = tuple(replace(seen.graph.groups[whole], ranks=pair) for pair in ((0, 1), (2, 3)))
    rows, place = seen.graph.rows(), len(seen.graph.groups)
    for rank, program in enumerate(rows):
        program[:] = [
            replace(row, group=place + rank // 2) if row.op.kind is OpKind.ALL_GATHER else row for row in program
        ]
    wrong = seen.with_graph(build_graph(rows, seen.graph.tensors, (*seen.graph.groups, *pairs)))
    found = [one for one in errors(wrong) if one.code == "PP612"]
    assert found
    assert all("is over 2 ranks, and 4 dp ranks have a share each" in one.message for one in found)


def test_a_share_of_a_sum_for_a_whole_update_is_found():
    def scattered(rows):
        for program in rows:
            for place, row in enumerate(program):
                if "REDUCE_GRAD:dp/" in str(row.op):
                    program[place] = replace(row, op=row.op._replace(kind=OpKind.REDUCE_SCATTER))

    wrong = mutated(subject(topology={"dp": 2}), scattered)
    assert "leaves a share of a sum, and the plan's optimizer updates whole weights" in only(wrong, "PP612").message


@pytest.mark.parametrize(("num", "more"), [(1, ""), (2, " and 1 more")])
def test_sums_that_leave_shares_are_counted_and_the_first_is_shown(num, more):
    def scattered(rows):
        for place, row in enumerate(rows[0]):
            if str(row.op).startswith(tuple(f"0REDUCE_GRAD:dp/{i}." for i in range(num))):
                rows[0][place] = replace(row, op=row.op._replace(kind=OpKind.REDUCE_SCATTER))

    wrong = mutated(subject(topology={"pp": 1, "dp": 2}), scattered)
    (found,) = [one for one in errors(wrong) if one.code == "PP612"]
    assert f": 0REDUCE_GRAD:dp/0.REDUCE_SCATTER:dp{more} leaves a share" in found.message
    assert [op.op for op in found.witness.ops] == ["0REDUCE_GRAD:dp/0.REDUCE_SCATTER:dp"]


@pytest.mark.parametrize("tp", [1, 2])
def test_weights_that_nothing_gathers_are_named_and_ranks_counted(tp):
    seen = sharded({"pp": 1, "dp": 2, "tp": tp, "sequence_parallel": tp > 1})
    names = [weight.name for weight in seen.plan.weights_of(0, 0)]
    for left_out in ((1,), (1, 2, 3), (1, 2, 3, 4)):
        changes = [drop(f"0GATHER_WEIGHT:dp/{i}.") for i in left_out]
        for one in (mutated(seen, *changes), mutated(seen.unfolded(), *changes)):
            (found,) = [finding for finding in errors(one) if finding.code == "PP612"]
            more = re.findall(r" and (\d) more: 0STEP", found.message)
            assert more == ([] if one.graph.num_ranks == 1 else [str(one.graph.num_ranks - 1)])
            shown = ", ".join(f"`{names[i]}`" for i in left_out[:3]) + " and 1 more" * (len(left_out) > 3)
            assert f"0STEP updates a share of {shown}, and nothing gathers the others" in found.message
            assert [(op.rank, op.op) for op in found.witness.ops] == [(0, "0STEP")]


def test_a_weight_that_one_rank_alone_does_not_gather():
    def change(rows):
        rows[1][:] = [row for row in rows[1] if not str(row.op).startswith("0GATHER_WEIGHT:dp/1.")]

    (found,) = [one for one in errors(mutated(sharded({"pp": 1, "dp": 2}), change)) if one.code == "PP612"]
    assert found.message.startswith("rank 1 (dp 1): 0STEP updates a share of")


def test_of_two_gathers_of_a_weight_the_last_one_counts():
    def twice(rows):
        place = next(i for i, row in enumerate(rows[0]) if str(row.op).startswith("0GATHER_WEIGHT:dp/2."))
        rows[0].insert(place + 1, replace(rows[0][place], stop=3))

    (found,) = [one for one in errors(mutated(sharded({"pp": 1, "dp": 2}), twice)) if one.code == "PP612"]
    assert "puts in 3 elements of a share of" in found.message
    assert [op.op for op in found.witness.ops] == ["0STEP", "0GATHER_WEIGHT:dp/2.ALL_GATHER:dp"]


OWN = [
    ["0F0", "0SEND_F0", "0RECV_B0", "WAIT(0RECV_B0)", "0B0", "WAIT(0SEND_F0)"],
    ["1RECV_F0", "WAIT(1RECV_F0)", "1F0", "1B0", "1SEND_B0", "WAIT(1SEND_B0)"],
]


def test_a_program_with_its_own_communication_gathers():
    schedule = {"kind": "custom", "num_micro_batches": 1}
    left_open = sharded(schedule={**schedule, "programs": OWN})
    assert texts(left_open.graph, 0)[-3:] == ["0REDUCE_GRAD:dp", "0STEP", "0GATHER_WEIGHT:dp"]
    assert errors(left_open) == []
    steps = [[*program, f"{stage}REDUCE_GRAD", f"{stage}STEP"] for stage, program in enumerate(OWN)]
    assert {one.code for one in errors(sharded(schedule={**schedule, "programs": steps}))} == {"PP612"}
    early = [[*program[:-1], f"{stage}GATHER_WEIGHT:dp", program[-1]] for stage, program in enumerate(steps)]
    found = [one for one in errors(sharded(schedule={**schedule, "programs": early})) if one.code == "PP612"]
    assert [[op.op for op in one.witness.ops] for one in found] == [
        [f"{stage}STEP", f"{stage}GATHER_WEIGHT:dp"] for stage in range(2)
    ]
    assert all("comes before" in one.message for one in found)
    gathers = [[*program, f"{stage}GATHER_WEIGHT:dp"] for stage, program in enumerate(steps)]
    assert errors(sharded(schedule={**schedule, "programs": gathers})) == []


@pytest.mark.parametrize("after", [False, True])
def test_an_optimizer_that_does_not_wait_is_found(after):
    def late(rows):
        for program in rows:
            waits = [row for row in program if str(row.op) in ("WAIT(0REDUCE_GRAD:dp)", "WAIT(1REDUCE_GRAD:dp)")]
            program[:] = [row for row in program if row not in waits]
            program += waits if after else []

    assert {one.code for one in errors(mutated(ready(), late))} == {"PP507"}


def test_sums_before_the_last_backward_are_found():
    def early(rows):
        moved("2REDUCE_GRAD", "2B3")(rows)
        drop("WAIT(2B3)")(rows)

    assert "PP604" in {one.code for one in errors(mutated(ready(), early))}


def test_copies_that_come_to_their_sums_in_unlike_orders_are_found():
    """DualPipe's two ranks each hold both stages: here one begins with stage 0, the other with stage 1."""
    seen = subject(schedule={"kind": "dualpipe", "num_micro_batches": 4})

    def swapped(rows):
        mine = [row for row in rows[1] if "0REDUCE_GRAD" in str(row.op) or str(row.op) == "0STEP"]
        rows[1][:] = [row for row in rows[1] if row not in mine] + mine

    assert errors(seen) == []
    assert {one.code for one in errors(mutated(seen, swapped))} == {"PP306"}


@pytest.mark.parametrize(
    ("schedule", "why"),
    [
        ({"kind": "dualpipe", "num_micro_batches": 4}, "every stage has copies on several pipeline ranks"),
        ({"kind": "custom", "num_micro_batches": 1, "programs": OWN}, "when gradients are summed"),
    ],
)
def test_a_schedule_without_them_is_refused(schedule, why):
    with pytest.raises(PlanFileError, match=why) as refused:
        subject(topology={"dp": 2}, schedule={**schedule, "reduce_gradients": "when_ready"})
    assert [one.code for one in refused.value.findings] == ["PP106"]


def test_a_wait_for_an_operation_waits_for_the_collectives_below_it():
    """Those that were issued before the wait."""
    below = "0REDUCE_GRAD:dp/{}.ALL_REDUCE:dp{{queue=side group=0}}"
    text = f"0F0 0B0 WAIT(0B0){{queue=side}} 0REDUCE_GRAD:dp{{queue=side}} {below.format(0)} {below.format(1)}"
    text += f" WAIT(0REDUCE_GRAD:dp) 0STEP {below.format(2)} WAIT(0REDUCE_GRAD:dp)"
    graph = parse_program(f"group dp: 0 1\nrank 0: {text}\nrank 1: {text}\n").graph()
    found = [str(graph.ops[int(graph.waits_for[i])]) for i in graph.rank_ops(1) if graph.waits_for[i] >= 0]
    assert found == ["0B0", "0REDUCE_GRAD:dp/1.ALL_REDUCE:dp", "0REDUCE_GRAD:dp/2.ALL_REDUCE:dp"]
