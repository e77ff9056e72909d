"""Edges past the next stage, passed on or sent directly: findings in changed programs, times and memory."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.diagnostics.finding import PipeproofError
from pipeproof.exec.rank.executor_support import require_issuable
from pipeproof.schedule.columns import Row
from pipeproof.schedule.formats.text_form import format_program, parse_program
from pipeproof.schedule.op_table import build_graph
from pipeproof.schedule.ops import OpKind, free_of, parse_op
from pipeproof.sim.simulate import simulate
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.verify.check_plan import check_subject
from pipeproof.verify.subject import make_subject
from tests.plans import refusal

FIRST = {"name": "first", "producer": "l0", "consumers": ["l3"], "shape": ["b", 8]}
SECOND = {**FIRST, "name": "second", "shape": ["b", 8]}
CACHED = {**FIRST, "consumers": ["l1", "l3"]}


def plan(edges, route="direct", pp=4, num_layers=4, **schedule):
    layers = [{"name": f"l{n}", "out": [{"shape": ["b", 4]}] if n < num_layers - 1 else []} for n in range(num_layers)]
    return {
        "pipeproof": 1,
        "model": {"kind": "layers", "layers": layers},
        "edges": [{"route": route, **edge} for edge in edges],
        "topology": {"pp": pp},
        "schedule": {"kind": "1f1b", "num_micro_batches": 4, "micro_batch_size": 2, **schedule},
        "loss": {"normalization": "mean_of_micro_batches"},
        "cost": {"forward_us": 7, "backward_us": 11, "p2p_latency_us": 2},
    }


INTERLEAVED = {"pp": 2, "kind": "interleaved", "num_chunks": 2}
"""Stages 0 and 2 on rank 0, 1 and 3 on rank 1."""


def subject_of(edges, **options):
    return make_subject(plan_from_dict(plan(edges, **options)))


def codes(subject, change=lambda rank, row: [row]):
    """The codes of the errors, without consequences of others, after a change of each row."""
    rows = [[new for row in of_rank for new in change(rank, row)] for rank, of_rank in enumerate(subject.graph.rows())]
    changed = subject.with_graph(build_graph(rows, subject.graph.tensors, subject.graph.groups))
    return {finding.code for finding in check_subject(changed).errors if finding.cause is None}


def about(row):
    return row.op.target if row.op.kind is OpKind.WAIT else row.op


def member(subject, row):
    return subject.graph.tensors[row.tensor].member


@pytest.mark.parametrize("options", [
    {}, {"kind": "gpipe"}, {"kind": "zb_h1"}, INTERLEAVED, {"pp": 2, "kind": "zb_v"},
    {"kind": "1f1b", "pp": 2, "num_layers": 2},
])  # fmt: skip
@pytest.mark.parametrize("route", ["relay", "direct"])
def test_plans_with_edges_are_proved(route, options):
    last = options.get("num_layers", 4) - 1
    edges = [{**CACHED, "consumers": [f"l{n}" for n in range(1, last + 1)]}, {**FIRST, "name": "ids", "dtype": "int64",
             "consumers": [f"l{last}"]}]  # fmt: skip
    assert codes(subject_of(edges, route=route, **options)) == set()


def test_a_transfer_names_the_stage_at_its_other_end():
    graph = subject_of([FIRST]).graph
    assert [str(op) for op in graph.ops[:3]] == ["0F0", "0SEND_F0", "0SEND_F0>3"]
    again = parse_program(format_program(graph)).graph()
    assert again.columns.equals(graph.columns)
    assert [str(channel) for channel in again.channels if channel.communicator not in ("forward", "backward")] == [
        "0>3 0->3", "3>0 3->0",
    ]  # fmt: skip
    for wrong in ("0SEND_F0<3", "3RECV_F0>0", "0F0>3", "0SLICE_F0>3", "0SEND_F0>03"):
        with pytest.raises(ValueError, match="is not an operation"):
            parse_op(wrong)


@pytest.mark.parametrize("which", ["one micro-batch", "all"])
@pytest.mark.parametrize("route", ["relay", "direct"])
@pytest.mark.parametrize("way", ["B", "F"])
def test_a_tensor_of_an_edge_that_is_not_sent(route, which, way):
    subject = subject_of([FIRST, SECOND], route=route)
    first = {n for n, tensor in enumerate(subject.graph.tensors) if tensor.member == "first"}
    left: dict[tuple[int, str], int] = {}

    def without(rank, row):
        op = about(row)
        is_other = route == "direct" and op.index is None
        if is_other or f"_{way}" not in op.kind or (which != "all" and op.micro_batch != 1):
            return [row]
        if row.op.kind is not OpKind.WAIT:
            return [] if row.tensor in first else [row]
        key = rank, str(op)
        left[key] = left.get(key, 0) + 1
        # without a message of its own, the wait for the first edge comes after that for the output
        return [] if left[key] == (1 if route == "direct" else 2) else [row]

    assert codes(subject, without) == {"PP125"}


def test_a_gradient_that_is_added_twice():
    subject = subject_of([FIRST])

    def again(_, row):
        op = about(row)
        return [row, row] if op.index is not None and op.kind.endswith("_B") and op.micro_batch == 1 else [row]

    assert codes(subject, again) == {"PP126"}


def test_the_tensors_of_two_edges_in_each_others_places():
    subject = subject_of([FIRST, SECOND])
    of = {member: n for n, member in enumerate(f"{t.member} {t.name}" for t in subject.graph.tensors)}
    assert len(of) == len(subject.graph.tensors)
    pairs = {
        n: of[key.replace("first", "*").replace("second", "first").replace("*", "second")] for key, n in of.items()
    }

    def exchanged(rank, row):
        is_receive = str(row.op) == "3RECV_F2<0"
        return [replace(row, tensor=pairs[row.tensor])] if is_receive else [row]

    assert codes(subject, exchanged) == {"PP302"}


def test_the_tensor_of_an_edge_is_kept_for_its_last_consumer_on_a_rank():
    subject = subject_of([CACHED], **INTERLEAVED)
    receives = [
        str(row.op) for row in subject.graph.rows()[1] if row.op.kind is OpKind.RECV_FORWARD and row.op.index == 0
    ]
    assert receives == [f"1RECV_F{n}<0" for n in range(4)]  # none of stage 3
    free = Row(free_of(parse_op("1RECV_F1<0")))
    assert codes(subject, lambda _, row: [row, free] if str(row.op) == "1F1" else [row]) == {"PP503"}
    assert codes(subject, lambda _, row: [row, free] if str(row.op) == "1B1" else [row]) == set()


def test_an_output_is_kept_for_a_later_stage_of_its_rank():
    subject = subject_of([{**FIRST, "consumers": ["l2"]}], **INTERLEAVED)
    assert not any(row.op.index is not None for rows in subject.graph.rows() for row in rows)  # it stays on rank 0
    free = Row(free_of(parse_op("0SEND_F1")))
    waited = lambda _, row: [row, free] if str(row.op) == "WAIT(0SEND_F1)" else [row]  # noqa: E731
    assert codes(subject, waited) == set()

    def early(rank, row):
        return [row, Row(row.op._replace(kind=OpKind.WAIT, target=row.op)), free] if str(row.op) == "0SEND_F1" else (
            [] if str(row.op) == "WAIT(0SEND_F1)" else [row])  # fmt: skip

    assert codes(subject, early) == {"PP503"}


def test_a_consumer_that_computes_before_its_tensor_has_come():
    subject = subject_of([FIRST])
    rows = subject.graph.rows()
    wait = next(n for n, row in enumerate(rows[3]) if str(row.op) == "WAIT(3RECV_F1<0)")
    compute = next(n for n, row in enumerate(rows[3]) if str(row.op) == "3F1")
    rows[3].insert(compute, rows[3].pop(wait))
    late = subject.with_graph(build_graph(rows, subject.graph.tensors, subject.graph.groups))
    assert {finding.code for finding in check_subject(late).errors if finding.cause is None} == {"PP502"}


def test_a_consumer_that_computes_before_the_producer_of_its_rank():
    subject = subject_of([{**FIRST, "consumers": ["l2"]}], **INTERLEAVED)
    rows = subject.graph.rows()
    places = [next(n for n, row in enumerate(rows[0]) if str(row.op) == text) for text in ("0F1", "2F1")]
    rows[0][places[0]], rows[0][places[1]] = rows[0][places[1]], rows[0][places[0]]
    found = check_subject(subject.with_graph(build_graph(rows, subject.graph.tensors, subject.graph.groups))).errors
    assert [f.code for f in found if f.code == "PP127" and "2F1 before 0F1" in f.message] == ["PP127"]


def test_what_a_direct_edge_cannot_have_is_refused():
    with pytest.raises(PipeproofError, match="direct edges and is rehearsed"):
        require_issuable(subject_of([FIRST]))
    require_issuable(subject_of([FIRST], route="relay"))
    assert refusal({**plan([FIRST]), "buffers": {"receive_slots": 2}}).code == "PP106"
    assert refusal({**plan([FIRST]), "buffers": {"free_output": "after_send_done"}}).code == "PP106"
    with pytest.raises(Exception, match="copy of a stage"):
        make_subject(plan_from_dict(plan([FIRST], kind="dualpipe", num_micro_batches=8)))
    scaled = subject_of([FIRST], kind="zb_h1")
    assert codes(
        scaled, lambda _, row: [replace(row, scale="1/2") if row.op.kind is OpKind.BACKWARD_INPUT else row]
    ) == {"PP144"}


SCHEDULES = [{}, {"kind": "gpipe"}, {"kind": "zb_h1"}, {"kind": "zb_v", "pp": 2}, INTERLEAVED]


@st.composite
def random_edges(draw):
    edges = []
    for number in range(draw(st.integers(1, 3))):
        producer = draw(st.integers(0, 2))
        users = draw(st.sets(st.integers(producer + 1, 3), min_size=1))
        edges.append({"name": f"e{number}", "producer": f"l{producer}", "consumers": [f"l{n}" for n in sorted(users)],
                      "shape": ["b", draw(st.integers(1, 9))], "gradient": draw(st.booleans()),
                      "route": draw(st.sampled_from(["relay", "direct"]))})  # fmt: skip
    return edges


@given(random_edges(), st.sampled_from(SCHEDULES))
@settings(max_examples=15, deadline=None)
def test_random_edges_are_proved_and_both_engines_give_the_same_times(edges, options):
    subject = subject_of(edges, **options)
    assert codes(subject) == set()
    fast, reference = (simulate(subject.plan, engine=engine) for engine in ("fast", "simpy"))
    assert fast.timeline == reference.timeline


def test_memory_of_a_direct_edge_is_counted_until_its_last_consumer():
    """Rank 1 has the tensor from its post before 1F until 1B; both consumers use one copy."""
    small, large = (
        simulate(subject_of([{**CACHED, "shape": ["b", size], "gradient": False}], **INTERLEAVED).plan).memory
        for size in (1, 1025)
    )
    grown = [(b.peak - a.peak) // (2 * 1024 * 4) for a, b in zip(small, large, strict=True)]
    assert grown == [4, 3]  # micro-batches in flight: an output on rank 0, and one copy on rank 1
