"""Texts of findings on buffers: the uses, the missing wait, and the suggested fix."""

import json

import pytest

from pipeproof.specs.load_plan import load_plan
from pipeproof.verify import content_rules
from pipeproof.verify.lifetime import RULES as LIFETIME_RULES
from pipeproof.verify.lifetime.races import MOST_PER_CODE
from pipeproof.verify.subject import make_subject, program_subject
from tests.plans import plan_dict, subject

RULES = sorted((*LIFETIME_RULES, *content_rules.RULES), key=lambda rule: rule.doc.code)

RULE = {rule.doc.code: rule for rule in RULES}


def found_in(code, *ranks, groups=()):
    lines = [*(f"group {group}" for group in groups), *(f"rank {i}: {text}" for i, text in enumerate(ranks))]
    return list(RULE[code].check(program_subject("\n".join(lines))))


def texts_of(code, *ranks, groups=()):
    """(message, help, operations of the witness) of the one finding of a rule."""
    (finding,) = found_in(code, *ranks, groups=groups)
    return finding.message, finding.help, [op.op for op in finding.witness.ops]


SENT, TAKEN = "0F0 0SEND_F0{peer=1} WAIT(0SEND_F0)", "1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0"
SHARED = "0F1{writes=x} 1F1{writes=x} 0B1{reads=x}"
"""Micro-batch 1 of stage 0 is not that of stage 1, though both are micro-batch 1."""
OVERWRITTEN = (
    "rank 0: 0B1 reads buffer `x`, where 1F1 has overwritten what 0F1 put there",
    "let 1F1 write to another buffer", "0F1 1F1 0B1",
)  # fmt: skip
TEXTS = {
    "a send that is still reading": (
        "PP501", ["0F0{writes=x} 0SEND_F0{peer=1 reads=x} 0F1{writes=x} WAIT(0SEND_F0)", TAKEN],
        "rank 0: 0F1 writes buffer `x` while 0SEND_F0 may still be reading it: WAIT(0SEND_F0) comes too late",
        "put WAIT(0SEND_F0) before 0F1, or give it a buffer of its own", "0SEND_F0 0F1",
    ),
    "a receive that is still writing": (
        "PP502", [SENT, "1RECV_F0{peer=0} 1F0 WAIT(1RECV_F0)"],
        ("rank 1: 1F0 reads what 1RECV_F0 receives while 1RECV_F0 may still be writing it: "
         "WAIT(1RECV_F0) comes too late"),
        "put WAIT(1RECV_F0) before 1F0", "1RECV_F0 1F0",
    ),
    "what frees is named first where it is last": (
        "PP503", ["0F0{queue=side writes=x} 1B0{frees=x} WAIT(0F0)"],
        "rank 0: 1B0 frees buffer `x` while 0F0 may still use it: WAIT(0F0) comes too late",
        "put WAIT(0F0) before 1B0", "0F0 1B0",
    ),
    "what frees is named first where it is first": (
        "PP503", ["0F0{writes=x} 1B0{frees=x} 2F0{queue=side reads=x} WAIT(2F0)"],
        "rank 0: 1B0 frees buffer `x` while 2F0 may still use it: WAIT(2F0) comes too late",
        "put WAIT(2F0) before 1B0", "1B0 2F0",
    ),
    "a use after a free in program order": (
        "PP503", ["0F0{writes=x frees=x} 1B0{reads=x}"],
        "rank 0: 1B0 reads buffer `x`, which 0F0 freed before", "move 0F0 behind 1B0", "0F0 1B0",
    ),
    "a second free": (
        "PP503", ["0F0{writes=x} 0B0{frees=x} 1B0{frees=x}"],
        "rank 0: 1B0 frees buffer `x` again, which 0B0 freed before", "drop one of the two, 0B0 and 1B0", "0B0 1B0",
    ),
    "two queues of one rank": (
        "PP507", ["0F0{writes=x} 2F0{queue=side reads=x} WAIT(2F0)"],
        "rank 0: 0F0 writes buffer `x` on queue `compute`, and 2F0 reads it on queue `side`, and nothing orders them",
        "let queue `side` wait for 0F0 before 2F0", "0F0 2F0",
    ),
    "a wait of the host is no wait of another queue": (
        "PP507", ["0F0{queue=side writes=x} 2F0{reads=x} WAIT(0F0){queue=host}"],
        "rank 0: 0F0 writes buffer `x` on queue `side`, and 2F0 reads it on queue `compute`, and nothing orders them",
        "let queue `compute` wait for 0F0 before 2F0", "0F0 2F0",
    ),
    "memory of another rank": (
        "PP507", ["0F0{writes=x@1}", "1F0{reads=x}"],
        ("rank 0: 0F0 writes buffer `x` on queue `compute`, and 1F0 of rank 1 reads it on queue `compute`, and "
         "nothing orders them"),
        "put a barrier of both ranks, or a message from one to the other, in between", "0F0 1F0",
    ),
    "a use that reaches into the next step": (
        "PP508", ["0F0 0B0 WAIT(0B0){queue=c} 0SCALE_GRAD{queue=c}"],
        ("rank 0: in the next step 0B0 writes the gradient of stage 0, which 0SCALE_GRAD of this step may still be "
         "using on queue `c`: nothing waits for 0SCALE_GRAD"),
        "end the step with WAIT(0SCALE_GRAD)", "0SCALE_GRAD 0B0",
    ),
    "a send without a wait": (
        "PP505", ["0F0 0SEND_F0{peer=1}", TAKEN], "rank 0 posts 0SEND_F0 and never waits for it",
        "add WAIT(0SEND_F0) before its buffer is used again, at the latest at the end of the step", "0SEND_F0",
    ),
    "a receive without a wait": (
        "PP505", [SENT, "1RECV_F0{peer=0} 1F0"], "rank 1 posts 1RECV_F0 and never waits for it",
        "add WAIT(1RECV_F0) before the tensor is used, at the latest at the end of the step", "1RECV_F0",
    ),
    "a read before the write": (
        "PP506", ["0F0{reads=x} 1F0{writes=x}"],
        "rank 0: 0F0 reads buffer `x`, but 1F0 writes it only later", "move 0F0 behind 1F0", "0F0 1F0",
    ),
    "a read before the receive": (
        "PP506", ["1F0 1RECV_F0{peer=1} WAIT(1RECV_F0)", "0F0 0SEND_F0{peer=0} WAIT(0SEND_F0)"],
        "rank 0: 1F0 reads what 1RECV_F0 receives, but 1RECV_F0 writes it only later", "move 1F0 behind 1RECV_F0",
        "1F0 1RECV_F0",
    ),
    "a sum that nothing begins": (
        "PP506", ["0F0{reads=x writes=x}"], "rank 0: 0F0 adds to buffer `x`, which nothing sets before",
        "write buffer `x` (zeros, for a sum) before 0F0", "0F0",
    ),
    "a buffer that two stages share": ("PP509", [f"0F0{{writes=z}} {SHARED}"], *OVERWRITTEN),
    "a buffer that three share": ("PP509", [f"0F0{{writes=z}} 0F1{{writes=y}} {SHARED}"], *OVERWRITTEN),
}  # fmt: skip
"""Rule, programs of the ranks, and of the one finding its message, its help and the operations of its witness."""


