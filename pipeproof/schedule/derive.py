"""Derived columns of an op table: channels, FIFO positions, matches, waits, parents, edges.

Everything is computed on whole columns; Python loops run only over channels, and over operations whose waits are out of
order. This module checks nothing: an unmatched transfer has no match, and a wait for an operation that is not under way
waits for ``NONE``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from pipeproof.schedule.columns import NONE, Columns, IntColumn, work_item_of
from pipeproof.schedule.ops import (
    CHILD_KINDS,
    COLLECTIVE_KINDS,
    COMPUTE_KINDS,
    FORWARD_KINDS,
    KIND_CODE,
    KINDS,
    PART_KINDS,
    SEND_KINDS,
    TRANSFER_KINDS,
    UPDATE_KINDS,
    OpKind,
)

BoolColumn = NDArray[np.bool_]


def is_kind(kind: IntColumn, kinds: frozenset[OpKind]) -> BoolColumn:
    """Return a mask of the entries of a kind column that are in ``kinds``."""
    table = np.array([k in kinds for k in KINDS])
    return table[kind]


def packed(*columns: IntColumn) -> IntColumn:
    """One integer per row: two are equal exactly if all ``columns`` (each >= ``NONE``) are equal.

    Raises:
        OverflowError: the columns hold too many values for 63 bits.
    """
    key = np.zeros(len(columns[0]), dtype=np.int64)
    room = 1
    for column in columns:
        size = int(column.max(initial=NONE)) + 2
        room *= size
        if room >= 2**63:
            raise OverflowError("operations are numbered too high for this table")
        key = key * size + (column + 1)
    return key


def look_up(keys: IntColumn, values: IntColumn, wanted: IntColumn, missing: int = NONE) -> IntColumn:
    """For each of ``wanted`` the value at its place among the sorted ``keys``, ``missing`` where it is not there."""
    if not len(keys):
        return np.full(len(wanted), missing, dtype=np.int64)
    index = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[index] == wanted, values[index], missing)


def place_in_group(key: IntColumn) -> IntColumn:
    """For each row, the number of earlier rows with the same key."""
    order = np.argsort(key, kind="stable")
    position = np.empty(len(key), dtype=np.int64)
    position[order] = np.arange(len(key)) - _group_starts(key[order])
    return position


def _group_starts(ordered: IntColumn) -> IntColumn:
    """For each entry of a sorted column, the begin of its run of equal entries."""
    begins = np.ones(len(ordered), dtype=bool)
    begins[1:] = ordered[1:] != ordered[:-1]
    return np.maximum.accumulate(np.where(begins, np.arange(len(ordered)), 0)) if len(ordered) else ordered


def channel_columns(columns: Columns, rank: IntColumn) -> tuple[IntColumn, list[tuple[int, int, int]]]:
    """(channel of each row, (communicator, src, dst) of each channel), channels by first appearance."""
    kind, peer = columns.values["kind"], columns.values["peer"]
    rows = np.flatnonzero(is_kind(kind, TRANSFER_KINDS))
    channel = np.full(len(kind), NONE, dtype=np.int64)
    sends = is_kind(kind[rows], SEND_KINDS)
    src, dst = np.where(sends, rank[rows], peer[rows]), np.where(sends, peer[rows], rank[rows])
    declared = columns.values["communicator"][rows]
    communicator = np.where(declared == NONE, np.where(is_kind(kind[rows], FORWARD_KINDS), 0, 1), declared)
    _, first, inverse = np.unique(packed(communicator, src, dst), return_index=True, return_inverse=True)
    by_appearance = np.argsort(first, kind="stable")
    number = np.empty(len(first), dtype=np.int64)
    number[by_appearance] = np.arange(len(first))
    channel[rows] = number[inverse]
    where = first[by_appearance]
    ends = np.stack([communicator[where], src[where], dst[where]], axis=1) if len(where) else np.empty((0, 3))
    return channel, [(int(c), int(s), int(d)) for c, s, d in ends.tolist()]


def position_column(columns: Columns, rank: IntColumn, channel: IntColumn) -> IntColumn:
    """The position of a transfer among its channel's sends or receives, or of a collective on its group and rank."""
    kind = columns.values["kind"]
    position = np.full(len(kind), NONE, dtype=np.int64)
    transfers = np.flatnonzero(channel != NONE)
    position[transfers] = place_in_group(channel[transfers] * 2 + is_kind(kind[transfers], SEND_KINDS))
    calls = np.flatnonzero(is_kind(kind, COLLECTIVE_KINDS))
    position[calls] = place_in_group(packed(rank[calls], columns.values["group"][calls]))
    return position


