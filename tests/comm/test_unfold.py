"""The graph of every rank, from the folded one: own rows, peers on the same replica, own groups and ranges."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from pipeproof.comm.lower import lower_loaded
from pipeproof.diagnostics.source import PlanFileError
from pipeproof.schedule.columns import NONE
from pipeproof.specs.load_plan import plan_from_dict
from tests.features import schedule_of
from tests.plans import plan_dict

AXES = ("tp", "cp", "ep", "dp", "pp")


@st.composite
def plans(draw):
    tp, ep = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2]))
    topology = {
        "pp": draw(st.sampled_from([2, 4])), "tp": tp, "ep": ep, "cp": draw(st.sampled_from([1, 2])),
        "dp": draw(st.sampled_from([1, 2, 3])), "order": draw(st.permutations(AXES)),
        "sequence_parallel": tp > 1 and draw(st.booleans()),
    }  # fmt: skip
    experts = {"moe": {"num_experts": 4, "top_k": 2}} if ep > 1 else {}
    kind = draw(st.sampled_from(["1f1b", "zb_v", "interleaved", "dualpipe"]))
    transport = {"forward": draw(st.sampled_from(["full", "partial"])), "backward": "full"}
    run = {"clip_norm": 1.0} if draw(st.booleans()) else {}
    model = {"num_layers": 8, "tied_embedding": draw(st.booleans()), **experts}
    schedule = {**schedule_of(kind), "num_micro_batches": 8}
    try:
        return lower_loaded(
            plan_from_dict(plan_dict(topology=topology, model=model, schedule=schedule, transport=transport, run=run))
        )
    except PlanFileError:
        assume(False)


@given(plans())
def test_each_rank_has_the_rows_of_its_replica_with_its_own_peers_groups_and_ranges(plan):
    folded, graph, mesh = plan.canonical, plan.unfolded().graph, plan.mesh
    assert graph.num_ranks == mesh.num_ranks
    for rank in range(mesh.num_ranks):
        coords = mesh.coords(rank)
        source = folded.global_rank.index(mesh.rank(dict.fromkeys(AXES, 0) | {"pp": coords["pp"]}))
        own, theirs = ([g.row(i) for i in g.rank_ops(r)] for g, r in ((graph, rank), (folded, source)))
        for row, represented in zip(own, theirs, strict=True):
            if row.peer != NONE:
                assert mesh.coords(row.peer) == coords | {"pp": mesh.coords(row.peer)["pp"]}
                assert mesh.coords(row.peer)["pp"] == mesh.coords(folded.global_rank[represented.peer])["pp"]
            if row.group != NONE:
                group = graph.groups[row.group]
                assert rank in group.ranks
                moving = {axis for axis in AXES if len({mesh.coords(r)[axis] for r in group.ranks}) > 1}
                assert moving == {group.axis}
            tp = coords["tp"] * represented.shift
            assert row == replace(
                represented, peer=row.peer, group=row.group, shift=0,
                start=represented.start + tp, stop=represented.stop + tp,
            )  # fmt: skip


@given(plans())
def test_groups_are_those_of_the_mesh(plan):
    graph, mesh = plan.unfolded().graph, plan.mesh
    for axis in ("tp", "cp", "ep", "dp"):
        members = [group.ranks for group in graph.groups if group.axis == axis]
        assert members == [group.ranks for group in mesh.groups(axis) if len(group.ranks) > 1]
        assert all(group.copies == 1 for group in graph.groups)
