"""Contents of buffers: programs with a wrong, lost, repeated or missing content, and the right ones next to them."""

import re
from pathlib import Path

import pytest

from pipeproof.verify.check_plan import check_subject
from pipeproof.verify.content_rules import RULES
from pipeproof.verify.subject import program_subject


def program(*ranks, groups=()):
    return "\n".join([*(f"group {group}" for group in groups), *(f"rank {i}: {text}" for i, text in enumerate(ranks))])


def findings(text):
    return [finding for finding in check_subject(program_subject(text)).findings if finding.severity == "error"]


def summary(text):
    return [(finding.code, [str(op.op) for op in finding.witness.ops]) for finding in findings(text)]


ACCUMULATE = "0B{i}{{reads=main_grad writes=main_grad}}"
B0, B1 = (ACCUMULATE.format(i=i) for i in range(2))
RESET = "0SCALE_GRAD{writes=main_grad}"
TAKER = "1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0 1RECV_F1{peer=0} WAIT(1RECV_F1) 1F1"
SENDER = "0F0 0SEND_F0{peer=1} WAIT(0SEND_F0) 0F1 0SEND_F1{peer=1} WAIT(0SEND_F1)"
TOKENS = (
    (
        "0F0 0SEND_F0{peer=1} WAIT(0SEND_F0) 3RECV_F0{peer=1} WAIT(3RECV_F0) 3F0{writes=num_tokens} @ "
        "0SCALE_GRAD{reads=num_tokens}"
    ),
    "1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0 2F0 2SEND_F0{peer=0} WAIT(2SEND_F0) @ 1SCALE_GRAD{reads=num_tokens}",
)


def tokens(root, *modes):
    calls = [f"3BROADCAST0:pp{{group=0 peer={root} range=0..1 {mode}=num_tokens}}" for mode in modes]
    return program(*(text.replace("@", call) for text, call in zip(TOKENS, calls, strict=True)), groups=["pp: 0 1"])


def chunks(third, second="1F0{reads=r1 writes=o1}"):
    """Two ranks with two stages each; ``third`` is the input of the second chunk of rank 1."""
    return program(
        "0F0{writes=a} 0SEND_F0{peer=1 reads=a} WAIT(0SEND_F0) 2RECV_F0{peer=1 writes=r2} WAIT(2RECV_F0) "
        "2F0{reads=r2 writes=b} 2SEND_F0{peer=1 reads=b} WAIT(2SEND_F0)",
        f"1RECV_F0{{peer=0 writes=r1}} WAIT(1RECV_F0) {second} 1SEND_F0{{peer=0 reads=o1}} WAIT(1SEND_F0) "
        f"3RECV_F0{{peer=0 writes=r3}} WAIT(3RECV_F0) 3F0{{reads={third}}}",
    )


BOTH_STAGES = (
    "0SCALE_GRAD{{writes=g}} 0SCALE_GRAD{{writes=h}} 0F0 1F0 1B0{{reads=g writes=g}} 0B0{{reads=g writes=g}} "
    "0F1 1F1 1B1{{reads=g writes=g}} 0B1{{reads={last} writes={last}}} 0STEP{{reads=g}} 1STEP{{reads=g}}"
)
SPLIT = (
    (
        "0F0 0SEND_F0{{peer=1}} WAIT(0SEND_F0) 0F1 0SEND_F1{{peer=1}} WAIT(0SEND_F1) 0RECV_B0{{peer=1 writes=g0}} "
        "WAIT(0RECV_B0) 0RECV_B1{{peer=1 writes=g1}} WAIT(0RECV_B1) 0I0{{reads={first}}} 0W0 0I1{{reads=g1}} 0W1"
    ),
    (
        "1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0 1RECV_F1{peer=0} WAIT(1RECV_F1) 1F1 1I0 1SEND_B0{peer=0} WAIT(1SEND_B0) "
        "1W0 1I1 1SEND_B1{peer=0} WAIT(1SEND_B1) 1W1"
    ),
)


def sliced(first, second, gathered_first="q0", gathered_second="q1"):
    """Two micro-batches whose slices are sent; the arguments name the sent and the gathered buffers."""
    return program(
        "0F0 0SLICE_F0{writes=p0} 0F1 0SLICE_F1{writes=p1} "
        f"0SEND_F0{{peer=1 reads={first}}} 0SEND_F1{{peer=1 reads={second}}} WAIT(0SEND_F0) WAIT(0SEND_F1)",
        "1RECV_F0{peer=0 writes=q0} 1RECV_F1{peer=0 writes=q1} WAIT(1RECV_F0) WAIT(1RECV_F1) "
        f"1GATHER_F0{{group=0 reads={gathered_first} writes=r0}} 1F0{{reads=r0}} "
        f"1GATHER_F1{{group=0 reads={gathered_second} writes=r1}} 1F1{{reads=r1}}",
        groups=["tp: 1"],
    )


