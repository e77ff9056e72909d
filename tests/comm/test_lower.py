"""Operations that lowering adds to the programs: peers, channels, slices, gathers, and collectives inside
computations."""

import json
from collections import Counter

import numpy as np
import pytest

import pipeproof.comm.lower as lower_module
from pipeproof.comm.generated_schedule import plan_schedule
from pipeproof.comm.lower import lower
from pipeproof.diagnostics.finding import BadPlanAtError
from pipeproof.diagnostics.source import PlanFileError
from pipeproof.schedule.kinds import ScheduleKind
from pipeproof.schedule.op_table import NONE, EdgeKind
from pipeproof.schedule.ops import CHILD_KINDS, OpKind
from pipeproof.specs.load_plan import load_plan, plan_from_dict
from pipeproof.stages.describe.model_family import describe_boundary
from pipeproof.verify.certificate import graph_digest
from pipeproof.verify.subject import make_subject
from tests.plans import plan_dict, plan_spec, subject


def texts(graph, rank):
    return [str(graph.ops[i]) for i in graph.rank_ops(rank) if graph.ops[i].kind not in CHILD_KINDS]


def test_a_whole_small_program():
    graph = subject(topology={"pp": 2, "tp": 2}, schedule={"num_micro_batches": 1}, transport="partial").graph
    assert texts(graph, 0) == [
        "0F0", "0SLICE_F0", "0SEND_F0", "0RECV_B0", "WAIT(0RECV_B0)", "0GATHER_B0", "WAIT(0SEND_F0)", "0B0", "0STEP",
    ]  # fmt: skip
    assert texts(graph, 3) == [
        "1RECV_F0", "WAIT(1RECV_F0)", "1GATHER_F0", "1F0", "1B0", "1SLICE_B0", "1SEND_B0", "WAIT(1SEND_B0)", "1STEP",
    ]  # fmt: skip


def test_partial_sends_the_share_of_the_tensor_parallel_rank():
    graph = subject(topology={"pp": 2, "tp": 4}, schedule={"num_micro_batches": 1}, transport="partial").graph
    ranges = [
        (int(graph.start[i]), int(graph.stop[i]))
        for rank in range(4)
        for i in graph.rank_ops(rank)
        if graph.ops[i].kind is OpKind.SEND_FORWARD
    ]
    assert ranges == [(0, 64), (64, 128), (128, 192), (192, 256)]  # [s 8, b 2, h 16]


def test_every_transfer_goes_to_the_same_coordinates_of_the_next_stage():
    one = subject(topology={"pp": 3, "tp": 2, "dp": 2})
    graph, mesh = one.graph, one.plan.mesh
    for i, op in enumerate(graph.ops):
        if graph.peer[i] != NONE:
            ours, theirs = mesh.coords(int(graph.rank[i])), mesh.coords(int(graph.peer[i]))
            assert {a: c for a, c in ours.items() if a != "pp"} == {a: c for a, c in theirs.items() if a != "pp"}
            toward = 1 if op.kind in (OpKind.SEND_FORWARD, OpKind.RECV_BACKWARD) else -1
            assert theirs["pp"] - ours["pp"] == toward


@pytest.mark.parametrize("sp", [False, True])
def test_children_are_the_collectives_of_the_layers(sp):
    """Megatron's count per block: two all-reduces each way, or with SP two gathers and two reduce-scatters."""
    one = subject(topology={"pp": 2, "tp": 2, "sequence_parallel": sp}, schedule={"num_micro_batches": 1})
    graph = one.graph
    children = {
        text: Counter(str(graph.ops[c].kind) for c in graph.rank_ops(0) if graph.ops[c].kind in CHILD_KINDS
                      and str(graph.ops[c].target) == text)
        for text in ("0F0", "0B0")
    }  # fmt: skip
    if sp:  # two blocks, and the embedding's reduce-scatter (an all-gather on the way back)
        assert children["0F0"] == {"ALL_GATHER": 4, "REDUCE_SCATTER": 5}
        assert children["0B0"] == {"ALL_GATHER": 5, "REDUCE_SCATTER": 4}
    else:
        assert children["0F0"] == {"ALL_REDUCE": 5}
        assert children["0B0"] == {"ALL_REDUCE": 4}