def match_column(kind: IntColumn, channel: IntColumn, position: IntColumn) -> IntColumn:
    """The other end of each transfer: the k-th send of a channel meets its k-th receive."""
    match = np.full(len(kind), NONE, dtype=np.int64)
    transfers = np.flatnonzero(channel != NONE)
    key = packed(channel[transfers], position[transfers])
    is_send = is_kind(kind[transfers], SEND_KINDS)
    sends, recvs = transfers[is_send], transfers[~is_send]
    _, left, right = np.intersect1d(key[is_send], key[~is_send], assume_unique=True, return_indices=True)
    match[sends[left]], match[recvs[right]] = recvs[right], sends[left]
    return match


def waits_for_column(columns: Columns, rank: IntColumn) -> IntColumn:
    """The row that each WAIT waits for.

    One wait finishes one transfer: the earliest transfer of the target's name that is under way without a wait. Several
    queues may wait for any other operation: the last one of the target's name before the wait.
    """
    values = columns.values
    waits_for = np.full(len(rank), NONE, dtype=np.int64)
    waits = np.flatnonzero(values["kind"] == KIND_CODE[OpKind.WAIT])
    usual = waits[~np.isin(waits, list(columns.unusual))] if columns.unusual else waits
    if len(usual):
        wanted = np.zeros(len(KINDS), dtype=bool)
        wanted[values["target_kind"][usual]] = True
        targets = np.flatnonzero(wanted[values["kind"]] & (values["target_kind"] == NONE))
        both = np.concatenate([usual, targets])
        named = np.concatenate([values["target_kind"][usual], values["kind"][targets]])
        names = ("stage", "work_item", "axis", "index")
        key = packed(rank[both], named, *(values[name][both] for name in names))
        wait_key, target_key = key[: len(usual)], key[len(usual) :]
        finishes = is_kind(values["target_kind"][usual], TRANSFER_KINDS)
        if finishes.all():
            _pair_waits(wait_key, usual, target_key, targets, waits_for)
        else:
            _pair_waits(wait_key[finishes], usual[finishes], target_key, targets, waits_for)
            _last_before(wait_key[~finishes], usual[~finishes], target_key, targets, waits_for)
    for wait in sorted(columns.unusual):
        _find_unusual(columns, wait, waits_for)
    return waits_for


def _last_before(
    wait_key: IntColumn, waits: IntColumn, target_key: IntColumn, targets: IntColumn, waits_for: IntColumn
) -> None:
    order = np.lexsort((targets, target_key))
    for key in np.unique(wait_key).tolist():
        named = targets[order][slice(*np.searchsorted(target_key[order], [key, key + 1]))]
        of_key = waits[wait_key == key]
        positions = np.searchsorted(named, of_key) - 1
        waits_for[of_key[positions >= 0]] = named[positions[positions >= 0]]


def _pair_waits(
    wait_key: IntColumn, waits: IntColumn, target_key: IntColumn, targets: IntColumn, waits_for: IntColumn
) -> None:
    """The k-th wait of a name takes its k-th target if that comes first; names out of order are walked."""
    wait_id, target_id = _numbered(wait_key, target_key)
    _, left, right = np.intersect1d(wait_id, target_id, assume_unique=True, return_indices=True)
    in_order = targets[right] < waits[left]
    paired = np.zeros(len(waits), dtype=bool)
    paired[left[in_order]] = True
    waits_for[waits[left[in_order]]] = targets[right[in_order]]
    for key in np.unique(wait_key[~paired]).tolist():
        key_waits, key_targets = waits[wait_key == key].tolist(), targets[target_key == key].tolist()
        waits_for[key_waits] = _walked(key_waits, key_targets)


def _numbered(wait_key: IntColumn, target_key: IntColumn) -> tuple[IntColumn, IntColumn]:
    """Keys combined with the position among equal keys, in one numbering for waits and targets."""
    places = place_in_group(wait_key), place_in_group(target_key)
    both = packed(np.concatenate([wait_key, target_key]), np.concatenate(places))
    return both[: len(wait_key)], both[len(wait_key) :]


