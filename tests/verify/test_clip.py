"""Clipping to a global norm: the place of its sums in the programs, and findings on other programs."""

from dataclasses import replace

import pytest

from pipeproof.comm.step_end_rows import counted_by, num_weights
from pipeproof.diagnostics.source import PlanFileError
from pipeproof.schedule.op_table import build_graph
from pipeproof.schedule.ops import OpKind
from pipeproof.sim.simulate import simulate
from pipeproof.verify.certificate import graph_digest
from tests.plans import subject
from tests.verify.gradient_mutants import changed, double, drop, moved
from tests.verify.programs import errors, mutated

MESH = {"pp": 2, "tp": 2, "dp": 2, "sequence_parallel": True}


def clipped(topology=MESH, schedule=(), **model):
    return subject(topology=topology, schedule=dict(schedule), model=model, run={"clip_norm": 1.0})


V = {"kind": "zb_v", "num_chunks": 2}
TWO_WAYS = {"kind": "dualpipe", "num_micro_batches": 8}


@pytest.mark.parametrize("schedule", [{}, V, TWO_WAYS, {"kind": "interleaved", "num_chunks": 2}])
@pytest.mark.parametrize("topology", [MESH, {"pp": 4}, {"pp": 2, "cp": 2, "ep": 2}])
def test_clipped_plans_are_proved_and_simulated(topology, schedule):
    seen = clipped(topology, schedule, num_layers=8, tied_embedding=True)
    assert errors(seen) == []
    assert simulate(seen.plan).makespan > 0


def test_the_norm_comes_after_all_sums_and_before_the_first_step():
    graph = clipped(schedule=V).graph
    kinds = (OpKind.REDUCE_GRAD, OpKind.ALL_REDUCE, OpKind.STEP)
    texts = [str(graph.ops[i]) for i in graph.rank_ops(0) if graph.ops[i].kind in kinds and graph.parent[i] < 0]
    assert texts == [
        "0REDUCE_GRAD:tp", "0REDUCE_GRAD:dp", "3REDUCE_GRAD:tp", "3REDUCE_GRAD:dp",
        "0ALL_REDUCE:tp", "0ALL_REDUCE:pp", "0STEP", "3STEP",
    ]  # fmt: skip


def test_without_a_limit_nothing_is_summed():
    assert OpKind.ALL_REDUCE not in {op.kind for op in subject(topology={"pp": 2}).graph.ops}


def test_one_rank_has_the_norm_by_itself():
    alone, plain = clipped({"pp": 1, "dp": 2}), subject(topology={"pp": 1, "dp": 2})
    assert alone.graph.num_ops == plain.graph.num_ops
    assert graph_digest(alone) != graph_digest(plain)


@pytest.mark.parametrize(
    ("schedule", "model"),
    [({}, {}), (V, {"tied_embedding": True}), (TWO_WAYS, {"tied_embedding": True}), ({}, {"tied_embedding": True})],
)
@pytest.mark.parametrize("topology", [MESH, {"pp": 2, "ep": 2}])
def test_every_element_of_every_gradient_counts_on_one_rank(topology, schedule, model):
    """Along each axis over which a weight is cut all ranks, along any other one; dp ranks each for themselves."""
    plan = clipped(topology, schedule, **model).unfolded().plan
    times = {}
    for rank in range(plan.mesh.num_ranks):
        coords = plan.mesh.coords(rank)
        for place, stage, name in counted_by(plan, coords):
            assert rank in plan.ranks_of_stage(stage)
            times.setdefault((coords["dp"], place, name), []).append((coords["tp"], coords["ep"]))
    weights = [weight for layer in plan.layers for weight in layer.parameters]
    assert len(times) == plan.mesh.size("dp") * len(weights) == plan.mesh.size("dp") * num_weights(plan)
    for (_, place, name), parts in times.items():
        assert weights[place].name == name
        cut = [range(plan.mesh.size(axis) if axis in weights[place].sharded_over else 1) for axis in ("tp", "ep")]
        assert sorted(parts) == [(tp, ep) for tp in cut[0] for ep in cut[1]]


