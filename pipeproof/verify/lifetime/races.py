"""Races and wrong sequences among the uses of each buffer, in columns.

Uses of a buffer are looked at in program order. It suffices that each use
comes after the write or free before it, and each write or free after all uses
since the one before: then all conflicting uses are in order. Such pairs are as
many as there are uses. Where a pair is not in order for one of the common
reasons, the exact order decides, and if that runs against the program, all
pairs of the buffer are looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np

from pipeproof.schedule.derive import BoolColumn
from pipeproof.schedule.optable import NONE, IntColumn
from pipeproof.verify.lifetime.order import Order
from pipeproof.verify.lifetime.tensors import FREES, WRITES
from pipeproof.verify.lifetime.uses import Uses

Pair = tuple[int, int]
"""Two places in ``Uses``, in program order."""


@dataclass
class Races:
    """What ``find_races`` found, by code; places are of the uses that were searched.

    ``racing`` buffers have a race, ``reordered`` ones an order that is not
    that of the program. ``unexamined`` counts, by code, pairs that were left
    out because enough races of that code were found.
    """

    pairs: dict[str, list[Pair]] = field(default_factory=dict)
    racing: set[int] = field(default_factory=set)
    reordered: set[int] = field(default_factory=set)
    unexamined: Counter[str] = field(default_factory=Counter)


def neighbours(uses: Uses) -> tuple[IntColumn, IntColumn]:
    """Pairs of uses (places, earlier and later) whose order implies that of all conflicting uses."""
    begins, last = uses.last_change
    after_change = np.flatnonzero(last != NONE)
    place = np.arange(len(uses))
    following = np.minimum.accumulate(np.where(uses.changes, place, len(uses))[::-1])[::-1]
    reads = np.flatnonzero(~uses.changes & (following < len(uses)))
    reads = reads[begins[following[reads]] == begins[reads]]
    return np.concatenate([last[after_change], reads]), np.concatenate([after_change, following[reads]])


def find_races(order: Order, uses: Uses, code_of: Callable[[Pair], str | None], *, most: int) -> Races:
    """Every race, named by ``code_of`` (None: not looked at); of one code no more than ``most``.

    Linear in uses, plus one walk of the events for each pair that program
    order and waits do not settle.
    """
    races = Races()
    earlier, later = neighbours(uses)
    a, b = uses.op[earlier], uses.op[later]
    unsettled = np.flatnonzero(~order.surely(a, b) | (order.rank[a] != order.rank[b]))
    if uses.shared:
        unsettled = unsettled[~np.isin(uses.buffer[earlier[unsettled]], list(uses.shared))]
    for pair in zip(earlier[unsettled].tolist(), later[unsettled].tolist(), strict=True):
        _judge(order, uses, pair, code_of, most, races)
    for buffer in sorted((races.reordered - races.racing) | uses.shared):
        first, last = np.searchsorted(uses.buffer, [buffer, buffer + 1]).tolist()
        for one, other in combinations(range(first, last), 2):
            if uses.changes[one] or uses.changes[other]:
                _judge(order, uses, (one, other), code_of, most, races)
    return races


def _judge(
    order: Order, uses: Uses, pair: Pair, code_of: Callable[[Pair], str | None], most: int, races: Races
) -> None:
    code = code_of(pair)
    buffer = int(uses.buffer[pair[0]])
    first, second = (int(uses.op[place]) for place in pair)
    if code is None or (order.call[first] != NONE and order.call[first] == order.call[second]):
        return
    if len(races.pairs.get(code, ())) >= most:
        races.unexamined[code] += 1
        races.racing.add(buffer)
        return
    first_end, second_end = (int(uses.end[place]) for place in pair)
    if order.before(first_end, second):
        return
    if order.before(second_end, first):
        races.reordered.add(buffer)
        return
    races.racing.add(buffer)
    races.pairs.setdefault(code, []).append(pair)


def settled(order: Order, uses: Uses, races: Races) -> Uses:
    """The uses of buffers without races, each buffer's in the order in which they happen.

    Buffers that collectives of several ranks use together have no such order, and are left out.
    """
    unclear = races.racing | uses.shared
    if not unclear and not races.reordered:
        return uses
    places = np.flatnonzero(~np.isin(uses.buffer, list(unclear)))
    for buffer in sorted(races.reordered - unclear):
        mine = np.flatnonzero(uses.buffer[places] == buffer)
        ops = uses.op[places[mine]].tolist()
        before = [sum(order.before(other, op) for other in ops if other != op) for op in ops]
        places[mine] = places[mine][np.argsort(before, kind="stable")]
    return uses.at(places)


def unwritten(uses: Uses, ignored: BoolColumn) -> IntColumn:
    """Reads (places) that come before every write of a buffer that the program does write or free.

    ``ignored`` uses count neither as such reads nor as writes.
    """
    _, last = uses.last_change
    written_at_all = np.isin(uses.buffer, uses.buffer[uses.changes & ~ignored])
    return np.flatnonzero(uses.reads & (last == NONE) & written_at_all & ~ignored)


def after_free(uses: Uses) -> IntColumn:
    """Uses (places) of a buffer that was freed and not written since; writes alone bring it back."""
    _, last = uses.last_change
    known = np.flatnonzero(last != NONE)
    gone = known[(uses.mode[last[known]] & FREES) != 0]
    wrong: IntColumn = gone[uses.reads[gone] | ((uses.mode[gone] & (WRITES | FREES)) == FREES)]
    return wrong


def overwritten(uses: Uses, owner: IntColumn) -> IntColumn:
    """Reads (places) that find another owner's write where their own was before.

    ``owner`` names, for each use, whose data it is about; NONE for nobody's.
    """
    _, last = uses.last_change
    known = np.flatnonzero((last != NONE) & uses.reads & (owner != NONE))
    before = last[known]
    plain = uses.mode[before] == WRITES
    foreign: IntColumn = known[plain & (owner[before] != NONE) & (owner[before] != owner[known])]
    if not len(foreign):
        return foreign
    writes = np.flatnonzero(uses.changes & (owner != NONE))
    own_place = {key: int(place) for place, key in sorted(_keys(uses, owner, writes), reverse=True)}
    had = [own_place.get(key, len(uses)) < place for place, key in _keys(uses, owner, foreign)]
    return np.array([place for place, was in zip(foreign.tolist(), had, strict=True) if was], dtype=np.int64)


def _keys(uses: Uses, owner: IntColumn, places: IntColumn) -> list[tuple[int, Pair]]:
    return [
        (place, (buffer, whose))
        for place, buffer, whose in zip(
            places.tolist(), uses.buffer[places].tolist(), owner[places].tolist(), strict=True
        )
    ]


def repeated(uses: Uses, order: Order) -> Uses:
    """The uses of lasting buffers in both steps of ``order``."""
    lasting = uses.at(np.flatnonzero(uses.buffer >= uses.first_lasting))
    twice = lasting.at(np.tile(np.arange(len(lasting)), 2))
    ids = [np.flatnonzero(order.step == step) for step in range(2)]
    op, end = (np.concatenate([of_step[column] for of_step in ids]) for column in (lasting.op, lasting.end))
    return replace(twice, op=op, end=end).at(np.lexsort((op, twice.buffer)))
