"""Losses of routers and sums of experts' loads in the graph: the terms of each, and the ranks that sum it."""

import dataclasses

import pytest

from pipeproof.schedule.ops import OpKind
from pipeproof.sim.simulate import simulate
from pipeproof.stages.describe.gradient_facts import router_loss_scales, work_item_weight
from pipeproof.stages.describe.layer import COUNTS_DTYPE
from pipeproof.verify.certificate import graph_digest
from tests.plans import subject
from tests.verify.gradient_mutants import changed, own
from tests.verify.programs import errors, mutated

MOE = {"num_experts": 12, "top_k": 3, "ffn_size": 8, "dense_layers": 1}
LOSSES = {"aux_loss": 0.01, "z_loss": 1e-05}
MESH = {"pp": 2, "tp": 2, "ep": 2, "dp": 2, "sequence_parallel": True}


def balanced(topology=MESH, schedule=(), **moe):
    return subject(model={"moe": {**MOE, **moe}}, topology=topology, schedule=dict(schedule))


V = {"kind": "zb_v", "num_chunks": 2}


@pytest.mark.parametrize(
    "schedule",
    [{}, V, {"kind": "dualpipe"}, {"kind": "interleaved", "num_chunks": 2}, {"reduce_gradients": "when_ready"}],
)
@pytest.mark.parametrize("topology", [MESH, {"pp": 2}, {"pp": 2, "cp": 2, "ep": 2}])
def test_balanced_plans_are_proved_and_simulated(topology, schedule):
    if topology == {"pp": 2} and "reduce_gradients" in schedule:
        schedule = {}
    seen = balanced(topology, schedule, **LOSSES, expert_bias_rate=0.001)
    assert errors(seen) == []
    assert simulate(seen.plan).makespan > 0


def test_pieces_of_sequences_share_out_the_loss():
    seen = balanced({"pp": 2}, {"kind": "seq1f1b", "num_sequence_splits": 2}, **LOSSES)
    assert errors(seen) == []
    assert router_loss_scales(seen.plan.spec)["z"] == "0.00001/num_micro_batches/data_ranks/2"
    assert work_item_weight(seen.plan.spec) == 1 / 4 / 2


@pytest.mark.parametrize(
    "topology", [{"pp": 1}, {"pp": 4}, {"pp": 2, "tp": 2}, {"pp": 2, "tp": 4, "sequence_parallel": True}]
)
def test_the_factor_depends_on_neither_stages_nor_tensor_parallel_ranks(topology):
    seen = balanced(topology, **LOSSES)
    assert work_item_weight(seen.plan.spec) == 1 / 4
    assert router_loss_scales(seen.plan.spec) == {
        "aux": "0.01/num_micro_batches/data_ranks", "z": "0.00001/num_micro_batches/data_ranks"
    }  # fmt: skip


WRONG_SCALES = {
    "twice the factor": "aux:0.02/num_micro_batches/data_ranks",
    "by the tensor-parallel ranks": "aux:0.01/num_micro_batches/data_ranks/tp",
    "not by the data ranks": "aux:0.01/num_micro_batches",
    "as if it were of tokens": "aux:0.01/global_tokens",
    "left out": "aux:0",
    "the other loss": "z:0.01/num_micro_batches/data_ranks",
}


@pytest.mark.parametrize("name", WRONG_SCALES)
def test_a_wrong_factor_is_found_by_the_one_rule_on_auxiliary_losses(name):
    wrong = mutated(balanced(**LOSSES), changed("=1F2=", scale=WRONG_SCALES[name]))
    assert {one.code for one in errors(wrong)} == {"PP607"}
    assert own(wrong) == {"PP607"}


def test_a_factor_that_is_written_out_is_right():
    scale = "aux:0.01/num_micro_batches/data_ranks,z:0.00001/num_micro_batches/data_ranks"
    assert errors(mutated(balanced(**LOSSES), changed("=1F2=", scale=scale))) == []


def test_a_stage_without_experts_has_no_loss_of_routers():
    wrong = mutated(balanced(dense_layers=2, **LOSSES), changed("=0F0=", scale="aux:0.01"))
    (found,) = errors(wrong)
    assert "stage 0 has no loss `aux`; it has none" in found.message


def sums_of_loads(seen):
    return [row for program in seen.graph.rows() for row in program if _is_of_loads(seen, row)]


def _is_of_loads(seen, row):
    of_counts = row.tensor >= 0 and seen.graph.tensors[row.tensor].dtype == COUNTS_DTYPE
    return of_counts and row.op.kind is OpKind.ALL_REDUCE


@pytest.mark.parametrize(("topology", "axes"), [(MESH, {"ep", "dp"}), ({"pp": 2, "tp": 2}, set()), ({"dp": 2}, {"dp"})])
def test_loads_are_summed_over_ranks_with_tokens_of_their_own(topology, axes):
    seen = balanced(topology, expert_bias_rate=0.001)
    found = sums_of_loads(seen)
    assert {row.op.axis for row in found} == axes
    assert all(row.stop == 12 for row in found)
    routers = 3  # of four blocks the first is dense
    assert len(found) == routers * len(axes) * seen.graph.num_ranks // 2
    assert sums_of_loads(balanced(topology)) == []


def test_copies_of_a_stage_sum_their_loads():
    seen = balanced({"pp": 2}, {"kind": "dualpipe"}, expert_bias_rate=0.001)
    assert {row.op.axis for row in sums_of_loads(seen)} == {"pp"}


def lost(seen, axis):
    def change(rows):
        for program in rows:
            program[:] = [row for row in program if not (_is_of_loads(seen, row) and row.op.axis == axis)]

    return change


@pytest.mark.parametrize("axis", ["ep", "dp"])
def test_loads_that_are_not_summed_are_found(axis):
    seen = balanced(expert_bias_rate=0.001)
    found = errors(mutated(seen, lost(seen, axis)))
    assert {one.code for one in found} == {"PP601"}
    assert any("router.bias" in one.message for one in found)


def test_loads_that_are_averaged_are_found():
    seen = balanced(expert_bias_rate=0.001)

    def change(rows):
        for program in rows:
            program[:] = [
                dataclasses.replace(row, reduction="avg") if _is_of_loads(seen, row) else row for row in program
            ]

    found = [one for one in errors(mutated(seen, change)) if "router.bias" in one.message]
    assert found


def test_what_balances_is_part_of_the_digest():
    plain = graph_digest(balanced())
    for moe in ({"aux_loss": 0.1}, {"z_loss": 0.1}, {"expert_bias_rate": 0.1}):
        assert graph_digest(balanced(**moe)) != plain
