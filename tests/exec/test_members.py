"""Boundary tensors that a plan declares, on all ranks of a run: bitwise the reference, used where they arrive."""

import pytest

from pipeproof.diagnostics.finding import PipeproofError
from pipeproof.exec.rank.executor_support import require_executable
from tests.exec.test_reference_bits import lowered as lowered_plan
from tests.plans import subject

pytestmark = [pytest.mark.needs_paddle, pytest.mark.usefixtures("paddle_started")]


def lowered(**sections):
    parts = (sections.pop(name, {}) for name in ("topology", "schedule", "model"))
    return lowered_plan(*parts, sections, steps=sections.get("run", {}).get("steps", 2))


SP = {"pp": 3, "tp": 2, "sequence_parallel": True}
BATCH_MEMBERS = [
    {"name": "tokens", "dims": "bs", "dtype": "int64"},
    {"name": "labels", "dims": "sb", "dtype": "int32"},
    {"name": "mask", "dims": "bs", "dtype": "bool"},
]


def hidden(**more):
    return {"name": "hidden", "dims": "sbh", **more}


def labels_in(tp, receiver_tp, edge):
    return {"name": "labels", "dims": "bs", "dtype": "int64", "edge": edge, "tp": tp, "receiver_tp": receiver_tp}


def empty_between(*edges, **topology):
    """Three stages, the middle one with only an empty layer, and the activation's layouts on the two edges."""
    return {
        "model": {"num_layers": 2, "empty_layers": {"head": 1}},
        "topology": {"pp": 3, "tp": 2, **topology},
        "stages": [["embed"], ["empty.0"], ["layer.0", "layer.1", "norm", "head"]],
        "boundaries": [
            hidden(edge=edge, tp=tp, receiver_tp=receiver_tp) for edge, (tp, receiver_tp) in enumerate(edges)
        ],
    }