def _walked(waits: list[int], targets: list[int]) -> list[int]:
    """Return the targets of the waits of one name, in program order: a wait before its target gets ``NONE``."""
    result = []
    pending: list[int] = []
    for wait in waits:
        while targets and targets[0] < wait:
            pending.append(targets.pop(0))
        result.append(pending.pop(0) if pending else NONE)
    return result


def _find_unusual(columns: Columns, wait: int, waits_for: IntColumn) -> None:
    """A wait for a child collective: the last such child before it on its rank."""
    op = columns.unusual[wait]
    if op.kind is not OpKind.WAIT or op.target is None or op.target.target is None:
        return
    child, values = op.target, columns.values
    first = int(columns.offsets[np.searchsorted(columns.offsets, wait, side="right") - 1])
    before = slice(first, wait)
    same = (
        (values["kind"][before] == KIND_CODE[child.kind])
        & (values["stage"][before] == child.stage)
        & (values["work_item"][before] == work_item_of(child, columns.num_splits))
        & (values["target_kind"][before] == KIND_CODE[op.target.target.kind])
        & (values["index"][before] == child.index)
    )
    matching = np.flatnonzero(same)
    waits_for[wait] = first + int(matching[-1]) if len(matching) else NONE


def with_children(waits_for: IntColumn, parent: IntColumn) -> IntColumn:
    """The waits, with operations that have collectives replaced by the last of these: only then have they ended.

    The last collective before the wait counts.
    """
    waits, children = np.flatnonzero(waits_for != NONE), np.flatnonzero(parent != NONE)
    has_any = np.zeros(len(parent), dtype=bool)
    has_any[parent[children]] = True
    waits = waits[has_any[waits_for[waits]]]
    if not len(waits):
        return waits_for
    by_parent = children[np.lexsort((children, parent[children]))]
    size = len(parent)
    index = np.searchsorted(parent[by_parent] * size + by_parent, waits_for[waits] * size + waits) - 1
    last = by_parent[np.maximum(index, 0)]
    has_child = (index >= 0) & (parent[last] == waits_for[waits])
    result = waits_for.copy()
    result[waits[has_child]] = last[has_child]
    return result


def parent_column(columns: Columns, rank: IntColumn) -> IntColumn:
    """The computation, reduction or gather of each child collective or part: the last earlier one of that name."""
    values = columns.values
    parent = np.full(len(rank), NONE, dtype=np.int64)
    children = np.flatnonzero(is_kind(values["kind"], CHILD_KINDS | PART_KINDS) & (values["target_kind"] != NONE))
    if not len(children):
        return parent
    owns = is_kind(values["kind"], COMPUTE_KINDS | UPDATE_KINDS)
    last = np.maximum.accumulate(np.where(owns, np.arange(len(rank)), NONE))
    candidate = last[children]
    fits = (candidate != NONE) & (rank[candidate] == rank[children])
    for name, of_parent in (("target_kind", "kind"), ("stage", "stage"), ("work_item", "work_item")):
        fits &= values[name][children] == values[of_parent][candidate]
    of_update = np.isin(values["target_kind"][children], [KIND_CODE[kind] for kind in UPDATE_KINDS])
    own_axis = values["axis"][candidate]
    fits &= ~of_update | (own_axis == values["axis"][children]) | (own_axis == NONE)
    parent[children[fits]] = candidate[fits]
    if not fits.all():
        parent[children[~fits]] = _last_of_name(columns, rank, children[~fits], np.flatnonzero(owns))
    return parent


def _last_of_name(columns: Columns, rank: IntColumn, children: IntColumn, owners: IntColumn) -> IntColumn:
    """For each child the last earlier one of ``owners`` with the kind, stage and work item of its target."""
    values, both = columns.values, np.concatenate([owners, children])
    named = np.concatenate([values["kind"][owners], values["target_kind"][children]])
    key = packed(rank[both], named, values["stage"][both], values["work_item"][both])
    order = np.lexsort((both, key))  # an owner of a key is before the children that follow it
    is_owner = order < len(owners)
    last = np.maximum.accumulate(np.where(is_owner, np.arange(len(order)), NONE))
    has_owner = last >= _group_starts(key[order])
    last_owner = np.where(has_owner, both[order][np.where(has_owner, last, 0)], NONE)
    result = np.empty(len(both), dtype=np.int64)
    result[order] = last_owner
    return result[len(owners) :]


