"""Pairs that alternate: rows, order, data edges, queues, and what is refused."""

import numpy as np
import pytest

from pipeproof.comm.lower import lower, own_schedule
from pipeproof.diagnostics.finding import BadPlanAtError
from pipeproof.diagnostics.source import PlanFileError
from pipeproof.schedule.op_table import NONE, EdgeKind
from pipeproof.schedule.ops import PART_KINDS, OpKind
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.verify.certificate import graph_digest
from pipeproof.verify.subject import make_subject
from tests.plans import plan_dict

MOE = {"num_experts": 4, "top_k": 2, "ffn_size": 16}
V = {"kind": "dualpipe_v", "num_chunks": 2, "overlap": "pairs"}


def plan(moe=MOE, schedule=V, topology=None, **sections):
    return plan_from_dict(
        plan_dict(model={"moe": moe}, topology={"pp": 2, "ep": 2, **(topology or {})}, schedule=schedule, **sections)
    )


def graph(**sections):
    return lower(plan(**sections).spec).graph


def first_pair(graph):
    ids = list(graph.rank_ops(0))
    first = next(i for i in ids if graph.batch[i] != NONE)
    last = max(i for i in ids if graph.parent[i] in (first, first + 1))
    return [str(graph.ops[i]) for i in range(first, last + 1)]


def test_rows_of_a_pair():
    assert first_pair(graph()) == [
        "0F3", "3B1",
        "3B1/0.PART", "3B1/0.ALL_TO_ALL:ep", "3B1/0.WEIGHTS",
        "0F3/0.PART", "0F3/0.ALL_TO_ALL:ep", "0F3/1.PART",
        "3B1/1.PART", "0F3/1.ALL_TO_ALL:ep", "3B1/1.ALL_TO_ALL:ep", "3B1/1.WEIGHTS",
        "0F3/2.PART", "0F3/2.ALL_TO_ALL:ep",
        "3B1/2.PART", "3B1/2.WEIGHTS",
        "0F3/3.PART",
    ]  # fmt: skip


def test_an_order_of_one_s_own():
    rows = first_pair(graph(schedule={**V, "overlap": {"order": ["F", "B"]}}))
    assert rows[2] == "0F3/0.PART"
    assert rows[-1] == "3B1/0.WEIGHTS"
    assert sum("WEIGHTS" in row for row in rows) == 1


@pytest.mark.parametrize(
    ("order", "around"),
    [
        (["B", "F", "W"], ("3B1/0.WEIGHTS", "3B1/1.PART")),
        (["F", "B"], ("3B1/0.PART", "3B1/0.ALL_TO_ALL:ep")),
        (["B", "W", "F"], ("3B1/1.PART", "3B1/1.ALL_TO_ALL:ep")),
    ],
)
def test_a_dispatch_is_issued_behind_what_the_other_side_computes(order, around):
    rows = first_pair(graph(schedule={**V, "overlap": {"order": order}}))
    place = rows.index("0F3/1.ALL_TO_ALL:ep")
    assert (rows[place - 1], rows[place + 1]) == around
    assert rows.index("0F3/1.PART") < place


def test_collectives_of_the_other_half_on_the_compute_queue_do_not_end_its_segment():
    rows = first_pair(graph(topology={"tp": 2}, schedule={**V, "overlap": {"order": ["F", "B"]}}))
    place = rows.index("0F3/3.ALL_TO_ALL:ep")
    assert rows[place - 4 : place + 2] == [
        "0F3/3.PART",
        "3B1/0.PART", "3B1/0.ALL_REDUCE:tp", "3B1/1.PART", "0F3/3.ALL_TO_ALL:ep", "3B1/1.ALL_TO_ALL:ep",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (["F", "B"], ["3F2/1.PART", "0B0/0.PART", "3F2/1.ALL_TO_ALL:ep", "3F2/2.PART"]),
        (["F", "W", "B"], ["3F2/1.PART", "0B0/0.PART", "3F2/1.ALL_TO_ALL:ep", "3F2/2.PART"]),
        (["B", "W", "F"], ["0B0/0.WEIGHTS", "3F2/0.PART", "3F2/0.ALL_TO_ALL:ep", "3F2/1.PART", "3F2/1.ALL_TO_ALL:ep"]),
        (["B", "F", "W"], ["3F2/1.PART", "0B0/0.WEIGHTS", "3F2/1.ALL_TO_ALL:ep", "3F2/2.PART"]),
    ],
)
def test_a_dispatch_at_the_end_of_the_other_side(order, expected):
    made = graph(moe={**MOE, "dense_layers": 2}, schedule={**V, "overlap": {"order": order}})
    rows = [str(made.ops[i]) for i in made.rank_ops(0)]
    place = rows.index(expected[0])
    assert rows[place : place + len(expected)] == expected