@pytest.mark.parametrize("name", TEXTS)
def test_the_texts_of_a_finding(name):
    code, ranks, message, fix, ops = TEXTS[name]
    assert texts_of(code, *ranks) == (message, fix, ops.split())


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("0F0{queue=side} 0STEP WAIT(0F0)", "0F0 reads the weights of stage 0"),
        ("0B0{queue=side} 0STEP WAIT(0B0)", "0B0 writes the gradient of stage 0"),
        ("1UNSHARD{queue=side} 1F0 WAIT(1UNSHARD)", "1UNSHARD writes the weights of stage 1"),
        ("0SCALE_GRAD{queue=side} 0STEP WAIT(0SCALE_GRAD)", "0SCALE_GRAD writes the gradient of stage 0"),
    ],
)
def test_what_lasts_is_the_gradient_or_the_weights(text, what):
    assert f"rank 0: {what} on queue `side`, and " in found_in("PP507", text)[0].message


@pytest.mark.parametrize(
    ("code", "text", "what"),
    [
        ("PP507", "0F0 0OFFLOAD0{queue=o} WAIT(0OFFLOAD0)", "0F0 writes what 0F0 keeps on"),
        ("PP507", "0F0 0OFFLOAD0 0RELOAD0{queue=in}", "0OFFLOAD0 writes the host copy of what 0F0 keeps on"),
        ("PP507", "0F0 0OFFLOAD0 0RELOAD0{queue=o} 0B0", "0RELOAD0 writes the reloaded copy of what 0F0 keeps on"),
        (
            "PP503",
            "0F0 WAIT(0F0){queue=o} 0OFFLOAD0{queue=o} FREE(0OFFLOAD0)",
            "FREE(0OFFLOAD0) frees what 0F0 keeps while",
        ),
        ("PP503", "0F0.s1 FREE(0OFFLOAD0.s1) 0OFFLOAD0.s1", "0OFFLOAD0.s1 reads what 0F0.s1 keeps, which"),
    ],
)
def test_copies_are_named_by_where_they_are_and_what_they_are_of(code, text, what):
    assert any(what in found.message for found in found_in(code, text))


def test_memory_of_another_rank_is_compared_with_every_use_there():
    """A collective reads it until that rank's member is done; of two that read nothing is wrong."""
    ranks = ["0BARRIER:pp{group=0 reads=x@1}", "0BARRIER:pp{group=0} 1F0{queue=side %s=x} WAIT(1F0)"]
    messages = [found.message for found in found_in("PP507", ranks[0], ranks[1] % "writes", groups=["pp: 0 1"])]
    assert [message.partition(" on queue")[0] for message in messages] == ["rank 0: 0BARRIER:pp reads buffer `x`"]
    assert found_in("PP507", ranks[0], ranks[1] % "reads", groups=["pp: 0 1"]) == []