def members(passed, *, with_members=True):
    """A stage that sends on a received tensor, which it may if several tensors cross together."""
    name = " member={}" if with_members else ""
    tensors = "\n".join(
        f"tensor {tensor}: shape=4 dtype=float32{name.format('mask')}" for tensor in ("mask", "mask_out")
    )
    return (
        tensors
        + "\n"
        + program(
            "0F0 0SEND_F0{peer=1 tensor=0 range=0..4} WAIT(0SEND_F0)",
            f"1RECV_F0{{peer=0 tensor=0 range=0..4 writes={passed}}} WAIT(1RECV_F0) 1F0{{reads={passed} writes=o}} "
            f"1SEND_F0{{peer=2 tensor=1 range=0..4 reads={passed}}} WAIT(1SEND_F0)",
            "2RECV_F0{peer=1 tensor=1 range=0..4} WAIT(2RECV_F0) 2F0",
        )
    )


REDUCED = "0F0 0B0{writes=g} 0REDUCE_GRAD:dp{group=0 reads=g writes=h}"
BUCKET = (
    "0SCALE_GRAD{{writes=g}} 0SCALE_GRAD{{writes=h}} 0F0 0B0{{reads=g writes=g}} 0SCALE_GRAD{{reads=g+h writes=h}} "
    "{between}0F1 0B1{{reads=g writes=g}} 0SCALE_GRAD{{reads=g+h writes=h}} 0STEP{{reads={read}}}"
)