def test_gathers_of_tokens_are_issued_together():
    rows = first_pair(graph(moe={**MOE, "dispatcher": "all_gather"}))
    place = rows.index("0F3/0.ALL_GATHER:ep")
    assert rows[place + 1] == "0F3/1.ALL_GATHER:ep"
    assert rows[place + 2].startswith("3B1")
    place = rows.index("3B1/1.REDUCE_SCATTER:ep")
    assert rows[place + 1 : place + 3] == ["3B1/2.REDUCE_SCATTER:ep", "3B1/1.WEIGHTS"]


def test_collectives_over_tp_are_on_the_compute_queue_between_parts():
    made = graph(topology={"tp": 2})
    over_tp = [i for i in range(made.num_ops) if made.ops[i].axis == "tp" and made.part_before[i] != NONE]
    assert over_tp
    assert {made.queues[int(made.queue[i])] for i in over_tp} == {"compute"}
    assert {made.ops[int(made.part_before[i])].kind for i in over_tp} == {OpKind.PART}


def test_parents_and_data_edges():
    made = graph()
    parts = np.flatnonzero(made.is_kind(PART_KINDS))
    assert len(parts)
    assert [str(made.ops[int(made.parent[i])]) for i in parts] == [str(made.ops[i].target) for i in parts]
    edges = {(a, b) for a, b in made.edges[EdgeKind.DATA].tolist() if made.parent[b] != NONE}
    chains = {}
    for a, b in edges:
        assert made.parent[a] == made.parent[b]
        chains[b] = a
    for i in parts:
        op = made.ops[i]
        assert (i in chains) == (op.kind is OpKind.PART and op.index > 0)


def test_every_collective_of_a_pair_over_ep_is_on_the_queue_ep():
    made = graph()
    inside = np.flatnonzero(made.part_before != NONE)
    over_ep = [i for i in inside if made.ops[i].axis == "ep"]
    assert {made.queues[int(made.queue[i])] for i in over_ep} == {"ep"}
    assert (made.queue[made.is_kind(PART_KINDS)] == 0).all()


def test_unfolded_and_folded_graphs_have_the_same_programs():
    made = graph()
    texts = [[str(made.ops[i]) for i in made.rank_ops(rank)] for rank in range(made.num_ranks)]
    assert made.num_ranks == 4
    assert texts[0] == texts[1]


def test_without_overlap_nothing_changes():
    plain = {key: value for key, value in V.items() if key != "overlap"}
    both = (plain, {**plain, "overlap": "none"})
    digests = {graph_digest(make_subject(plan(schedule=schedule))) for schedule in both}
    assert len(digests) == 1
    assert graph_digest(make_subject(plan())) not in digests


@pytest.mark.parametrize(
    ("sections", "path"),
    [
        ({"schedule": {"overlap": "pairs", "kind": "zb_h1"}}, "schedule.overlap"),
        ({"topology": {"ep": 1}}, "schedule.overlap"),
        ({"moe": None}, "schedule.overlap"),
        ({"memory": {"recompute": "full"}}, "memory.recompute"),
        ({"cost": {"overlapped_us": 3}}, "cost.overlapped_us"),
        ({"cost": {"analytic": {"device": "h100", "overlap": ["ep"]}}}, "cost.analytic.overlap"),
        ({"schedule": {**V, "overlap": {"order": ["F", "F"]}}}, "schedule.overlap.order"),
        ({"schedule": {**V, "overlap": "all"}}, "schedule.overlap"),
    ],
)
def test_refused(sections, path):
    with pytest.raises(PlanFileError) as error:
        plan(**sections)
    assert [finding.code for finding in error.value.findings] == ["PP106"]
    assert f"`{path}" in error.value.findings[0].message
    assert error.value.findings[0].help is not None or "must be" in error.value.findings[0].message


def test_programs_of_one_s_own_need_pairs():
    programs = [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
    schedule = {"kind": "custom", "programs": programs, "num_micro_batches": 2, "overlap": "pairs"}
    loaded = plan_from_dict(plan_dict(model={"moe": MOE}, topology={"ep": 2}, schedule=schedule))
    with pytest.raises(BadPlanAtError) as error:
        lower(loaded.spec, foreign=own_schedule(loaded))
    assert error.value.path == ("schedule", "overlap")