PLANS = {
    "another name, a wider wire": {
        "boundaries": [{"name": "x", "dims": "sbh", "dtype": "float64"}], "schedule": {"kind": "zb_h1"},
    },
    "tokens next to it, in slices": {
        "topology": {"tp": 2}, "transport": "partial",
        "boundaries": [BATCH_MEMBERS[1], hidden(), BATCH_MEMBERS[0], BATCH_MEMBERS[2]],
        "schedule": {"seq_lengths": [8, 4, 8, 6], "last_micro_batch_size": 1},
    },
    "in slots": {
        "boundaries": [hidden(), *BATCH_MEMBERS],
        "buffers": {"receive_slots": 16, "send_slots": 16, "free_output": "after_send_done"},
    },
    "packed": {
        "boundaries": [hidden(), *BATCH_MEMBERS], "transport": {"messages": "packed"},
        "schedule": {"kind": "zb_h1", "seq_lengths": [8, 4, 8, 6], "last_micro_batch_size": 1},
    },
    "packed in parts, in slots": {
        "topology": {"pp": 2, "tp": 2, "sequence_parallel": True}, "transport": {"messages": "packed"},
        "boundaries": [BATCH_MEMBERS[2], hidden(tp="sharded(s)"), BATCH_MEMBERS[0]],
        "buffers": {"receive_slots": 16, "send_slots": 16, "free_output": "after_send_done"},
    },
    "two stages of one rank": {
        "model": {"num_layers": 4},
        "boundaries": [hidden(), *BATCH_MEMBERS],
        "schedule": {"kind": "zb_v", "num_chunks": 2},
    },
    "sequence splits": {
        "boundaries": [hidden(), *BATCH_MEMBERS], "schedule": {"kind": "seq1f1b", "num_sequence_splits": 2},
    },
    "copies of stages": {"boundaries": [hidden(), *BATCH_MEMBERS], "schedule": {"kind": "dualpipe"}},
    "labels in parts, laid out anew": {
        "topology": SP,
        "boundaries": [
            hidden(tp="sharded(s)"),
            labels_in("sharded(s)", "sharded(b)", 0),
            labels_in("sharded(b)", "invariant", 1),
        ],
    },
    "the activation laid out anew": empty_between(
        ("sharded(s)", "sharded(h)"), ("sharded(h)", "sharded(s)"), sequence_parallel=True
    ),
    "whole, in parts, whole": empty_between(("invariant", "sharded(b)"), ("sharded(b)", "invariant")),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_a_run_has_the_bits_of_the_reference(name):
    from tests.exec.in_memory import compared

    assert all(step.bitwise for step in compared(lowered(**PLANS[name])))


@pytest.mark.parametrize("batch_member", BATCH_MEMBERS, ids=[member["name"] for member in BATCH_MEMBERS])
def test_tokens_of_another_micro_batch_give_another_loss(batch_member, monkeypatch):
    """The last stage computes with the received tokens, not with tokens that it could draw itself."""
    from tests.exec import in_memory

    plan = lowered(boundaries=[hidden(), batch_member], run={"steps": 1})
    post, sent = in_memory._Channels.post, []

    def late(self, channel, buffer, after=()):
        if channel.src == self.rank and buffer.ndim == len(batch_member["dims"]):
            sent.append(buffer)
            buffer = sent[max(len(sent) - 2, 0)]
        return post(self, channel, buffer, after)

    right = in_memory.run_all(plan)[0]
    monkeypatch.setattr(in_memory._Channels, "post", late)
    wrong = in_memory.run_all(plan)[0]
    assert len(sent) == 4
    assert right[0][1].loss.tobytes() != wrong[0][1].loss.tobytes()


def test_the_gradient_of_a_tensor_that_is_laid_out_anew_goes_back_in_ranges():
    plan = lowered(**PLANS["the activation laid out anew"])
    graph = plan.graph
    back = [row for rank in graph.rows() for row in rank if str(row.op) == "1SEND_B0"]
    ranks = range(plan.mesh.num_ranks)
    assert {row.stop - row.start for row in back} == {8 // 2 * 2 * 16 // 2 // 8}
    assert {row.peer for row in back} == {rank for rank in ranks if plan.mesh.coords(rank)["pp"] == 0}


REFUSED = {
    "no activation": (BATCH_MEMBERS[:1], "edge 0 is given no activation (dims sbh)"),
    "other dims": ([{"name": "hidden", "dims": "bsh"}], "the activation `hidden` is bsh [2, 8, 16] where"),
    "a narrower wire": ([hidden(dtype="float16")], "the activation `hidden` travels as float16, which rounds float32"),
    "no gradient": ([hidden(gradient=False)], "the activation `hidden` brings no gradient back"),
    "unknown": (
        [hidden(), {"name": "memory", "dims": "sbh"}],
        "`memory` is not a tensor of a GPT's run, which has its activation, tokens, labels and mask",
    ),
    "labels in fractions": (
        [hidden(), {"name": "labels", "dims": "bs"}], "`labels` is float32, and runs have it as int64 or int32",
    ),
    "labels of other sizes": (
        [hidden(), {"name": "labels", "dims": "bs", "shape": [3, 8], "dtype": "int64"}], "`labels` is bs [3, 8]",
    ),
    "labels in parts": (
        [hidden(), {"name": "labels", "dims": "bs", "dtype": "int64", "tp": "sharded(s)"}],
        "`labels` arrives sharded(1) at the last stage, which needs all of it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_gpt_has_no_use_for_is_refused(name):
    boundaries, fact = REFUSED[name]
    with pytest.raises(PipeproofError) as refused:
        require_executable(subject(topology={"tp": 2}, boundaries=boundaries))
    (finding,) = refused.value.findings
    assert finding.code == "PP909"
    assert finding.message.startswith(fact)


def test_parts_that_a_middle_stage_would_send_on_otherwise_are_refused():
    labels = {"name": "labels", "dims": "bs", "dtype": "int64"}
    boundaries = [hidden(), {**labels, "edge": 0, "tp": "sharded(s)"}, {**labels, "edge": 1, "tp": "sharded(b)"}]
    with pytest.raises(PipeproofError, match="at stage 1, which sends it on with another placement"):
        require_executable(subject(topology={"pp": 3, "tp": 2}, boundaries=boundaries))