def part_before_column(columns: Columns, parent: IntColumn) -> IntColumn:
    """For each PART and each collective of a computation with PARTs: its predecessor in the same computation."""
    before = np.full(len(parent), NONE, dtype=np.int64)
    kind = columns.values["kind"]
    parts = np.flatnonzero((kind == KIND_CODE[OpKind.PART]) & (parent != NONE))
    if len(parts):
        has_parts = np.zeros(len(parent), dtype=bool)
        has_parts[parent[parts]] = True
        rows = np.flatnonzero((parent != NONE) & (kind != KIND_CODE[OpKind.WEIGHTS]))
        rows = rows[has_parts[parent[rows]]]
        edges = chain_edges(rows, parent[rows])
        before[edges[:, 1]] = edges[:, 0]
    return before


READS: Mapping[OpKind, tuple[str, ...]] = MappingProxyType(
    {
        OpKind.FORWARD: ("input",),
        OpKind.BACKWARD: ("output_grad", "kept"),
        OpKind.BACKWARD_INPUT: ("output_grad", "kept"),
        OpKind.BACKWARD_WEIGHT: ("kept",),
        OpKind.OFFLOAD: ("kept",),
        OpKind.RELOAD: ("host",),
        OpKind.SLICE_FORWARD: ("output",),
        OpKind.SEND_FORWARD: ("output",),
        OpKind.GATHER_FORWARD: ("input",),
        OpKind.SLICE_BACKWARD: ("input_grad",),
        OpKind.SEND_BACKWARD: ("input_grad",),
        OpKind.GATHER_BACKWARD: ("output_grad",),
    }
)
"""Tensors of its stage and micro-batch that each kind reads; a forward keeps ``kept`` for its backward, ``host``
is its copy in host memory."""

WRITES: Mapping[OpKind, tuple[str, ...]] = MappingProxyType(
    {
        OpKind.FORWARD: ("output", "kept"),
        OpKind.BACKWARD: ("input_grad",),
        OpKind.BACKWARD_INPUT: ("input_grad", "kept"),
        OpKind.OFFLOAD: ("host",),
        OpKind.RELOAD: ("kept",),
        OpKind.SLICE_FORWARD: ("output",),
        OpKind.RECV_FORWARD: ("input",),
        OpKind.GATHER_FORWARD: ("input",),
        OpKind.SLICE_BACKWARD: ("input_grad",),
        OpKind.RECV_BACKWARD: ("output_grad",),
        OpKind.GATHER_BACKWARD: ("output_grad",),
    }
)
"""Tensors of its stage and micro-batch that each kind writes."""

TENSOR_NAMES = ("input", "output", "input_grad", "output_grad", "kept", "host")


def data_edges(kind: IntColumn, rank: IntColumn, stage: IntColumn, work_item: IntColumn) -> IntColumn:
    """Producer to consumer within a rank: the last writer of each tensor before each reader, shape [n, 2]."""
    parts = [
        (rows, name, writes)
        for writes, table in ((0, READS), (1, WRITES))
        for op_kind, names in table.items()
        for rows in [np.flatnonzero(kind == KIND_CODE[op_kind])]
        for name in names
    ]
    row = np.concatenate([rows for rows, _, _ in parts])
    name = np.concatenate([np.full(len(rows), TENSOR_NAMES.index(name)) for rows, name, _ in parts])
    writes = np.concatenate([np.full(len(rows), flag) for rows, _, flag in parts])
    key = packed(rank[row], name, stage[row], work_item[row])
    order = np.lexsort((writes, row, key))  # an operation reads before it writes
    row, key, writes = row[order], key[order], writes[order]
    last = np.maximum.accumulate(np.where(writes == 1, np.arange(len(row)), NONE)) if len(row) else row
    readers = np.flatnonzero((writes == 0) & (last != NONE))
    readers = readers[last[readers] >= _group_starts(key)[readers]]
    return sorted_edges(row[last[readers]], row[readers])


def sorted_edges(source: IntColumn, target: IntColumn) -> IntColumn:
    """Edges by source, then target, each once; shape [n, 2]."""
    if not len(source):
        return np.empty((0, 2), dtype=np.int64)
    return np.unique(np.stack([source, target], axis=1), axis=0)


def chain_edges(rows: IntColumn, key: IntColumn) -> IntColumn:
    """From each row to the next row with the same key; shape [n, 2]."""
    order = np.argsort(key, kind="stable")
    rows, key = rows[order], key[order]
    same = key[1:] == key[:-1]
    return sorted_edges(rows[:-1][same], rows[1:][same])