@pytest.mark.parametrize("more", [0, 3])
def test_races_beyond_the_most_are_counted(more):
    base = subject(schedule={"num_micro_batches": MOST_PER_CODE + more}, buffers={"free_output": "after_send_posted"})
    found = [finding.message for finding in RULE["PP503"].check(base)]
    assert len(found) == MOST_PER_CODE + bool(more)
    assert found[-1].startswith("and 3 more ") == bool(more)


@pytest.mark.parametrize(
    ("last", "is_ready"),
    [
        ("0SCALE_GRAD{writes=x}", True),  # zeros
        ("0STEP{writes=x}", True),
        ("0STEP{reads=x writes=x}", True),
        ("0SCALE_GRAD{scale=1/2 writes=x}", False),
        ("0SCALE_GRAD{reads=x writes=x}", False),
        ("0SCALE_GRAD{frees=x}", False),
        ("1F0{writes=x}", False),
        ("0SCALE_GRAD{writes=x} 1F0{writes=x}", False),
    ],
)
def test_what_the_end_of_a_step_sets_is_ready_for_the_next_one(last, is_ready):
    assert (found_in("PP506", f"0F0{{reads=x}} {last}") == []) is is_ready


def test_races_with_the_next_step_beyond_the_most_are_counted():
    num = MOST_PER_CODE + 3
    text = " ".join(f"0F{i}{{reads=x{i}}} WAIT(0F{i}){{queue=c}} 1F{i}{{queue=c writes=x{i}}}" for i in range(num))
    found = [finding.message for finding in found_in("PP508", text)]
    assert len(found) == MOST_PER_CODE + 1
    assert found[-1].startswith("and 3 more ")


def test_a_finding_on_a_plan_is_at_its_schedule(tmp_path):
    plan = plan_dict(buffers={"free_output": "after_send_posted"})
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan, indent=1))
    found = next(iter(RULE["PP503"].check(make_subject(load_plan(file)))))
    assert '"schedule"' in file.read_text().splitlines()[found.location.line - 1]
    assert found_in("PP503", "0F0 FREE(0F0) 0B0")[0].location is None  # the rows' own places follow


def test_of_transfers_that_nothing_waits_for_those_of_a_queue_or_without_a_partner_are_left_out():
    taker = "1RECV_F0{peer=0} WAIT(1RECV_F0) 1RECV_F1{peer=0} WAIT(1RECV_F1)"
    assert found_in("PP505", "0SEND_F0{peer=1 queue=side} 0SEND_F1{peer=1} WAIT(0SEND_F1)", taker) == []
    assert found_in("PP505", "0SEND_F0{peer=1}", "0F1") == []
    sender = "WAIT(0SEND_F0) 0SEND_F0{peer=1} 0SEND_F1{peer=1}"
    assert [one.witness.ops[0].op for one in found_in("PP505", sender, taker)] == ["0SEND_F1"]


def test_a_backward_before_its_forward_reads_nothing_that_is_written_later():
    """The rules on completeness say that."""
    assert found_in("PP506", "0B0 0F0 FREE(0F0)") == []


def test_a_wait_that_comes_too_late_may_hold_another_queue_only():
    sender = "0F0{writes=x} 0SEND_F0{peer=1 reads=x} 0F1{writes=x} WAIT(0SEND_F0){queue=%s}"
    assert texts_of("PP501", sender % "host", TAKEN)[0].endswith(": WAIT(0SEND_F0) comes too late")
    assert texts_of("PP501", sender % "side", TAKEN)[0].endswith(": WAIT(0SEND_F0) holds only queue `side`")


def test_what_is_freed_is_not_named_after_what_frees_it():
    message, _, ops = texts_of("PP503", "0F0 FREE(0F0) 0B0")
    assert ops == ["FREE(0F0)", "0B0"]
    assert "what FREE(0F0) makes" not in message


# --- 509: overwritten buffers, and how many a pool needs ---


POOL = (
    "0F0{writes=r[0]} 0F1{writes=r[1]} 0B1{reads=r[1]} 0F2{writes=r[1]} 0B2{reads=r[1]} 0F3{writes=r[0]} "
    "0B3{reads=r[0]} 0B0{reads=r[0]}"
)


def test_the_size_that_a_pool_needs_is_that_of_its_own_rank_and_name():
    """At most two micro-batches are alive at once, independent of other pools, ranks and plain buffers."""
    crowd = " ".join(f"2F{i}{{writes=s[{i}]+plain{i}}}" for i in range(4))
    ends = " ".join(f"2B{i}{{reads=s[{i}]+plain{i}}}" for i in range(4))
    for ranks in (
        [POOL],
        [f"{crowd} {POOL} {ends}"],
        [POOL, crowd.replace("s[", "r[") + " " + ends.replace("s[", "r[")],
    ):
        message, fix, ops = texts_of("PP509", *ranks)
        assert message == "rank 0: 0B0 reads buffer `r[0]`, where 0F3 has overwritten what 0F0 put there"
        assert fix == "let 0F3 write to another buffer; `r[..]` needs 2 buffers here"
        assert ops == ["0F0", "0F3", "0B0"]
