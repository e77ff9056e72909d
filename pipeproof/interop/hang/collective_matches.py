"""Operations of different ranks that match each other, and disagreements between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeproof.diagnostics.finding import Finding, OpsWitness, WitnessOp
from pipeproof.diagnostics.wait_graph import minority, ranks_text
from pipeproof.interop.hang.flight_recorder import Channel, Dump, Entry, Group, Launch, State, numel
from pipeproof.interop.hang.hang_codes import DISAGREEMENT
from pipeproof.interop.hang.recorder_names import UNEVEN


@dataclass(frozen=True)
class Matches:
    """Partners of every operation: for a message its other end, for a collective the other members' entries.

    ``missing`` maps an operation to the ranks whose dump has no entry for their
    part of it.
    """

    partners: Mapping[tuple[int, int], tuple[Entry, ...]]
    missing: Mapping[tuple[int, int], tuple[int, ...]]
    launch_of: Mapping[tuple[int, int], Launch]
    ends: tuple[tuple[Entry, Entry], ...]
    collectives: tuple[tuple[Entry, ...], ...]


def match_entries(dumps: Sequence[Dump]) -> Matches:
    """Match the operations of all dumps.

    Messages match by their position on the channel, collectives by the number
    that their group gives them, and in a coalescing block by their position.
    If a buffer was too short for all messages, the first unfinished messages of
    both ends match, and a first block is left out.
    """
    whole = {dump.rank: dump.whole for dump in dumps}
    launch_of = {
        (entry.rank, entry.index): launch for dump in dumps for launch in dump.launches for entry in launch.entries
    }
    channels: dict[Channel, tuple[list[Entry], list[Entry]]] = {}
    collectives: dict[tuple[Group, int, int], dict[int, Entry]] = {}
    for dump in dumps:
        positions: Counter[tuple[Group, int]] = Counter()
        cut = None if dump.whole else _first_block(dump)
        for launch in dump.launches:
            for entry in launch.entries:
                if entry.channel is not None:
                    channels.setdefault(entry.channel, ([], []))[0 if entry.is_send else 1].append(entry)
                else:
                    key = entry.group, entry.number
                    if key != cut:
                        collectives.setdefault((*key, positions[key]), {})[dump.rank] = entry
                    positions[key] += 1
    partners: dict[tuple[int, int], tuple[Entry, ...]] = {}
    missing: dict[tuple[int, int], tuple[int, ...]] = {}
    ends: list[tuple[Entry, Entry]] = []
    for channel, (sends, receives) in channels.items():
        exact = whole.get(channel.src, True) and whole.get(channel.dst, True)
        shift = _first_number(sends, receives) if exact else _num_done(receives) - _num_done(sends)
        for send, receive in _aligned(sends, receives, shift):
            if send is not None and receive is not None:
                ends.append((send, receive))
                partners[send.rank, send.index] = (receive,)
                partners[receive.rank, receive.index] = (send,)
            elif send is not None:
                missing[send.rank, send.index] = (channel.dst,)
            elif receive is not None:
                missing[receive.rank, receive.index] = (channel.src,)
    for (group, _, _), members in collectives.items():
        absent = tuple(rank for rank in group.ranks if rank not in members)
        for entry in members.values():
            partners[entry.rank, entry.index] = tuple(member for member in members.values() if member is not entry)
            missing[entry.rank, entry.index] = absent
    matched_collectives = tuple(tuple(members.values()) for members in collectives.values())
    return Matches(partners, missing, launch_of, tuple(ends), matched_collectives)


def _first_block(dump: Dump) -> tuple[Group, int] | None:
    """Return the group and number of a coalescing block at the beginning of a dump, whose first entries may be lost."""
    first = dump.launches[0].entries[0] if dump.launches else None
    is_block = first is not None and first.batched and first.channel is None
    return (first.group, first.number) if first is not None and is_block else None


def _first_number(sends: Sequence[Entry], receives: Sequence[Entry]) -> int:
    """Difference of the positions at which the two ends of a channel begin."""
    return sends[0].number - receives[0].number if sends and receives else 0


def _num_done(entries: Sequence[Entry]) -> int:
    return sum(entry.state is State.COMPLETED for entry in entries)


def _aligned(
    sends: Sequence[Entry], receives: Sequence[Entry], shift: int
) -> Iterator[tuple[Entry | None, Entry | None]]:
    """Pair the k-th send with the (k + shift)-th receive; entries before the first pair are left out."""
    for index in range(max(0, -shift), max(len(sends), len(receives) - shift)):
        receive_index = index + shift
        yield (
            sends[index] if index < len(sends) else None,
            receives[receive_index] if 0 <= receive_index < len(receives) else None,
        )


@dataclass(frozen=True)
class Disagreement:
    """Operations that should match and differ: the ranks that differ from the majority (or all), and finding PP932."""

    entries: tuple[Entry, ...]
    odd_ranks: tuple[int, ...]
    finding: Finding


def disagreements(matches: Matches) -> Iterator[Disagreement]:
    """Find PP932: messages and collectives whose ends differ."""
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


def _collective_differs(members: Sequence[Entry]) -> Iterator[Disagreement]:
    first, is_uneven = members[0], any(entry.kind in UNEVEN for entry in members)
    for property_name, values in (
        ("operation", [entry.op for entry in members]),
        ("size", [] if is_uneven else [str(entry.num_elements) for entry in members]),
        ("type", [] if is_uneven else ["/".join(dict.fromkeys(entry.dtypes)) for entry in members]),
    ):
        if len(set(values)) > 1:
            by_rank = dict(zip((entry.rank for entry in members), values, strict=True))
            forms = {value: [rank for rank in by_rank if by_rank[rank] == value] for value in values}
            message = f"collective #{first.number} of {first.group.title} differs in {property_name}: "
            message += ", ".join(f"{value} on {ranks_text(ranks)}" for value, ranks in forms.items())
            yield _finding(message, members, minority(by_rank))
            return
    if first.op == "all_to_all" and len(members) == len(first.group.ranks):
        num_sent = sum(numel(entry.input_sizes) for entry in members)
        num_received = sum(numel(entry.output_sizes) for entry in members)
        if num_sent != num_received:
            message = f"collective #{first.number} of {first.group.title} sends {num_sent} elements in total"
            yield _finding(f"{message}, and receives {num_received}", members)


def _finding(message: str, entries: Sequence[Entry], odd_ranks: Sequence[int] = ()) -> Disagreement:
    """The finding at the line of an odd rank, if there is one."""
    odd = tuple(sorted(odd_ranks)) or tuple(sorted(entry.rank for entry in entries))
    at = next(entry.location for entry in entries if entry.rank in odd)
    ops = tuple(WitnessOp(entry.rank, f"{entry.text}: {entry.tensor_text}") for entry in entries)
    return Disagreement(tuple(entries), odd, DISAGREEMENT.finding(message, at, witness=OpsWitness(ops)))
