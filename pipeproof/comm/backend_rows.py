"""Rows of a backend table: the meaning of each, and the effect on plans if a backend differs from it.

The tables are in ``pipeproof.comm.backends``, the only place for such facts. The deadlock rules read them,
the documentation prints them, a certificate names their version, and the
conformance suite (``pipeproof.testing.probes``) checks a backend against
them. Each row below states the meaning of the behaviour, the effect on plans
if the backend differs, and the source of the value.

A table has only facts that proofs and runs depend on. *Posts* are what pipeproof's
adapter builds from the backend's own functions; a plan's SEND and RECV use posts.
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

    Neither affects equality, hashing or the table's version.

    Raises:
        ValueError: a row without a source, or a source or other values without a row.
    """

    name: str

    send_completes: Annotated[
        SendCompletes,
        Behaviour(
            "when a send is done: with its receive, at once, or while a bounded buffer has a free slot",
            "Deadlock proofs presume the value in the table. A backend that buffers less may hang "
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
    matching: Annotated[
        Literal["fifo", "other"],
        Behaviour(
            "which send meets which receive on a channel: with fifo the k-th send meets the k-th receive",
            "Matching proofs presume FIFO. With another order, a plan that passed can give a micro-batch's "
            "tensor to another micro-batch.",
        ),
    ]
    all_gather: Annotated[Support, Behaviour("all-gather over two ranks", _NEEDED)]
    barrier: Annotated[Support, Behaviour("barrier: no rank leaves before all have come", _NEEDED)]
    max_batched_transfers: Annotated[
        int,
        Behaviour(
            "the most sends and receives of one group call that are known to progress together; 0 means no limit",
            "A plan is refused if a rank's batch is larger. A backend with a smaller limit can hang on a batch that "
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
        """The value of one row. Raises ValueError for an unknown key."""
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
