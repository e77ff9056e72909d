"""Texts of findings on buffers: the uses, the missing wait, and the suggested fix."""

import json

import pytest

from pipeproof.specs.load_plan import load_plan
from pipeproof.verify import content_rules
from pipeproof.verify.lifetime import RULES as LIFETIME_RULES
from pipeproof.verify.subject import make_subject, program_subject
from tests.plans import plan_dict

RULES = sorted((*LIFETIME_RULES, *content_rules.RULES), key=lambda rule: rule.doc.code)

RULE = {rule.doc.code: rule for rule in RULES}


def found_in(code, *ranks, groups=()):
    lines = [*(f"group {group}" for group in groups), *(f"rank {i}: {text}" for i, text in enumerate(ranks))]
    return list(RULE[code].check(program_subject("\n".join(lines))))


def texts_of(code, *ranks, groups=()):
    """(message, help, operations of the witness) of the one finding of a rule."""
    (finding,) = found_in(code, *ranks, groups=groups)
    return finding.message, finding.help, [op.op for op in finding.witness.ops]


def test_memory_of_another_rank_is_compared_with_every_use_there():
    """A collective reads it until that rank's member is done; of two that read nothing is wrong."""
    ranks = ["0BARRIER:pp{group=0 reads=x@1}", "0BARRIER:pp{group=0} 1F0{queue=side %s=x} WAIT(1F0)"]
    messages = [found.message for found in found_in("PP507", ranks[0], ranks[1] % "writes", groups=["pp: 0 1"])]
    assert [message.partition(" on queue")[0] for message in messages] == ["rank 0: 0BARRIER:pp reads buffer `x`"]
    assert found_in("PP507", ranks[0], ranks[1] % "reads", groups=["pp: 0 1"]) == []


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