CASES = {
    # name: (code, operations of the witnesses, wrong, right)
    "a send reads the output of the micro-batch before": (
        [("PP510", ["0SEND_F1", "0F0"])],
        program("0F0{writes=o0} 0SEND_F0{peer=1 reads=o0} WAIT(0SEND_F0) "
                "0F1{writes=o1} 0SEND_F1{peer=1 reads=o0} WAIT(0SEND_F1)", TAKER),
        program("0F0{writes=o0} 0SEND_F0{peer=1 reads=o0} WAIT(0SEND_F0) "
                "0F1{writes=o0} 0SEND_F1{peer=1 reads=o0} WAIT(0SEND_F1)", TAKER),
    ),
    "receive buffers are exchanged": (
        [("PP510", ["1F0", "1RECV_F1"]), ("PP510", ["1F1", "1RECV_F0"])],
        program(SENDER, "1RECV_F0{peer=0 writes=s0} 1RECV_F1{peer=0 writes=s1} WAIT(1RECV_F0) WAIT(1RECV_F1) "
                        "1F0{reads=s1} 1F1{reads=s0}"),
        program(SENDER, "1RECV_F0{peer=0 writes=s0} 1RECV_F1{peer=0 writes=s1} WAIT(1RECV_F0) WAIT(1RECV_F1) "
                        "1F0{reads=s0} 1F1{reads=s1}"),
    ),
    "a chunk computes from the receive buffer of another chunk": (
        [("PP510", ["3F0", "1RECV_F0"])], chunks("r1"), chunks("r3"),
    ),
    "a chunk passes its input on": (
        [("PP510", ["1SEND_F0", "1RECV_F0"])], chunks("r3").replace("reads=o1", "reads=r1"), chunks("r3"),
    ),
    "an output is sent from a buffer that nothing has written": (
        [("PP510", ["0SEND_F0"])],
        program("0F0{writes=o} 0SEND_F0{peer=1 reads=p} WAIT(0SEND_F0)", "1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0"),
        program("0F0{writes=o} 0SEND_F0{peer=1 reads=o} WAIT(0SEND_F0)", "1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0"),
    ),
    "a backward reads what another micro-batch saved": (
        [("PP510", ["0B0", "0F1"])],
        program("0F0{writes=k0} 0F1{writes=k1} 0B0{reads=k1} 0B1{reads=k1}"),
        program("0F0{writes=k0} 0F1{writes=k1} 0B0{reads=k0} 0B1{reads=k1}"),
    ),
    "what a forward saved is set to zero before its backward": (
        [("PP509", ["0F0", "0SCALE_GRAD", "0B0"])],
        program("0F0{writes=k} 0SCALE_GRAD{writes=k} 0B0{reads=k}"),
        program("0SCALE_GRAD{writes=k} 0F0{writes=k} 0B0{reads=k}"),
    ),
    "zeros are sent": (
        [("PP510", ["0SEND_F0", "0SCALE_GRAD"])],
        program("0F0{writes=o} 0SCALE_GRAD{writes=z} 0SEND_F0{peer=1 reads=z} WAIT(0SEND_F0)",
                "1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0"),
        program("0F0{writes=o} 0SCALE_GRAD{writes=z} 0SEND_F0{peer=1 reads=o} WAIT(0SEND_F0)",
                "1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0"),
    ),
    "the accumulator is set to zero after the optimizer, but of another name": (
        [("PP506", ["0B0", "0B1"])],
        program(f"0F0 {B0} 0F1 {B1} 0STEP{{reads=main_grad}} 0SCALE_GRAD{{writes=main_grid}}"),
        program(f"0F0 {B0} 0F1 {B1} 0STEP{{reads=main_grad}} {RESET}"),
    ),
    "weights are gathered into the accumulator": (
        [("PP510", ["0B0", "0ALL_GATHER:dp"])],
        program(f"0ALL_GATHER:dp{{group=0 writes=main_grad}} 0F0{{reads=main_grad}} {B0}", groups=["dp: 0"]),
        program(f"0ALL_GATHER:dp{{group=0 writes=whole}} 0F0{{reads=whole}} {RESET} {B0}", groups=["dp: 0"]),
    ),
    "the accumulator is set to zero between micro-batches": (
        [("PP511", ["0SCALE_GRAD", "0STEP"])],
        program(f"{RESET} 0F0 {B0} {RESET} 0F1 {B1} 0STEP{{reads=main_grad}}"),
        program(f"{RESET} {RESET} 0F0 {B0} 0F1 {B1} 0STEP{{reads=main_grad}}"),
    ),
    "the second micro-batch writes where it should add": (
        [("PP511", ["0B1", "0STEP"])],
        program("0F0 0B0{writes=main_grad} 0F1 0B1{writes=main_grad} 0STEP{reads=main_grad}"),
        program(f"0F0 0B0{{writes=main_grad}} 0F1 {B1} 0STEP{{reads=main_grad}}"),
    ),
    "a micro-batch adds to a buffer that the optimizer does not read": (
        [("PP511", ["0B1", "0STEP"])],
        program(f"{RESET} 0SCALE_GRAD{{writes=g}} 0F0 {B0} 0F1 0B1{{reads=g writes=g}} 0STEP{{reads=main_grad}}"),
        program(f"{RESET} 0SCALE_GRAD{{writes=g}} 0F0 {B0} 0F1 0B1{{reads=g writes=g}} 0STEP{{reads=main_grad+g}}"),
    ),
    "the root of a broadcast never wrote the value": (
        [("PP512", ["3BROADCAST0:pp", "3F0"])], tokens(1, "writes", "reads"), tokens(0, "reads", "writes"),
    ),
    "the root of a broadcast never wrote the value that another member names, too": (
        [("PP512", ["3BROADCAST0:pp", "3F0"])], tokens(1, "reads", "reads"), tokens(0, "reads", "reads"),
    ),
    "a member of a sum never wrote its part": (
        [("PP512", ["0ALL_REDUCE:pp", "1F0"])],
        program("0F0 0SEND_F0{peer=1} WAIT(0SEND_F0) 0ALL_REDUCE:pp{group=0 reads=loss writes=total}",
                "1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0{writes=loss} 1ALL_REDUCE:pp{group=0 reads=loss writes=total}",
                groups=["pp: 0 1"]),
        program("0F0{writes=loss+o} 0SEND_F0{peer=1 reads=o} WAIT(0SEND_F0) "
                "0ALL_REDUCE:pp{group=0 reads=loss writes=total}",
                "1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0{writes=loss} 1ALL_REDUCE:pp{group=0 reads=loss writes=total}",
                groups=["pp: 0 1"]),
    ),
    "the optimizer reads the gradient before its reduction": (
        [("PP513", ["0STEP", "0REDUCE_GRAD:dp"])] * 2,
        program(*[f"{REDUCED} 0STEP{{reads=g}}"] * 2, groups=["dp: 0 1"]),
        program(*[f"{REDUCED} 0STEP{{reads=h}}"] * 2, groups=["dp: 0 1"]),
    ),
    "each micro-batch reduces the sum so far, of another stage": (
        [("PP510", ["0ALL_REDUCE0:dp", "1B0"])],
        program(f"{RESET} 0SCALE_GRAD{{writes=g}} 0F0 1F0 1B0{{reads=g writes=g}} {B0} "
                "0ALL_REDUCE0:dp{group=0 reads=g writes=g} 0STEP{reads=main_grad} 1STEP{reads=g}", groups=["dp: 0"]),
        program(f"{RESET} 0F0 {B0} 0ALL_REDUCE0:dp{{group=0 reads=main_grad writes=main_grad}} 0F1 {B1} "
                "0ALL_REDUCE1:dp{group=0 reads=main_grad writes=main_grad} 0STEP{reads=main_grad}", groups=["dp: 0"]),
    ),
    "the optimizer reads zeros": (
        [("PP511", ["0B0", "0STEP"])],
        program("0SCALE_GRAD{writes=z} 0F0 0B0{writes=g} 0STEP{reads=z}"),
        program("0F0{writes=norm} 0B0 0STEP{reads=norm}"),  # a number, and the gradient is where its kind puts it
    ),
    "the optimizer reads a number and no gradient": (
        [("PP511", ["0B0", "0STEP"])],
        program(f"{RESET} 0F0{{writes=norm}} {B0} 0STEP{{reads=norm}}"),
        program(f"{RESET} 0F0{{writes=norm}} {B0} 0STEP{{reads=norm+main_grad}}"),
    ),
    "a micro-batch of one of two stages is missing in their common buffer": (
        [("PP511", ["0B1", "0STEP"])],
        program(BOTH_STAGES.format(last="h")), program(BOTH_STAGES.format(last="g")),
    ),
    "the optimizer sets the sum for the next step, of another name": (
        [("PP506", ["0B0", "0B1"])],
        program(f"0F0 {B0} 0F1 {B1} 0STEP{{reads=main_grad writes=w}}"),
        program(f"0F0 {B0} 0F1 {B1} 0STEP{{reads=main_grad writes=main_grad}}"),
    ),
    "slices are exchanged between cut and send": (
        [("PP510", ["0SEND_F0", "0SLICE_F1"]), ("PP510", ["0SEND_F1", "0SLICE_F0"])],
        sliced("p1", "p0"), sliced("p0", "p1"),
    ),
    "slices are exchanged between receive and gather": (
        [("PP510", ["1GATHER_F0", "1RECV_F1"]), ("PP510", ["1GATHER_F1", "1RECV_F0"])],
        sliced("p0", "p1", "q1", "q0"), sliced("p0", "p1"),
    ),
    "an input gradient is computed from another micro-batch's": (
        [("PP510", ["0I0", "0RECV_B1"])],
        program(SPLIT[0].format(first="g1"), SPLIT[1]), program(SPLIT[0].format(first="g0"), SPLIT[1]),
    ),
    "of two tensors the one that is computed is passed on as it came": (
        [("PP510", ["1SEND_F0", "1RECV_F0"])], members("hidden_in", with_members=False), members("mask_in"),
    ),
    "a bucket is added again with more in it": (
        [("PP514", ["0B0", "0STEP"])],
        program(BUCKET.format(between="", read="h")),
        program(BUCKET.format(between="0SCALE_GRAD{writes=g} ", read="h")),
    ),
}  # fmt: skip
"""Mistake, its findings, the program, and a correct program close to it."""


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_content_is_found_at_its_reader(name):
    expected, wrong, _ = CASES[name]
    assert summary(wrong) == expected


