"""The parts of a rehearsal alone: elements with an identity, what arrived, smaller plans, edges."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.exec.bare import BareEnd
from pipeproof.exec.rehearse.arrivals import Piece, pieces_of
from pipeproof.exec.rehearse.edges import edges_of, network_of
from pipeproof.exec.rehearse.identity import Source, addends, decoded, elements, encoded
from pipeproof.exec.rehearse.scale import rehearsed_plan
from pipeproof.specs.dtypes import dtype_bytes
from pipeproof.specs.load import PlanFileError, plan_from_dict
from pipeproof.verify.subject import make_subject
from tests.plans import plan_dict, subject

OURS, THEIRS = (Source((0, batch, 1, 0), 0, 200, f"message {batch}") for batch in (0, 1))


@settings(deadline=None)
@given(
    st.sampled_from(["bool", "bfloat16", "float32", "int64"]),
    st.integers(0, 90),
    st.integers(100, 200),
    st.integers(0, 80),
)
def test_a_range_of_another_tensor_is_found_with_its_place(dtype, start, stop, shift):
    wanted = Piece(0, 200, OURS, 0)
    size = dtype_bytes(dtype)
    content = OURS.content(0, 200, dtype)
    length = stop - start
    # Where its ends are by chance the same in both, they count as right.
    other = np.array(THEIRS.content(shift, min(200, shift + length), dtype))
    stop = start + len(other) // size
    content[start * size : stop * size] = other
    found = pieces_of(content, dtype, [wanted], lambda: [THEIRS])
    assert [piece.start for piece in found][1:] == [piece.stop for piece in found][:-1]
    for piece in found:
        here = content[piece.start * size : piece.stop * size]
        if piece.source is not None:
            there = piece.source.content(piece.source_start, piece.source_start + piece.stop - piece.start, dtype)
            assert np.array_equal(here, there)
    named = sum(piece.stop - piece.start for piece in found if piece.source == THEIRS)
    if size > 1 and stop - start >= 16:
        assert named >= stop - start - 4
        assert next(piece for piece in found if piece.source == THEIRS).text.endswith("of message 1")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("by", [1, 64, 2**16])
def test_no_shift_of_a_tensor_has_the_same_bytes(dtype, by):
    source = Source((3, 1, 4), 0, 2**17, "")
    assert not np.array_equal(source.content(0, 1000, dtype), source.content(by, by + 1000, dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "int64"])
@pytest.mark.parametrize("num_members", [2, 7, 300])
def test_sums_of_whole_numbers_are_exact_in_every_order(dtype, num_members):
    sources = [Source((place,), place, 50, "") for place in range(num_members)]
    parts = addends(sources, dtype)
    for part in parts:
        assert np.array_equal(decoded(encoded(part, dtype), dtype), part.astype(np.float64))
    total = np.sum(parts, axis=0)
    assert np.array_equal(decoded(encoded(total, dtype), dtype), total.astype(np.float64))
    assert all(part.any() for part in parts) or num_members == 300
    assert total.all() or num_members < 7


def test_bytes_are_those_of_the_type():
    assert encoded(np.array([0, 1, 3, 200]), "bfloat16").view("<u2").tolist() == [0, 0x3F80, 0x4040, 0x4348]
    assert len(elements(OURS.content(3, 10, "float64"), "float64")) == 7


def scaled(scale, **sections):
    return rehearsed_plan(plan_from_dict(plan_dict(**sections)), None, None, Fraction(scale)).spec


def test_a_scale_is_taken_from_the_sequences():
    spec = scaled("1/4", schedule={"seq_lengths": [8, 4, 8, 4]})
    assert (spec.model.seq_length, spec.model.hidden_size, spec.schedule.seq_lengths) == (2, 16, (2, 1, 2, 1))
    assert spec.run.steps == 2


def test_where_sequences_do_not_divide_the_hidden_size_gives_the_rest():
    cut = {"topology": {"tp": 2, "sequence_parallel": True}}
    spec = scaled("1/8", **cut)
    assert (spec.model.seq_length, spec.model.hidden_size) == (2, 8)
    whole, smaller = (
        subject(**cut).graph,
        make_subject(rehearsed_plan(subject(**cut).loaded, None, None, Fraction(1, 8))),
    )
    assert [t.numel for t in smaller.graph.tensors] == [t.numel // 8 for t in whole.tensors]


def test_a_scale_that_is_no_plan_names_the_nearest_ones():
    with pytest.raises(PlanFileError) as refused:
        scaled("1/3")
    (finding,) = refused.value.findings
    assert finding.code == "PP916"
    assert "from 8 and 16" in finding.message
    assert finding.help == "nearest are 1/4 and 1/2"


def test_another_backend_is_judged_as_if_the_plan_said_so():
    loaded = plan_from_dict(plan_dict(run={"dtype": "bfloat16", "backend": "torch"}))
    assert rehearsed_plan(loaded, "torch", "cpu", Fraction(1)).spec.run.backend == "torch"
    with pytest.raises(PlanFileError, match="16-bit types with Paddle"):
        rehearsed_plan(loaded, "paddle", None, Fraction(1))


def bare_of(graph, time_ns):
    """The ends of messages that took ``time_ns`` of their bytes, on every channel."""
    ends = {rank: [] for rank in range(graph.num_ranks)}
    for channel in graph.channels:
        for size in (1000, 1000, 100_000, 1_000_000):
            ends[channel.dst].append(BareEnd(str(channel), False, size, 0, 500 + time_ns(size, channel)))
            ends[channel.src].append(BareEnd(str(channel), True, size, 500, 600))
    return ends


def test_latency_and_bandwidth_of_an_edge_are_those_of_its_messages():
    graph = subject(topology={"pp": 3}).graph
    bare = bare_of(graph, lambda size, channel: 20_000 + size // (2 if channel.src == 1 else 4))
    found = {edge.channel: (edge.latency_us, edge.bandwidth) for edge in edges_of(graph, bare)}
    assert found["forward 0->1"] == pytest.approx((20, 4), rel=1e-3)
    assert found["forward 1->2"] == pytest.approx((20, 2), rel=1e-3)
    assert [message.num_bytes for message in edges_of(graph, bare)[0].messages] == [1000, 100_000, 1_000_000]


@pytest.mark.parametrize(("times", "expected"), [((50, 40, 30), (0.0, 1000 / 30)), ((5, 5, 300), (4.7, 1000 / 295))])
def test_neither_latency_nor_bandwidth_is_negative(times, expected):
    graph = subject().graph
    by_size = dict(zip((1000, 100_000, 1_000_000), times, strict=True))
    edge = edges_of(graph, bare_of(graph, lambda size, _: by_size[size] * 1000))[0]
    assert (edge.latency_us, edge.bandwidth) == pytest.approx(expected, rel=1e-2)


def test_the_simulator_takes_what_was_measured():
    from pipeproof.sim.simulate import simulate

    plain = subject()
    network = network_of(2, bare_of(plain.graph, lambda size, _: 20_000 + size // 4))
    assert network == {"ranks_per_node": 2, "node": {"latency_us": 20.0, "bandwidth": 4.0}}
    free, slow = (simulate(subject(cost={"forward_us": 100, **cost}).plan) for cost in ({}, {"network": network}))
    assert slow.timeline.makespan_us > free.timeline.makespan_us
    assert network_of(1, {0: []}) is None
