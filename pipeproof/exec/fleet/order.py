"""What Fleet did, held against the plan: computations of each rank, messages of each pair, what each was given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, zip_longest

from pipeproof.exec.fleet.codes import NOT_AS_PLANNED
from pipeproof.exec.fleet.watch import Message, Story
from pipeproof.schedule.ops import COMPUTE_KINDS, SEND_KINDS, Op, OpKind, parse_op
from pipeproof.specs.finding import Finding, Severity
from pipeproof.verify.subject import Subject

Pair = tuple[int, int]
"""The ranks that a message goes from and to."""


def order_findings(subject: Subject, step: int, stories: Sequence[Story]) -> Iterator[Finding]:
    """Where a step of Fleet's is not the plan's; ``stories`` by rank.

    Of each rank its forwards and backwards must be the plan's, in its order.
    Of each pair of ranks the k-th send must be met by a receive of its shape
    and type; the activations that go from one to the other, and the gradients,
    must be the plan's in its order; and every computation must be given what
    the stage before, or behind, made of the same micro-batch.
    """
    yield from _computations(subject, step, stories)
    sent, received = _by_pair(stories, sent=True), _by_pair(stories, sent=False)
    yield from _pairs(step, sent, received)
    yield from _messages(subject, step, sent)
    yield from _given(step, stories, sent, len(subject.plan.stages))


def count_messages(stories: Sequence[Story]) -> int:
    """Activations and gradients that were sent."""
    return sum(bool(message.label) for story in stories for message in story.messages)


def _computations(subject: Subject, step: int, stories: Sequence[Story]) -> Iterator[Finding]:
    graph = subject.graph
    for rank, story in enumerate(stories):
        planned = [str(graph.ops[i]) for i in graph.rank_ops(rank) if graph.ops[i].kind in COMPUTE_KINDS]
        yield from _first_difference(
            f"step {step}, rank {rank}", "computes", [one.op for one in story.computed], planned
        )


def _pairs(
    step: int, sent: Mapping[Pair, Sequence[Message]], received: Mapping[Pair, Sequence[Message]]
) -> Iterator[Finding]:
    for pair in sorted({*sent, *received}):
        met = zip_longest(map(_form, sent.get(pair, ())), map(_form, received.get(pair, ())), fillvalue="nothing")
        for place, (there, here) in enumerate(met):
            if there != here:
                which = f"step {step}: message {place} from rank {pair[0]} to {pair[1]}"
                yield _finding(f"{which} is sent as {there} and received as {here}")
                break


def _messages(subject: Subject, step: int, sent: Mapping[Pair, Sequence[Message]]) -> Iterator[Finding]:
    graph = subject.graph
    planned: dict[tuple[int, int, OpKind], list[str]] = {}
    for op_id, op in enumerate(graph.ops):
        if op.kind in SEND_KINDS:
            made_by = Op(OpKind.FORWARD if op.is_forward else OpKind.BACKWARD, op.stage, op.micro_batch)
            channel = graph.channels[graph.channel[op_id]]
            planned.setdefault((channel.src, channel.dst, made_by.kind), []).append(str(made_by))
    found: dict[tuple[int, int, OpKind], list[str]] = {}
    for (src, dst), messages in sent.items():
        for message in messages:
            if message.label:
                found.setdefault((src, dst, parse_op(message.label).kind), []).append(message.label)
    for src, dst, kind in sorted({*planned, *found}):
        what = "activations" if kind is OpKind.FORWARD else "gradients"
        ours, theirs = (_once(one.get((src, dst, kind), [])) for one in (planned, found))
        yield from _first_difference(f"step {step}, rank {src}", f"sends to rank {dst}, of {what},", theirs, ours)


def _given(
    step: int, stories: Sequence[Story], sent: Mapping[Pair, Sequence[Message]], num_stages: int
) -> Iterator[Finding]:
    for rank, story in enumerate(stories):
        labels = _received_labels(rank, story, sent)
        for one in story.computed:
            op = parse_op(one.op)
            source = op._replace(stage=op.stage + (-1 if op.kind is OpKind.FORWARD else 1))
            expected = [str(source)] if 0 <= source.stage < num_stages else []
            found = _once([labels[place] for place in one.given])
            if found != expected:
                ours, theirs = (", ".join(names) or "nothing" for names in (expected, found))
                yield _finding(
                    f"step {step}, rank {rank}: {one.op} was given the tensors of {theirs} in place of {ours}"
                )
                break


def _received_labels(rank: int, story: Story, sent: Mapping[Pair, Sequence[Message]]) -> list[str]:
    """By whom each message that a rank received was made: the k-th from a rank is the k-th that this one sent to it."""
    sources = {peer: iter(messages) for (peer, dst), messages in sent.items() if dst == rank}
    ends = (next(sources.get(message.peer, iter(())), None) for message in story.messages if not message.sent)
    return ["a message that nobody sent" if end is None else end.label for end in ends]


def _by_pair(stories: Sequence[Story], *, sent: bool) -> dict[Pair, list[Message]]:
    found: dict[Pair, list[Message]] = {}
    for rank, story in enumerate(stories):
        for message in story.messages:
            if message.sent == sent:
                pair = (rank, message.peer) if sent else (message.peer, rank)
                found.setdefault(pair, []).append(message)
    return found


def _form(message: Message) -> str:
    part = f", one of {message.num_slices} parts" if message.num_slices > 1 else ""
    return f"{message.dtype} {list(message.shape or (1,))}{part}"  # Fleet sends a number, and receives it as a list


def _once(labels: Sequence[str]) -> list[str]:
    """Without repetitions: the tensors of a tuple follow each other, under one name."""
    return [label for label, _ in groupby(labels)]


def _first_difference(where: str, verb: str, found: Sequence[str], planned: Sequence[str]) -> Iterator[Finding]:
    for place, (theirs, ours) in enumerate(zip_longest(found, planned, fillvalue="nothing")):
        if theirs != ours:
            yield _finding(f"{where}: Fleet {verb} {theirs} where the plan has {ours}, at place {place}")
            return


def _finding(message: str) -> Finding:
    return Finding(NOT_AS_PLANNED.code, Severity.ERROR, message)