def test_gradient_reductions_are_one_per_parameter_that_needs_it():
    one = subject(topology={"pp": 1, "tp": 2, "dp": 2, "sequence_parallel": True}, schedule={"num_micro_batches": 1})
    graph = one.graph
    owed = {axis: [] for axis in ("tp", "dp")}
    for i in graph.rank_ops(0):
        op = graph.ops[i]
        if op.kind is OpKind.ALL_REDUCE and op.target.kind is OpKind.REDUCE_GRAD:
            owed[op.axis].append(int(graph.stop[i]))
    num_parameters = sum(len(layer.parameters) for layer in one.plan.layers)
    assert owed["tp"] == [16] * 9  # two norms in each of four blocks and the last one
    assert len(owed["dp"]) == num_parameters == 31


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("num_micro_batches", [2, 4, 6])
def test_every_send_has_its_receive_and_every_transfer_one_later_wait(kind, num_micro_batches):
    schedule = {"kind": kind, "num_micro_batches": num_micro_batches, "num_chunks": 2 if kind == "interleaved" else 1}
    graph = subject(schedule=schedule).graph
    transfers = np.flatnonzero(graph.channel != NONE)
    assert len(transfers) == 4 * num_micro_batches * (3 if kind == "interleaved" else 1)
    assert (graph.match[transfers] != NONE).all()
    for transfer in transfers.tolist():
        op, other = graph.ops[transfer], graph.ops[int(graph.match[transfer])]
        assert (op.micro_batch, op.is_forward) == (other.micro_batch, other.is_forward)
        assert abs(op.stage - other.stage) == 1
        (wait,) = np.flatnonzero(graph.waits_for == transfer).tolist()
        assert wait > transfer


def test_update_comes_last_with_reductions_in_the_order_of_their_groups():
    one = subject(topology={"pp": 1, "tp": 2, "dp": 2, "sequence_parallel": True}, schedule={"num_micro_batches": 1})
    assert texts(one.graph, 0) == ["0F0", "0B0", "0REDUCE_GRAD:tp", "0REDUCE_GRAD:dp", "0STEP"]


def test_replicas_of_a_large_plan_are_lowered_once_and_unfold_to_the_same_graph(monkeypatch):
    sections = {
        "topology": {"pp": 2, "tp": 2, "dp": 2}, "transport": "partial",
        "schedule": {"kind": "interleaved", "num_chunks": 2},
    }  # fmt: skip
    small = subject(**sections)
    monkeypatch.setattr(lower_module, "FOLD_ABOVE", 10)
    folded = subject(**sections)
    assert (folded.graph.num_ranks, small.graph.num_ranks) == (2, 8)
    assert folded.graph.global_rank == (0, 4)
    assert folded.unfolded().graph.columns.equals(small.graph.columns)
    assert graph_digest(folded) == graph_digest(small) == graph_digest(folded.unfolded())
    assert {(g.axis, g.ranks, g.size) for g in folded.graph.groups} == {
        (axis, (rank,), 2) for axis in ("tp", "dp") for rank in (0, 1)
    }


def test_edges_say_why_operations_follow_each_other():
    graph = subject(schedule={"num_micro_batches": 1}).graph
    text = {i: f"{int(graph.rank[i])}:{op}" for i, op in enumerate(graph.ops)}
    edges = {kind: {(text[a], text[b]) for a, b in pairs.tolist()} for kind, pairs in graph.edges.items()}
    assert edges[EdgeKind.MATCH] == {("0:0SEND_F0", "1:1RECV_F0"), ("1:1SEND_B0", "0:0RECV_B0")}
    assert ("1:1RECV_F0", "1:WAIT(1RECV_F0)") in edges[EdgeKind.WAIT]
    assert edges[EdgeKind.DATA] == {
        ("0:0F0", "0:0SEND_F0"), ("1:1RECV_F0", "1:1F0"), ("1:1F0", "1:1B0"), ("1:1B0", "1:1SEND_B0"),
        ("0:0RECV_B0", "0:0B0"), ("0:0F0", "0:0B0"),
    }  # fmt: skip
    assert ("0:0F0", "0:0SEND_F0") in edges[EdgeKind.POST]
    digraph = graph.nx
    assert digraph.number_of_nodes() == len(graph.ops)
    kinds = {kind for _, _, data in digraph.edges(data=True) for kind in data["kinds"]}
    assert kinds <= {str(kind) for kind in EdgeKind}
    assert digraph.nodes[0] == {"rank": 0, "op": "0F0"}


