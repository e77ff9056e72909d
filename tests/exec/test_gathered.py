"""Activations regathered for weight gradients: less memory until W, described, found when left out."""

import dataclasses

import pytest

from pipeproof.comm import lower as lowering
from pipeproof.schedule.op_table import build_graph
from pipeproof.sim.simulate import simulate
from pipeproof.stages.describe.gpt import describe_gpt
from tests.exec.test_reference_bits import MLA
from tests.plans import subject
from tests.verify.programs import codes

SP = {"pp": 2, "tp": 2, "sequence_parallel": True}
AGAIN = {"sequence_parallel_activations": "regather"}


def planned(**sections):
    return subject(topology={**SP, **sections.pop("topology", {})}, **{"memory": AGAIN, **sections})


@pytest.mark.needs_paddle
@pytest.mark.usefixtures("few_objects")
def test_what_two_blocks_hold_between_forward_and_weights():
    """Bytes of the host's allocator on both ranks: the two gathered inputs of each block are not there, nor after I."""
    from tests.stages.references import make_plan
    from tests.stages.test_recompute import allocated
    from tests.stages.test_split_backward import Ranks

    now = {}
    for activations in ("keep", "regather"):
        plan = make_plan(
            topology={"tp": 2, "sequence_parallel": True}, memory={"sequence_parallel_activations": activations}
        )
        ranks = Ranks(plan, "middle")
        before = allocated()
        ran = ranks.world.run(lambda rank, ranks=ranks: ranks.forward(rank, 0))
        after_forward = allocated()
        defer = ranks.world.run(
            lambda rank, ranks=ranks, ran=ran: ranks.stages[rank].backward_input(
                ran[rank][1], ranks.gradient_of(ran[rank][1], 0)
            )
        )
        del ran
        after_input = allocated()
        now[activations] = after_forward - before, after_input - before
        del defer
    of_gathered = 4 * 8 * 2 * 16
    assert [kept - again for kept, again in zip(now["keep"], now["regather"], strict=True)] == [
        2 * 2 * 2 * of_gathered
    ] * 2


def test_the_weights_gradients_of_a_stage_gather_in_the_order_of_the_backward():
    one = planned(schedule={"kind": "zb_h1", "num_micro_batches": 1})
    graph = one.unfolded().graph
    below = [i for i in graph.rank_ops(one.plan.ranks_of_stage(1)[0]) if str(graph.ops[i].target) == "1W0"]
    per_token = 8 * 2 * 16 // 2
    assert [int(graph.stop[i] - graph.start[i]) for i in below] == [per_token] * 5  # the head, two of each block
    whole = planned(schedule={"num_micro_batches": 1}).graph
    calls = [str(whole.ops[i]).split(".")[-1] for i in whole.rank_ops(0) if str(whole.ops[i].target) == "0B0"]
    assert calls[-4:] == ["ALL_GATHER:tp"] * 4


@pytest.mark.parametrize("left_out", ["1W2/0.ALL_GATHER:tp", "0W0/3.ALL_GATHER:tp"])
def test_a_gather_that_all_ranks_leave_out_is_found(left_out):
    one = planned(schedule={"kind": "zb_h1"})
    rows = [[row for row in rank if str(row.op) != left_out] for rank in one.graph.rows()]
    assert rows != one.graph.rows()
    assert "PP208" in codes(one.with_graph(build_graph(rows, one.graph.tensors, one.graph.groups)))


def test_a_description_that_gathers_for_no_weight_is_found(monkeypatch):
    def wrong(plan, *size):
        return tuple(
            dataclasses.replace(
                layer,
                forward_collectives=tuple(
                    dataclasses.replace(c, feeds_weights=False) for c in layer.forward_collectives
                ),
            )
            for layer in describe_gpt(plan, *size)
        )

    assert codes(planned()) == set()
    monkeypatch.setattr(lowering, "describe_layers", wrong)
    assert codes(planned()) == {"PP207", "PP208"}


def test_positions_of_latent_attention_are_not_gathered_again_for_no_weight_reads_them():
    (layer,) = (layer for layer in planned(model={"mla": MLA}).plan.layers if layer.name == "layer.1")
    assert [c.label for c in layer.forward_collectives if c.feeds_weights] == [
        f"layer.1.{part}.in" for part in ("attn.q", "attn.kv", "mlp")
    ]


def test_a_simulation_takes_the_plan():
    cost = {"analytic": {"device": "h200", "execution": "graph"}}  # else the host limits so small a model
    kept, again = (
        simulate(planned(memory={"sequence_parallel_activations": a}, cost=cost).plan) for a in ("keep", "regather")
    )
    assert again.makespan > kept.makespan