@pytest.mark.parametrize("name", CASES)
def test_the_correct_program_near_it_passes(name):
    assert summary(CASES[name][2]) == []


@pytest.mark.parametrize(
    ("text", "cause", "followers"),
    [
        (program(f"{RESET} 0F0 {B0} {B0} 0STEP{{reads=main_grad}}"), "PP122", ["PP514"]),
        (
            program(
                "0F1{writes=o0} 0SEND_F0{peer=1 reads=o0} WAIT(0SEND_F0) "
                "0F0{writes=o1} 0SEND_F1{peer=1 reads=o1} WAIT(0SEND_F1)",
                TAKER,
            ),
            "PP123",
            ["PP506", "PP510"],
        ),
    ],
    ids=["a backward runs twice", "two forwards are exchanged"],
)
def test_wrong_contents_follow_from_a_computation_at_the_wrong_place(text, cause, followers):
    first, *others = findings(text)
    assert (first.code, first.cause) == (cause, None)
    assert [finding.code for finding in others] == followers
    assert {finding.cause.code for finding in others} == {cause}


def test_the_page_on_lifetimes_shows_what_is_found():
    page = (Path(__file__).parents[2] / "docs" / "lifetimes.md").read_text()
    shown = re.findall(r"```text\n(.*?)```", page, re.DOTALL)[2]
    _, wrong, _ = CASES["receive buffers are exchanged"]
    first = findings(wrong)[0]
    assert shown.split() == f"error[{first.code}]: {first.message}".split()


def test_every_rule_has_a_mutant_that_it_alone_kills():
    alone = {expected[0][0] for expected, _, _ in CASES.values()} | {"PP509"}  # of PP509 in test_lifetime.py
    assert alone - {"PP506"} == {rule.doc.code for rule in RULES}
