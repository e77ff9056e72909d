"""The attributes that each kind of row may have; any other attribute would be ignored, and is an error (PP144).

A row is an operation with attributes (``columns.Row``). An attribute has a
meaning on a row only if something reads it there: the order of operations,
the matching of messages, the lifetimes of buffers, or the sums of gradients.
``TABLE`` is the one list of these meanings:

- ``queue`` is on every row: each row is an entry of some queue.
- ``batch`` joins operations into one call. A WAIT or a FREE is no part of a
  call: it names an operation.
- ``reads``, ``writes`` and ``frees`` name memory that an operation uses while
  it runs. A WAIT uses none, a FREE only frees, and an exchange of shapes and
  a barrier carry no elements.
- A PART or WEIGHTS is no part of a call, since turns have an order. Its computation has the sums and scales.
- ``peer`` and ``communicator`` select the channel of a transfer. A broadcast
  has a peer too: its root.
- ``tensor`` and ``range`` are the elements that a transfer carries, a SLICE
  or a GATHER moves, a collective puts in, or a STEP updates. An exchange of
  shapes names the tensor whose shape it is, and no elements. ``shift`` moves
  such a range from one TP rank to the next; a collective has the same range
  on all of them.
- ``group`` is the set of ranks that issue a collective together.
- ``reduction`` is the operator of a reduction. On B and W it can only be
  ``overwrite``: the gradient is written, not added. A forward and an
  input-gradient operation add to no weight gradient. A REDUCE_GRAD with
  collectives below it computes nothing by itself, so they have the reduction.
  Below another operation every collective has one, because the description of
  a layer gives each the default ``sum``; on those that only move data it
  states nothing else.
- ``scale`` multiplies. On F the losses of its stage; on B and W what they add
  to the weight gradients; on I, SEND_B and RECV_B the gradient that goes to
  the stage before, and so everything that earlier stages add; on SCALE_GRAD
  and on the sums of gradients the accumulated gradient. Forward transfers
  have none: a scaled activation would make another model, whose gradients are
  not a multiple of the declared ones.
"""

from __future__ import annotations

from dataclasses import dataclass

ATTRIBUTES = (
    "peer", "tensor", "range", "shift", "group", "batch", "queue", "communicator", "reduction", "scale",
    "reads", "writes", "frees",
)  # fmt: skip
"""The attributes of a row, by their keys in the text form."""


@dataclass(frozen=True, slots=True)
class Legal:
    """The attributes that rows of some ``kinds`` may have, and the values that ``reduction`` may have.

    ``below`` restricts this to collectives below an operation of these kinds,
    ``has_children`` to operations with collectives below them.
    """

    kinds: str
    attributes: str
    reductions: str = ""
    below: str = ""
    has_children: bool = False


_RUNS = "queue batch reads writes frees"
_MESSAGE = "peer communicator tensor range shift"
_PARENTS = "F B I W REDUCE_GRAD GATHER_WEIGHT"

TABLE = (
    Legal("F I SCALE_GRAD", f"{_RUNS} scale"),
    Legal("B W", f"{_RUNS} scale reduction", "overwrite"),
    Legal("SEND_F RECV_F", f"{_RUNS} {_MESSAGE}"),
    Legal("SEND_B RECV_B", f"{_RUNS} {_MESSAGE} scale"),
    Legal("SEND_META_F RECV_META_F SEND_META_B RECV_META_B", "queue batch peer communicator tensor"),
    Legal("SLICE_F SLICE_B", f"{_RUNS} tensor range shift"),
    Legal("GATHER_F GATHER_B", f"{_RUNS} tensor range shift group"),
    Legal("WAIT", "queue"),
    Legal("FREE", "queue frees"),
    Legal("UNSHARD RESHARD GATHER_WEIGHT OFFLOAD RELOAD", _RUNS),
    Legal("STEP", f"{_RUNS} range"),
    Legal("REDUCE_GRAD", f"{_RUNS} group scale reduction", "sum avg max"),
    Legal("REDUCE_GRAD", f"{_RUNS} group scale", has_children=True),
    Legal("ALL_REDUCE REDUCE_SCATTER", f"{_RUNS} group tensor range reduction", "sum avg max"),
    Legal("ALL_REDUCE REDUCE_SCATTER", f"{_RUNS} group tensor range reduction scale", "sum avg max", "REDUCE_GRAD"),
    Legal("ALL_GATHER ALL_TO_ALL", f"{_RUNS} group tensor range"),
    Legal("ALL_GATHER ALL_TO_ALL", f"{_RUNS} group tensor range reduction", "sum", _PARENTS),
    Legal("PART WEIGHTS", "queue reads writes frees"),
    Legal("BROADCAST", f"{_RUNS} group tensor range peer"),
    Legal("BARRIER", "queue batch group"),
)
"""By kind; a later entry for a part of a kind's rows replaces an earlier one."""
