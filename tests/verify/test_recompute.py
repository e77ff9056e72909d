"""With full recomputation each block's backward issues its forward's collectives first: in the graph, and checked."""

import pytest

from pipeproof.schedule.op_table import build_graph
from pipeproof.schedule.ops import CHILD_KINDS, KIND_CODE, OpKind
from pipeproof.sim.link_costs import link_durations
from pipeproof.verify.check_plan import check_subject
from tests.plans import subject
from tests.verify.programs import codes

STAGES = [["embed"], ["layer.0", "layer.1"], ["layer.2", "layer.3"], ["norm", "head"]]
MOE = {"num_experts": 4, "top_k": 2, "ffn_size": 8, "dense_layers": 3}
MLA = {"q_rank": 12, "kv_rank": 8, "nope_head_size": 6, "rope_head_size": 4, "value_head_size": 8}
DENSE = ["ALL_GATHER:tp", "REDUCE_SCATTER:tp"] * 2
FORWARD = [*DENSE[:3], *["ALL_TO_ALL:ep"] * 3, DENSE[3]]
BACKWARD = [DENSE[0], *["ALL_TO_ALL:ep"] * 2, *DENSE[1:]]


def planned(recompute, kind="zb_h1", modules=("core_attn",), *, regather=False, **sections):
    topology = {"pp": 4, "tp": 2, "sequence_parallel": True, **sections.pop("topology", {})}
    schedule = {"kind": kind, "num_micro_batches": 2}
    memory = {"recompute": recompute, "recompute_modules": list(modules)}
    memory |= {"sequence_parallel_activations": "regather"} if regather else {}
    return subject(topology=topology, schedule=schedule, stages=STAGES, memory=memory, **sections)


def issued(one, parent):
    rank = next(rows for rows in one.graph.rows() if any(str(row.op) == parent for row in rows))
    children = [row.op for row in rank if row.op.kind in CHILD_KINDS and str(row.op.target) == parent]
    return [f"{op.kind}:{op.axis}" for op in children]


@pytest.mark.parametrize(("kind", "backward"), [("zb_h1", "I"), ("1f1b", "B")])
def test_a_backward_issues_both_ways_block_by_block(kind, backward):
    plain, selective, full = (
        planned(which, kind, model={"moe": MOE}, topology={"ep": 2}) for which in ("none", "selective", "full")
    )
    for one in (plain, selective):
        assert issued(one, f"1{backward}0") == 2 * DENSE
        assert issued(one, f"2{backward}0") == BACKWARD + DENSE
    assert issued(full, f"1{backward}0") == 2 * (DENSE + DENSE)
    assert issued(full, f"2{backward}0") == FORWARD + BACKWARD + DENSE + DENSE
    for same in ("0F0", "1F0", "2F0", "3F0", f"0{backward}0", f"3{backward}0"):
        assert issued(full, same) == issued(plain, same), "embedding, norm and head are kept"


@pytest.mark.parametrize(("kind", "backward"), [("zb_h1", "I"), ("1f1b", "B")])
def test_a_backward_issues_a_modules_forward_before_its_backward(kind, backward):
    """The collectives of the MLP (two) and of the experts, and the gathers of compressed queries and keys."""
    modules = ["core_attn", "mlp", "moe"]
    mlps = planned("selective", kind, modules, model={"moe": MOE}, topology={"ep": 2})
    experts = [DENSE[0], *["ALL_TO_ALL:ep"] * 3, DENSE[1]]
    assert issued(mlps, f"1{backward}0") == 2 * (DENSE[:2] + DENSE)
    assert issued(mlps, f"2{backward}0") == experts + BACKWARD + DENSE[:2] + DENSE
    latent, plain = (
        planned(which, kind, modules, model={"mla": MLA}, regather=True)
        for which, modules in (("selective", ["mla_up_proj"]), ("none", ["core_attn"]))
    )
    before, after = issued(plain, f"1{backward}0"), issued(latent, f"1{backward}0")
    assert len(after) == len(before) + 2 * 2
    assert [one for one in after if one == "ALL_GATHER:tp"].count("ALL_GATHER:tp") == before.count("ALL_GATHER:tp") + 4
    assert codes(mlps) == codes(latent) == set()


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_what_a_backward_leaves_out_or_adds_is_found(recompute):
    """On all members: the rows of the one plan in the place of the other's."""
    ours, theirs = (planned(which) for which in (recompute, "full" if recompute == "none" else "none"))
    assert codes(ours) == set()
    changed = ours.with_graph(build_graph(theirs.graph.rows(), theirs.graph.tensors, theirs.graph.groups))
    assert codes(changed) == {"PP208"}
    (message, *_) = [f.message for f in check_subject(changed).findings if f.code == "PP208"]
    fact = "as its collective 8, and needs none" if recompute == "none" else "issues 8 collectives and needs 16"
    assert fact in message


def test_the_network_has_them_inside_the_backward():
    inside = {}
    for recompute in ("none", "full"):
        plan = planned(recompute, cost={"analytic": "h200", "network": {}}).plan
        timed = link_durations(plan, plan.links).inside
        graph = plan.graph
        inside[recompute] = {
            kind: set(timed[(graph.kind == KIND_CODE[kind]) & (graph.stage == 1)].tolist())
            for kind in (OpKind.FORWARD, OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT)
        }
    assert inside["full"][OpKind.FORWARD] == inside["none"][OpKind.FORWARD]
    assert inside["full"][OpKind.BACKWARD_WEIGHT] == inside["none"][OpKind.BACKWARD_WEIGHT] == {0}
    (forward,) = inside["none"][OpKind.FORWARD]
    (backward,) = inside["none"][OpKind.BACKWARD_INPUT]
    assert inside["full"][OpKind.BACKWARD_INPUT] == {forward + backward}
    assert forward > 0