WRONG = {
    "no sum over stages": ((drop("0ALL_REDUCE:pp", "1ALL_REDUCE:pp"),), "is summed over pp never"),
    "no sum over tp": ((drop("0ALL_REDUCE:tp", "1ALL_REDUCE:tp"),), "is summed over tp never"),
    "two sums": ((double("ALL_REDUCE:pp"),), "is summed over pp 2 times"),
    "a maximum": ((changed("0ALL_REDUCE:tp=", reduction="max"), changed("1ALL_REDUCE:tp=", reduction="max")),
                  "is not a sum over tp"),
    "one number short": ((changed("ALL_REDUCE:pp=", stop=30),), "has 30 entries over pp, and the model 31 weights"),
    "the first number left out": ((changed("ALL_REDUCE:pp=", start=1),), "has 30 entries over pp, and the model 31"),
    "before gradients are summed": (
        (moved("0ALL_REDUCE:pp", "0REDUCE_GRAD:dp"), moved("1ALL_REDUCE:pp", "1REDUCE_GRAD:dp")),
        "is summed over pp before gradients are whole",
    ),
    "after the optimizer": (
        (moved("0STEP", "0ALL_REDUCE:pp"), moved("1STEP", "1ALL_REDUCE:pp")),
        "is summed over pp after 0STEP has used it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_another_norm_is_found(name):
    changes, reported = WRONG[name]
    found = [one for one in errors(mutated(clipped(), *changes)) if one.code == "PP611"]
    assert found
    assert reported in found[0].message


def test_a_norm_over_a_part_of_the_stages_is_found():
    """Two pairs of stages, each with a norm of its own: nothing hangs, and each pair scales by another factor."""
    seen = clipped({"pp": 4})
    rows, place = seen.graph.rows(), len(seen.graph.groups)
    whole = next(i for i, one in enumerate(seen.graph.groups) if len(one.ranks) == 4)
    groups = (*seen.graph.groups, *(replace(seen.graph.groups[whole], ranks=pair) for pair in ((0, 1), (2, 3))))
    for rank, program in enumerate(rows):
        program[:] = [
            replace(row, group=place + rank // 2) if row.op.kind is OpKind.ALL_REDUCE and row.op.target is None else row
            for row in program
        ]
    found = errors(seen.with_graph(build_graph(rows, seen.graph.tensors, groups)))
    assert [one.code for one in found] == ["PP611"]
    assert "and 3 more: the norm of the gradients is summed over 2 of 4 pp ranks" in found[0].message


def test_a_norm_between_two_optimizer_steps_of_a_rank_is_found():
    one = mutated(clipped(schedule=V), moved("0STEP", "0ALL_REDUCE:pp"))
    (found,) = [finding for finding in errors(one) if finding.code == "PP611"]
    assert "is summed over pp after 0STEP has used it" in found.message


@pytest.mark.parametrize(("ranks", "more"), [([0], ""), ([0, 1], " and 1 more")])
def test_ranks_with_one_mistake_are_one_finding(ranks, more):
    def without_group(rows):
        for rank in ranks:
            rows[rank][:] = [
                replace(row, group=-1) if str(row.op) == f"{rank}ALL_REDUCE:pp" else row for row in rows[rank]
            ]

    (found,) = [finding for finding in errors(mutated(clipped({"pp": 2}), without_group)) if finding.code == "PP611"]
    assert found.message.endswith(f"{more}: the norm of the gradients is summed over 0 of 2 pp ranks")
    assert (" more" in found.message) == bool(more)
    assert [op.op for op in found.witness.ops] == ["0ALL_REDUCE:pp"]


def test_a_file_with_its_own_communication_is_not_clipped():
    programs = [
        ["0F0", "0SEND_F0", "0RECV_B0", "WAIT(0RECV_B0)", "0B0", "WAIT(0SEND_F0)"],
        ["1RECV_F0", "WAIT(1RECV_F0)", "1F0", "1B0", "1SEND_B0", "WAIT(1SEND_B0)"],
    ]
    schedule = {"kind": "custom", "programs": programs, "num_micro_batches": 1}
    with pytest.raises(PlanFileError, match="has its own communication, in which no norm is summed") as refused:
        subject(schedule=schedule, run={"clip_norm": 1.0})
    assert [one.code for one in refused.value.findings] == ["PP106"]
    assert errors(subject(schedule=schedule)) == []
