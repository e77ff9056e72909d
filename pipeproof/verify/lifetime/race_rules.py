"""501, 502, 503, 507, 508: uses of one buffer that nothing keeps apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pipeproof.specs.codes import RuleDoc
from pipeproof.specs.finding import Finding
from pipeproof.verify.lifetime.analysis import FREED, NEXT_STEP, RECEIVING, SENDING, UNORDERED, Lifetimes, lifetimes
from pipeproof.verify.lifetime.races import Pair, after_free
from pipeproof.verify.lifetime.tensors import FREES
from pipeproof.verify.lifetime.words import Words, about, capped
from pipeproof.verify.subject import Rule, Subject

WRITE_UNDER_SEND = RuleDoc(
    code="PP501",
    title="a buffer is written while a send may still read it",
    severity="error",
    explanation=(
        "An asynchronous send reads its buffer from its post until it is done, and only a wait tells when that is. "
        "What is written into the buffer before the wait may be what arrives: the receiver gets another "
        "micro-batch's values, or half of them. Nothing fails."
    ),
    wrong=(
        "rank 0: 0F0{writes=out} 0SEND_F0{peer=1 reads=out} 0F1{writes=out} WAIT(0SEND_F0) "
        "0SEND_F1{peer=1 reads=out} WAIT(0SEND_F1)\n"
        "rank 1: 1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0 1RECV_F1{peer=0} WAIT(1RECV_F1) 1F1"
    ),
    right=(
        "rank 0: 0F0{writes=out} 0SEND_F0{peer=1 reads=out} WAIT(0SEND_F0) 0F1{writes=out} "
        "0SEND_F1{peer=1 reads=out} WAIT(0SEND_F1)\n"
        "rank 1: 1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0 1RECV_F1{peer=0} WAIT(1RECV_F1) 1F1"
    ),
)

USE_UNDER_RECEIVE = RuleDoc(
    code="PP502",
    title="a received tensor is used before its receive is known to be done",
    severity="error",
    explanation=(
        "An asynchronous receive writes its buffer at some time between its post and its wait. What reads the "
        "buffer before the wait reads what was there before, or half of the message; what writes it may be "
        "overwritten."
    ),
    wrong=("rank 0: 0F0 0SEND_F0{peer=1} WAIT(0SEND_F0)\nrank 1: 1RECV_F0{peer=0} 1F0 WAIT(1RECV_F0)"),
    right=("rank 0: 0F0 0SEND_F0{peer=1} WAIT(0SEND_F0)\nrank 1: 1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0"),
)

FREED_IN_USE = RuleDoc(
    code="PP503",
    title="memory is freed while something still uses it",
    severity="error",
    explanation=(
        "A buffer is given back while a transfer or another queue may still read or write it, or is read (or freed) "
        "again after that with nothing written in between. The allocator hands the memory to somebody else: NaN, "
        "a wrong loss, or a crash, and only now and then. Freeing an output after its send needs the send's wait in "
        "between; freeing what a side queue reads needs a wait for that queue. With `buffers.release_output: "
        "after_post` no asynchronous send is safe."
    ),
    wrong=("rank 0: 0F0 0SEND_F0{peer=1} FREE(0SEND_F0) WAIT(0SEND_F0)\nrank 1: 1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0"),
    right=("rank 0: 0F0 0SEND_F0{peer=1} WAIT(0SEND_F0) FREE(0SEND_F0)\nrank 1: 1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0"),
)

NO_ORDER = RuleDoc(
    code="PP507",
    title="two queues use one buffer with nothing to order them",
    severity="error",
    explanation=(
        "Operations on different queues (CUDA streams), members of one batch, or one-sided accesses from another "
        "rank have an order only where a wait, a collective or a message makes one. Here at least one of the two "
        "writes. A wait that holds another queue than the one that uses the buffer does not help, nor does one for "
        "an earlier operation."
    ),
    wrong="rank 0: 0F0 0B0 0REDUCE_GRAD:dp{queue=side} 0STEP",
    right="rank 0: 0F0 0B0 WAIT(0B0){queue=side} 0REDUCE_GRAD:dp{queue=side} WAIT(0REDUCE_GRAD:dp) 0STEP",
)

ACROSS_STEPS = RuleDoc(
    code="PP508",
    title="the next step uses a buffer that this step may still be using",
    severity="error",
    explanation=(
        "Within one step all is in order, but gradients, weights and named buffers are the same in the next step. "
        "What runs on a queue of its own at the end of the step, with nothing waiting for it, meets the first "
        "operations of the next step."
    ),
    wrong="rank 0: 0F0{writes=act} 0B0 WAIT(0F0){queue=side} 0ALL_GATHER:tp{queue=side reads=act group=0}\ngroup tp: 0",
    right=(
        "rank 0: 0F0{writes=act} 0B0 WAIT(0F0){queue=side} 0ALL_GATHER:tp{queue=side reads=act group=0} "
        "WAIT(0ALL_GATHER:tp)\ngroup tp: 0"
    ),
)


def _rule(doc: RuleDoc, code: str, say: Callable[[Words, Pair], tuple[str, str]]) -> Rule:
    """The rule of races of one code; ``say`` gives the fact and the mend."""

    def check(subject: Subject) -> Iterator[Finding]:
        found = subject.once(lifetimes)
        words = Words(found, found.uses)
        pairs = found.races.pairs.get(code, [])
        yield from capped(subject, doc, _all(doc, words, pairs, say), len(pairs) + found.races.unexamined[code])

    return Rule(doc, check)


def _all(
    doc: RuleDoc, words: Words, pairs: list[Pair], say: Callable[[Words, Pair], tuple[str, str]]
) -> Iterator[Finding]:
    for pair in pairs:
        fact, mend = say(words, pair)
        yield about(words.subject, doc, f"{words.rank(pair[0])}: {fact}", map(words.op, pair), mend)


def _say_sending(words: Words, pair: Pair) -> tuple[str, str]:
    send, writer = pair
    fact = f"{words.use(writer, pair)} while {words.text(send)} may still be reading it: {words.wait(send)}"
    return fact, f"put WAIT({words.text(send)}) before {words.text(writer)}, or give it a buffer of its own"


def _say_receiving(words: Words, pair: Pair) -> tuple[str, str]:
    receive, user = pair
    fact = f"{words.use(user, pair)} while {words.text(receive)} may still be writing it: {words.wait(receive)}"
    return fact, f"put WAIT({words.text(receive)}) before {words.text(user)}"


def _say_freed(words: Words, pair: Pair) -> tuple[str, str]:
    freer, user = pair if words.does(pair[0]) == "frees" else pair[::-1]
    fact = f"{words.use(freer, pair)} while {words.text(user)} may still use it: {words.wait(user)}"
    return fact, f"put a wait for {words.text(user)} before {words.text(freer)}"


def _say_unordered(words: Words, pair: Pair) -> tuple[str, str]:
    first, second = pair
    elsewhere = words.rank(first) != words.rank(second)
    also = f"{words.text(second)} of {words.rank(second)}" if elsewhere else words.text(second)
    fact = (
        f"{words.use(first, pair)} on {words.queue(first)}, and {also} {words.does(second)} it on "
        f"{words.queue(second)}, with nothing to order them"
    )
    if elsewhere:
        return fact, "put a barrier of both ranks, or a message from one to the other, in between"
    return fact, f"let {words.queue(second)} wait for {words.text(first)} before {words.text(second)}"


def _check_freed(subject: Subject) -> Iterator[Finding]:
    """Races with a free, and uses that come after one in order."""
    found = subject.once(lifetimes)
    words = Words(found, found.uses)
    pairs = found.races.pairs.get(FREED, [])
    yield from capped(
        subject, FREED_IN_USE, _all(FREED_IN_USE, words, pairs, _say_freed), len(pairs) + found.races.unexamined[FREED]
    )
    places = after_free(found.in_order)
    yield from capped(subject, FREED_IN_USE, _uses_after_free(found, places.tolist()), len(places))


def _uses_after_free(found: Lifetimes, places: list[int]) -> Iterator[Finding]:
    uses = found.in_order
    words = Words(found, uses)
    _, last = uses.last_change
    for place in places:
        freer = int(last[place])
        again = bool(uses.mode[place] & FREES)
        fact = f"{words.use(place, (freer, place))}{' again' if again else ''}, which {words.text(freer)} freed before"
        mend = f"drop one of the two, {words.text(freer)} and {words.text(place)}"
        if not again:
            mend = f"move {words.text(freer)} behind {words.text(place)}"
        yield about(found.subject, FREED_IN_USE, f"{words.rank(place)}: {fact}", map(words.op, (freer, place)), mend)


def _check_across_steps(subject: Subject) -> Iterator[Finding]:
    found = subject.once(lifetimes)
    order, uses, races = found.over_steps
    words = Words(found, uses, order.home)
    pairs = races.pairs.get(NEXT_STEP, [])
    total = len(pairs) + races.unexamined[NEXT_STEP]
    yield from capped(subject, ACROSS_STEPS, _all(ACROSS_STEPS, words, pairs, _say_across), total)


def _say_across(words: Words, pair: Pair) -> tuple[str, str]:
    first, second = pair
    fact = (
        f"in the next step {words.use(second, pair)}, which {words.text(first)} of this step may still be using on "
        f"{words.queue(first)}: {words.wait(first)}"
    )
    return fact, f"end the step with WAIT({words.text(first)})"


RULES = (
    _rule(WRITE_UNDER_SEND, SENDING, _say_sending),
    _rule(USE_UNDER_RECEIVE, RECEIVING, _say_receiving),
    Rule(FREED_IN_USE, _check_freed),
    _rule(NO_ORDER, UNORDERED, _say_unordered),
    Rule(ACROSS_STEPS, _check_across_steps),
)
