"""The page's data: complete, exact, and without anything that a browser would have to load."""

import base64
import json
import re
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipeproof.comm.backends import declared_backend
from pipeproof.comm.lower import lower
from pipeproof.schedule.columns import Row
from pipeproof.schedule.op_table import build_graph
from pipeproof.schedule.ops import COMPUTE_KINDS, OpKind, parse_op
from pipeproof.sim.outcome import SimulationError
from pipeproof.sim.simulate import simulate
from pipeproof.sim.timeline import Span, Timeline
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.views.html.relations import Cause, Idle, Relations, cause, critical_path, idle_times
from pipeproof.views.html.timeline_page import CATEGORIES, payload, timeline_html
from tests.plans import plan_spec
from tests.schedule.drawn import generated, plan_of, requests

DTYPES = {"u8": "u1", "u16": "<u2", "u32": "<u4", "f64": "<f8"}


def decoded(column):
    return np.frombuffer(base64.b64decode(column["data"]), dtype=DTYPES[column["type"]])


def data_of(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


@pytest.fixture
def plan(make_plan):
    return make_plan(p=4, m=8, c=1)


def shown(timeline):
    return [s for s in timeline.spans if s.end > s.start or s.queue != "compute" or s.op[1] in "FB"]


def test_every_span_that_takes_time_and_every_message_is_in_the_page_with_its_exact_times(plan):
    timeline = simulate(plan).timeline
    (data,) = data_of(timeline_html("a plan", timeline, plan.graph))["timelines"]
    offsets, names = decoded(data["offsets"]), [data["names"][i] for i in decoded(data["name"])]
    found = set()
    for track, (lane, _) in enumerate(data["tracks"]):
        for i in range(offsets[track], offsets[track + 1]):
            found.add((*data["lanes"][lane], names[i], decoded(data["start"])[i], decoded(data["end"])[i]))
    assert found == {(s.rank, s.queue, s.op, float(s.start), float(s.end)) for s in shown(timeline)}
    assert len(found) == len(names)
    assert data["makespan"] == timeline.makespan_us == 49
    assert len(decoded(data["arrows"]["from"])) == len(timeline.matches)
    for send, recv in zip(decoded(data["arrows"]["from"]), decoded(data["arrows"]["to"]), strict=True):
        assert names[recv] == names[send].replace(names[send][0], names[recv][0], 1).replace("SEND", "RECV")


def assert_path_is_tight(timeline, relations, latency):
    """From the first start to the last end without a gap, and all of it is work or a message that is under way."""
    path = critical_path(relations)
    assert path[0].begin == timeline.first_start
    assert path[-1].end == max(span.end for span in timeline.spans)
    assert all(one.end == after.begin for one, after in pairwise(path))
    for part in path:
        if relations.ops[part.span].kind not in COMPUTE_KINDS:
            assert part.end - part.begin in (0, latency)


def test_the_path_and_the_bubbles_of_a_plan_with_a_network():
    network = {
        "ranks_per_node": 2,
        "node": {"bandwidth": 0.1, "latency_us": 1},
        "between": {"bandwidth": 0.01, "latency_us": 3},
    }
    cost = {"forward_us": 900, "backward_us": 1900, "optimizer_us": 70, "network": network}
    lowered = lower(plan_spec(topology={"pp": 2, "tp": 2, "dp": 2}, cost=cost))
    timeline = simulate(lowered).timeline
    relations = Relations(timeline, lowered.graph)
    path = critical_path(relations)
    assert (path[0].begin, path[-1].end) == (0, timeline.makespan_us)
    assert all(one.end == after.begin for one, after in pairwise(path))
    kinds = {relations.ops[part.span].kind for part in path if part.end > part.begin}
    assert kinds >= {OpKind.FORWARD, OpKind.BACKWARD, OpKind.ALL_REDUCE, OpKind.STEP}
    idles = idle_times(relations, len(timeline.ranks))
    for rank in range(len(timeline.ranks)):  # the rest, neither computation nor idle, is the update
        idle = sum(one.end - one.start for one in idles if one.rank == rank)
        update = timeline.makespan_us - timeline.busy_us(rank) - idle
        mine = [s for s in timeline.spans if s.rank == rank and ("REDUCE_GRAD" in s.op or "STEP" in s.op)]
        assert update == max(s.end for s in mine) - min(s.start for s in mine) > 70


def assert_causes_are_the_path(relations):
    """From the last span of the path, causes lead over every span of it, and no cause begins after its effect ends."""
    path = critical_path(relations)
    span, chain = path[-1].span, []
    while span is not None:
        source, before = cause(relations, span)
        assert all(
            relations.spans[other].start <= relations.spans[span].end for other in (source, before) if other is not None
        )
        chain += [span, source]
        span = before
    assert {end for part in path for end in (part.span, part.source)} <= {*chain, None}


@given(st.data())
@settings(max_examples=40)
def test_the_path_fills_the_makespan_and_bubbles_fill_what_work_leaves(data):
    kind, request = data.draw(requests(max_ranks=4, max_chunks=2))
    generated(kind, request)
    plan = plan_of(kind, request)
    plan["cost"]["p2p"] = data.draw(st.sampled_from(["async", "rendezvous", "backend"]))
    lowered = lower(plan_from_dict(plan).spec)
    backend = replace(declared_backend(lowered.spec), host_blocks_on_post=data.draw(st.booleans()))
    try:
        timeline = simulate(lowered, backend).timeline
    except SimulationError:
        assume(False)
    relations = Relations(timeline, lowered.graph)
    assert_path_is_tight(timeline, relations, lowered.spec.cost.p2p_latency_us)
    assert_causes_are_the_path(relations)
    idles = idle_times(relations, len(timeline.ranks))
    assert Cause.OTHER not in {idle.cause for idle in idles}
    for rank in range(len(timeline.ranks)):
        mine = [idle for idle in idles if idle.rank == rank]
        assert all(one.end <= after.start for one, after in pairwise(mine))
        assert sum(timeline.us(i.end - i.start) for i in mine) == timeline.makespan_us - timeline.busy_us(rank)


def test_the_path_and_the_bubbles_of_a_plan_by_hand():
    """One micro-batch on two ranks: rank 0 waits for the backward that its own first forward leads to."""
    plan = plan_from_dict(SMALL)
    lowered = lower(plan.spec)
    timeline = simulate(lowered).timeline
    relations = Relations(timeline, lowered.graph)
    parts = [part for part in critical_path(relations) if part.end > part.begin]
    told = [(relations.spans[p.span].op, int(p.begin), int(p.end), p.source is not None) for p in parts]
    assert told == [
        ("0F0", 0, 10, False),
        ("1RECV_F0", 10, 15, True),
        ("1F0", 15, 25, False),
        ("1B0", 25, 45, False),
        ("0RECV_B0", 45, 50, True),
        ("0B0", 50, 70, False),
    ]
    assert idle_times(relations, 2) == (
        Idle(0, 10, 50, Cause.MESSAGE, 1),
        Idle(1, 0, 15, Cause.WARM_UP, 0),
        Idle(1, 45, 70, Cause.COOL_DOWN),
    )


SMALL = {
    "pipeproof": 1,
    "model": {
        "kind": "gpt",
        "num_layers": 2,
        "hidden_size": 16,
        "num_heads": 4,
        "ffn_size": 16,
        "vocab_size": 16,
        "seq_length": 8,
    },
    "topology": {"pp": 2},
    "schedule": {"kind": "1f1b", "num_micro_batches": 1, "micro_batch_size": 3},
    "cost": {"forward_us": 10, "backward_us": 20, "p2p_latency_us": 5},
}


def test_a_rank_that_comes_late_to_a_collective_is_who_the_others_wait_for(make_plan, run):
    """Both tensor-parallel ranks run the same program; the second is made to begin its first forward later."""
    lowered = make_plan(p=1, m=1, tp=2, tf=10, tb=20)
    timeline = simulate(lowered).timeline
    gathers = [i for i, op in enumerate(lowered.graph.ops) if str(op).startswith("0F0/")]
    first = next(i for i in gathers if lowered.graph.rank[i] == 0)
    other = next(i for i in lowered.graph.members_of(first) if i != first)
    late = {other: (17, 17), first: (10, 17)}
    spans = [replace(s, start=late[s.op_id][0], end=late[s.op_id][1]) if s.op_id in late else s for s in timeline.spans]
    spans = [replace(s, start=s.start + 7, end=s.end + 7) if s.op == "0B0" else s for s in spans]
    spans = [replace(s, end=17) if s.op == "0F0" and s.rank == 1 else s for s in spans]
    kept = tuple(s for s in spans if s.op_id in late or s.op in ("0F0", "0B0"))
    relations = Relations(replace(timeline, spans=kept), lowered.graph)
    assert Idle(0, 10, 17, Cause.COLLECTIVE, 1) in idle_times(relations, 2)
    path = [(relations.spans[part.span].op, relations.spans[part.span].rank) for part in critical_path(relations)]
    assert ("0F0", 1) in path
    assert ("0F0", 0) not in path


def test_messages_and_collectives_have_the_bytes_that_the_graph_says(make_plan):
    lowered = make_plan(p=2, m=2, tp=2)
    timeline = simulate(lowered).timeline
    data = payload("a plan", timeline, lowered.graph)
    sends = decoded(data["category"]) == CATEGORIES.index("send")
    sequence, hidden, item = 8, 16, 4
    assert set(decoded(data["bytes"])[sends].tolist()) == {sequence * hidden * item}
    assert set(decoded(data["bytes"])[decoded(data["category"]) == CATEGORIES.index("F")].tolist()) == {-1}


def test_spans_of_one_track_never_overlap_and_what_runs_inside_another_has_a_track_of_its_own():
    spans = (
        Span(0, "compute", 0, "0F0", 0.0, 10.0),
        Span(0, "compute", 1, "0F0/0.ALL_REDUCE:tp", 4.0, 6.0),
        Span(0, "compute", 2, "0B0", 10.0, 30.0),
        Span(0, "compute", 3, "0F1", 10.0, 30.0),
    )
    graph = build_graph([[Row(parse_op(span.op)) for span in spans]], [], [])
    data = payload("measured", Timeline(spans, ({"pp": 0},), clock="measured"), graph)
    assert data["tracks"] == [[0, 0], [0, 1]]
    assert decoded(data["offsets"]).tolist() == [0, 2, 4]
    assert [data["names"][i] for i in decoded(data["name"])] == ["0F0", "0B0", "0F0/0.ALL_REDUCE:tp", "0F1"]


def test_the_page_loads_nothing_and_titles_cannot_break_it(plan):
    timeline = simulate(plan).timeline
    title = "</script><script>alert(1)</script><img src=x>&"
    page = timeline_html(title, timeline, plan.graph)
    assert page.count("<script") == page.count("</script>") == 2
    assert "<img" not in page
    assert [one["title"] for one in data_of(page)["timelines"]] == [title]
    assert not re.findall(r"https?:|//[a-z]+\.|@import|url\(", page)
    assert "default-src 'none'" in page


def test_a_graph_of_another_plan_is_refused(plan, make_plan):
    with pytest.raises(ValueError, match="operations that its graph does not have"):
        timeline_html("a", simulate(plan).timeline, make_plan(p=1, m=1).graph)
