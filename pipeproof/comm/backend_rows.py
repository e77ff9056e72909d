"""Rows of a backend table: the meaning of each, and the effect on plans if a backend differs from it.

The tables are in ``pipeproof.comm.backends``, the only place for such facts. The deadlock rules read them,
the documentation prints them, a certificate names their version, and the
conformance suite (``pipeproof.testing.probes``) checks a backend against
them. Each row below states the meaning of the behaviour, the effect on plans
if the backend differs, and the source of the value.

Two layers appear. *Calls* are the backend's own functions. *Posts* are what
pipeproof's adapter builds from them; a plan's SEND and RECV use posts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Annotated, Literal, get_args, get_type_hints

RowValue = str | bool | int

SendCompletes = Literal["rendezvous", "eager", "slots"]
"""Time at which a send is done: with its receive; at once; at once while a slot of a bounded buffer is free."""

Queue = Literal["directed_edge", "pair", "communicator", "direction", "rank", "device"]
"""Transfers of a rank that wait for each other; ``pipeproof.comm.channel_models`` defines each name."""

LongerMessage = Literal["abort", "error", "hang", "truncate", "other"]
"""Result of a message longer than its buffer.

``abort`` ends a process by a signal, ``error`` raises, ``hang`` never returns,
``truncate`` fills the buffer and drops the rest; ``other`` is none of these.
"""

ShorterMessage = Literal["abort", "error", "hang", "stale_rest", "other"]
"""Result of a message shorter than its buffer: ``stale_rest`` leaves the end as it was, silently."""

Support = Literal["works", "wrong", "missing", "hangs", "aborts"]
"""Result of an operation: it gives the right values, wrong values silently, raises, never returns, or kills."""


@dataclass(frozen=True, slots=True)
class Behaviour:
    """The subject of a row, the same for every backend."""

    meaning: str
    if_different: str
    """The effect on plans if a backend behaves differently from its table."""
    probed: bool = True
    """True if two ranks can observe it; other rows rely on their source alone."""


@dataclass(frozen=True, slots=True)
class Row:
    """One behaviour of one backend, as documentation and reports print it."""

    key: str
    value: RowValue
    meaning: str
    if_different: str
    probed: bool
    source: str


_SAME_LENGTH = (
    "The matching rules refuse sizes that differ in any case; what changes is how a violation would look at run time."
)
_COMPOSED = "The adapter does not call it: it composes its collectives of pairwise all-gathers. Plans are unaffected."
_NEEDED = "The adapter builds on it: no plan can run on this backend."


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendTable:
    """The behaviour of one backend on one kind of device, one field a row.

    Args:
        name: how messages name it, such as ``paddle-gloo``.
        sources: for every row, where its value was measured or is stated.
        also: for a row, other values that a machine may show without an
            effect on plans, because the table promises only its own value, or
            nothing.

    Neither takes part in equality, hashing or the table's version.

    Raises:
        ValueError: a row without a source, or a source or other values without a row.
    """

    name: str

    send_completes: Annotated[
        SendCompletes,
        Behaviour(
            "when a send is done: with its receive, at once, or while a bounded buffer has a free slot",
            "Deadlock proofs presume the value in the table. A backend that buffers less than it may hang "
            "plans that passed; one that buffers more cannot.",
        ),
    ]
    host_blocks_on_post: Annotated[
        bool,
        Behaviour(
            "whether posting a transfer through the adapter holds the host until the transfer is done",
            "If posting blocks, a plan that posts a send before the receive its peer waits for can hang "
            "although it passed.",
        ),
    ]
    queue: Annotated[
        Queue,
        Behaviour(
            "which posted transfers wait for each other: the adapter has a two-rank group for each edge and direction",
            "If edges share a queue, a receive posted early blocks the send behind it, and plans that passed can hang.",
        ),
    ]
    isend_blocks_host: Annotated[
        bool,
        Behaviour(
            "whether the isend call returns only when the receiver has taken the message",
            "The adapter sends from threads of its own, so plans are right either way; without blocking, "
            "the threads could go.",
        ),
    ]
    irecv_blocks_host: Annotated[
        bool,
        Behaviour(
            "whether the irecv call returns only when the message is there",
            "The adapter receives in threads of its own, so plans are right either way; without blocking, "
            "the threads could go.",
        ),
    ]
    matching: Annotated[
        Literal["fifo", "other"],
        Behaviour(
            "which send meets which receive on a channel: fifo is the k-th the k-th",
            "Matching proofs presume FIFO. With another order, a plan that passed can hand a micro-batch's "
            "tensor to another micro-batch.",
        ),
    ]
    tags: Annotated[
        bool,
        Behaviour(
            "whether the send and receive calls take a tag to match by",
            "Proofs do not use tags, so they hold either way.",
        ),
    ]
    longer_message: Annotated[
        LongerMessage, Behaviour("what comes of a message longer than the receive buffer", _SAME_LENGTH)
    ]
    shorter_message: Annotated[
        ShorterMessage, Behaviour("what comes of a message shorter than the receive buffer", _SAME_LENGTH)
    ]
    dtype_checked: Annotated[
        bool,
        Behaviour(
            "whether a send and a receive of equal size but different dtype are refused",
            "The matching rules refuse them in any case; a backend that checks only reports it a second time.",
        ),
    ]
    all_gather: Annotated[Support, Behaviour("all-gather over two ranks", _NEEDED)]
    all_reduce: Annotated[Support, Behaviour("all-reduce (sum) over two ranks", _COMPOSED)]
    broadcast: Annotated[Support, Behaviour("broadcast over two ranks", _COMPOSED)]
    barrier: Annotated[Support, Behaviour("barrier: no rank leaves before all have come", _NEEDED)]
    reduce_scatter: Annotated[Support, Behaviour("reduce-scatter (sum) over two ranks", _COMPOSED)]
    all_to_all: Annotated[Support, Behaviour("all-to-all over two ranks", _COMPOSED)]
    partial_send_recv: Annotated[
        Support,
        Behaviour(
            "the backend's own partial send and receive of one slice of a tensor",
            "Where they work the adapter's partial transport is made of them; else it is composed of slice, send and "
            "all-gather.",
        ),
    ]
    all_reduce_float16: Annotated[
        Support,
        Behaviour("all-reduce (sum) of float16 over two ranks", _COMPOSED),
    ]
    serial_group_creation: Annotated[
        bool,
        Behaviour(
            "whether groups must be created one by one, with a barrier of the world between",
            "The adapter always creates groups one by one; without the need, only start-up could be faster.",
            probed=False,
        ),
    ]
    max_group_size: Annotated[
        int,
        Behaviour(
            "the largest group, the world apart, whose collectives can be relied on; larger ones are composed of pairs",
            "The adapter uses two-rank groups only; larger ones would only be faster.",
            probed=False,
        ),
    ]
    max_batched_transfers: Annotated[
        int,
        Behaviour(
            "the most sends and receives of one group call that are known to progress together; 0 is no limit",
            "A plan is refused where a rank's batch is larger. A backend with a smaller limit can hang on a batch that "
            "passed; runs post no batches of transfers.",
            probed=False,
        ),
    ]

    sources: Mapping[str, str] = field(compare=False, repr=False)
    also: Mapping[str, frozenset[RowValue]] = field(
        default_factory=lambda: MappingProxyType({}), compare=False, repr=False
    )

    def __post_init__(self) -> None:
        odd = (set(behaviours()) ^ set(self.sources)) | (set(self.also) - set(behaviours()))
        if odd:
            raise ValueError(f"{self.name}: every row needs one source; look at {', '.join(sorted(odd))}")

    def allows(self, key: str, observed: RowValue) -> bool:
        """Return True if plans are checked for a machine that shows this value for a row."""
        expected = self.value(key)
        # True == 1 in Python, but a row with one value is not a row with the other.
        is_same = (type(expected), expected) == (type(observed), observed)
        return is_same or observed in self.also.get(key, frozenset())

    def value(self, key: str) -> RowValue:
        """The value of one row. Raises ValueError for a key that is no row."""
        if key not in behaviours():
            raise ValueError(f"no row is called {key!r}; rows are {', '.join(behaviours())}")
        value: RowValue = getattr(self, key)
        return value

    def values(self) -> dict[str, RowValue]:
        """Every row's value by key, in table order; the data of the table's version, with ``name``."""
        return {key: getattr(self, key) for key in behaviours()}

    def rows(self) -> tuple[Row, ...]:
        """The table as rows, in order, with the meaning and the source of each."""
        return tuple(
            Row(key, getattr(self, key), about.meaning, about.if_different, about.probed, self.sources[key])
            for key, about in behaviours().items()
        )


def behaviours() -> dict[str, Behaviour]:
    """The behaviours of every table by row key, in table order."""
    hints = get_type_hints(BackendTable, include_extras=True)
    annotations = {f.name: get_args(hints[f.name]) for f in fields(BackendTable)}
    return {
        name: about for name, arguments in annotations.items() for about in arguments if isinstance(about, Behaviour)
    }