DIGEST_KEEPS = [
    {"cost": {"forward_us": 7}}, {"run": {"seed": 9}}, {"run": {"steps": 3}}, {"run": {"learning_rate": 0.5}},
]  # fmt: skip
DIGEST_CHANGES = [
    {"schedule": {"kind": "gpipe"}}, {"schedule": {"num_micro_batches": 5}}, {"model": {"ffn_size": 48}},
    {"topology": {"pp": 4}}, {"topology": {"order": ["pp", "dp", "ep", "cp", "tp"], "tp": 2}},
    {"run": {"dtype": "float64"}}, {"loss": {"normalization": "mean_of_micro_batches"}},
    {"model": {"activation_order": "bsh"}},
    {"stages": [["embed"], ["layer.0", "layer.1", "layer.2", "layer.3", "norm", "head"]]},
]  # fmt: skip


@pytest.mark.parametrize("sections", DIGEST_KEEPS)
def test_digest_does_not_speak_of_cost_seed_steps_or_rates(sections):
    assert graph_digest(subject(**sections)) == graph_digest(subject())


@pytest.mark.parametrize("sections", DIGEST_CHANGES)
def test_digest_covers_everything_that_changes_what_runs(sections):
    assert graph_digest(subject(**sections)) != graph_digest(subject())


def test_digest_is_the_same_on_every_machine(check_golden):
    """After a change here, every saved state, report and profile belongs to another plan: find out why. No rule does
    it."""
    lines = [
        f"{name} {graph_digest(subject(**sections))}\n"
        for name, sections in {
            "base": {},
            "tp2_sp_partial": {"topology": {"pp": 2, "tp": 2, "sequence_parallel": True}, "transport": "partial"},
            "gpipe_pp4_dp2": {"topology": {"pp": 4, "dp": 2}, "schedule": {"kind": "gpipe"}},
        }.items()
    ]
    check_golden("digests.txt", "".join(lines))


def test_a_plan_too_large_for_memory_is_refused_at_once_and_at_its_place(tmp_path):
    plan = tmp_path / "plan.json"
    huge = plan_dict(model={"num_layers": 64}, topology={"pp": 64, "dp": 512}, schedule={"num_micro_batches": 40960})
    plan.write_text(json.dumps(huge, indent=1))
    with pytest.raises(PlanFileError) as caught:
        make_subject(load_plan(plan))
    (finding,) = caught.value.findings
    assert finding.code == "PP116"
    assert "64 stages and 40960 micro-batches" in finding.message
    assert plan.read_text().splitlines()[finding.location.line - 1].strip().startswith('"num_micro_batches": 40960')


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [("1f1b", {"num_micro_batches": 50_000}), ("seq1f1b", {"num_micro_batches": 50, "num_sequence_splits": 1024}),
     ("zb_v", {"num_micro_batches": 50_000, "num_chunks": 2})],
)  # fmt: skip
def test_too_large_a_schedule_is_refused_before_it_is_generated(monkeypatch, kind, sizes):
    def generate(self, request):
        raise AssertionError(request)

    monkeypatch.setattr(ScheduleKind, "generate", generate)
    large = plan_dict(
        model={"num_layers": 16, "seq_length": 1024},
        topology={"pp": 8},
        schedule={"kind": kind, **sizes},
    )
    for commands in (plan_schedule, lower):
        with pytest.raises(BadPlanAtError) as caught:
            commands(plan_from_dict(large).spec)
        assert (caught.value.findings[0].code, caught.value.path) == ("PP116", ("schedule", "num_micro_batches"))


def test_the_estimate_of_the_size_is_never_too_small():
    for sections in ({}, {"topology": {"pp": 4, "tp": 4, "sequence_parallel": True}, "transport": "partial"}):
        one = subject(**sections, schedule={"num_micro_batches": 8})
        per_batch = 15 * one.plan.spec.topology.pp + sum(
            len(layer.forward_collectives) + len(layer.backward_collectives) for layer in one.plan.layers
        )
        assert one.plan.canonical.num_ops <= 8 * per_batch


@pytest.mark.parametrize(("order", "shape"), [("sbh", (8, 2, 16)), ("bsh", (2, 8, 16))])
def test_boundary_follows_the_dim_order(order, shape):
    spec = plan_spec(model={"activation_order": order}, topology={"tp": 2, "sequence_parallel": True})
    boundary = describe_boundary(spec)
    assert boundary.shape == shape
    assert boundary.tp.dim == order.index("s")
    assert boundary.local_shape == tuple(n // 2 if d == "s" else n for d, n in zip(order, shape, strict=True))
