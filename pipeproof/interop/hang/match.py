"""Which operations of different ranks meet, and where those that meet do not agree."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeproof.interop.hang.codes import DISAGREEMENT
from pipeproof.interop.hang.records import Channel, Dump, Entry, Group, State, Unit
from pipeproof.specs.finding import Finding, OpsWitness, Severity, WitnessOp

_UNEVEN = frozenset(
    {"all_to_all", "all_to_allv", "alltoall", "alltoall_base", "all_to_all_v_single", "gather", "scatter"}
)
_UNEVEN_WORDS = ("gather_v", "scatter_v", "all_to_all", "alltoall", "barrier")


@dataclass(frozen=True)
class Matches:
    """Partners of every operation: for a message its other end, for a collective what the other members issued.

    ``missing`` has the ranks whose part of an operation no entry of their
    dump is.
    """

    partners: Mapping[tuple[int, int], tuple[Entry, ...]]
    missing: Mapping[tuple[int, int], tuple[int, ...]]
    unit_of: Mapping[tuple[int, int], Unit]
    ends: tuple[tuple[Entry, Entry], ...]
    collectives: tuple[tuple[Entry, ...], ...]


def match_entries(dumps: Sequence[Dump]) -> Matches:
    """Match the operations of all dumps.

    Messages match by their place on the channel, collectives by the number
    that their group gives them. Where a buffer was too short to hold all, the
    first message that is not done at one end is matched with that at the
    other.
    """
    whole = {dump.rank: dump.whole for dump in dumps}
    unit_of = {(entry.rank, entry.index): unit for dump in dumps for unit in dump.units for entry in unit.entries}
    channels: dict[Channel, tuple[list[Entry], list[Entry]]] = {}
    collectives: dict[tuple[Group, int], dict[int, Entry]] = {}
    for dump in dumps:
        for unit in dump.units:
            for entry in unit.entries:
                if entry.channel is not None:
                    channels.setdefault(entry.channel, ([], []))[0 if entry.is_send else 1].append(entry)
                else:
                    collectives.setdefault((entry.group, entry.number), {}).setdefault(dump.rank, entry)
    partners: dict[tuple[int, int], tuple[Entry, ...]] = {}
    missing: dict[tuple[int, int], tuple[int, ...]] = {}
    ends: list[tuple[Entry, Entry]] = []
    for channel, (sends, receives) in channels.items():
        exact = whole.get(channel.src, True) and whole.get(channel.dst, True)
        shift = 0 if exact else _num_done(receives) - _num_done(sends)
        for send, receive in _aligned(sends, receives, shift):
            if send is not None and receive is not None:
                ends.append((send, receive))
                partners[send.rank, send.index] = (receive,)
                partners[receive.rank, receive.index] = (send,)
            elif send is not None:
                missing[send.rank, send.index] = (channel.dst,)
            elif receive is not None:
                missing[receive.rank, receive.index] = (channel.src,)
    for (group, _), members in collectives.items():
        absent = tuple(rank for rank in group.ranks if rank not in members)
        for entry in members.values():
            partners[entry.rank, entry.index] = tuple(other for other in members.values() if other is not entry)
            missing[entry.rank, entry.index] = absent
    of_all = tuple(tuple(members.values()) for members in collectives.values())
    return Matches(partners, missing, unit_of, tuple(ends), of_all)


def _num_done(entries: Sequence[Entry]) -> int:
    return sum(entry.state is State.COMPLETED for entry in entries)


def _aligned(
    sends: Sequence[Entry], receives: Sequence[Entry], shift: int
) -> Iterator[tuple[Entry | None, Entry | None]]:
    """The k-th send with the (k + shift)-th receive; what stands before the first pair is left out."""
    for index in range(max(0, -shift), max(len(sends), len(receives) - shift)):
        other = index + shift
        yield (
            sends[index] if index < len(sends) else None,
            receives[other] if 0 <= other < len(receives) else None,
        )


def disagreements(matches: Matches) -> Iterator[Finding]:
    """PP932 for messages and collectives whose ends differ."""
    for send, receive in matches.ends:
        text = _message_differs(send, receive)
        if text is not None:
            yield _finding(
                f"{send.text} on rank {send.rank} and its receive on rank {receive.rank} {text}", (send, receive)
            )
    for members in matches.collectives:
        yield from _collective_differs(members)


def _message_differs(send: Entry, receive: Entry) -> str | None:
    if send.num_elements != receive.num_elements:
        return f"differ in size: {send.num_elements} elements against {receive.num_elements}"
    if send.dtypes and receive.dtypes and set(send.dtypes) != set(receive.dtypes):
        return f"differ in type: {'/'.join(send.dtypes)} against {'/'.join(receive.dtypes)}"
    if send.batched != receive.batched and State.COMPLETED not in (send.state, receive.state):
        batched = "the send" if send.batched else "the receive"
        return f"are on two communicators: {batched} is in a batch, the other end is not"
    return None


def _collective_differs(members: Sequence[Entry]) -> Iterator[Finding]:
    first = members[0]
    for what, values in (
        ("operation", [entry.kind for entry in members]),
        ("size", [] if _is_uneven(first.kind) else [str(entry.num_elements) for entry in members]),
        ("type", [] if _is_uneven(first.kind) else ["/".join(dict.fromkeys(entry.dtypes)) for entry in members]),
    ):
        odd = next((index for index, value in enumerate(values) if value != values[0]), None)
        if odd is not None:
            other = members[odd]
            message = f"collective #{first.number} of {first.group.title} differs in {what}: "
            message += f"{values[0]} on rank {first.rank}, {values[odd]} on rank {other.rank}"
            yield _finding(message, members)
            return
    if _is_uneven(first.kind) and "all" in first.kind and len(members) == len(first.group.ranks):
        given = sum(_numel(entry.input_sizes) for entry in members)
        taken = sum(_numel(entry.output_sizes) for entry in members)
        if given != taken:
            message = f"collective #{first.number} of {first.group.title} gives {given} elements on all ranks together"
            yield _finding(f"{message}, and takes {taken}", members)


def _is_uneven(kind: str) -> bool:
    return kind in _UNEVEN or any(word in kind for word in _UNEVEN_WORDS)


def _numel(sizes: Iterable[Sequence[int]]) -> int:
    total = 0
    for size in sizes:
        product = 1
        for length in size:
            product *= length
        total += product
    return total


def _finding(message: str, entries: Sequence[Entry]) -> Finding:
    ops = tuple(WitnessOp(entry.rank, f"{entry.text}: {entry.tensor_text}") for entry in entries)
    return Finding(DISAGREEMENT.code, Severity.ERROR, message, entries[0].location, witness=OpsWitness(ops))
