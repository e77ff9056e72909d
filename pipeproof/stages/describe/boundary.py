"""The tensors that cross stage boundaries, and how large they are micro-batch by micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

from pipeproof.specs.layout import INVARIANT, Placement, sharded
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.reshard import Message, reshard_messages


@dataclass(frozen=True, slots=True)
class Boundary:
    """One tensor between two stages: its shape over all TP ranks, and how it lies over them on either side.

    ``dims`` names the dims in order (``sbh`` or ``bsh``). ``tp`` is the layout
    at the sender, ``receiver_tp`` that at the receiver where it is another
    one. The gradient has the same shape and on each side the dual placement;
    with ``has_gradient`` False (ids, masks) nothing comes back. ``member`` is
    the name that tells it from others of the same edge, empty for a model's
    only one.
    """

    dims: str
    shape: tuple[int, ...]
    tp: Placement
    dtype: str
    num_tp_ranks: int
    member: str = ""
    receiver_tp: Placement | None = None
    has_gradient: bool = True

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape that one rank of the sending stage holds."""
        return self.tp.local_shape(self.shape, self.num_tp_ranks)

    def placement(self, *, at_sender: bool, gradient: bool) -> Placement:
        """How the tensor, or its gradient, lies over TP on the stage before the edge, or after it."""
        own = self.tp if at_sender or self.receiver_tp is None else self.receiver_tp
        return own.dual if gradient else own

    def local_shape_at(self, *, at_sender: bool) -> tuple[int, ...]:
        """Shape that one rank of the stage before the edge holds, or after it; of the gradient too."""
        return self.placement(at_sender=at_sender, gradient=False).local_shape(self.shape, self.num_tp_ranks)

    def grad_placement(self) -> Placement:
        """How the gradient of the boundary tensor lies over TP at the sender."""
        return self.tp.dual

    @property
    def changes_layout(self) -> bool:
        """Whether the two sides differ, so that the messages of ``reshard`` take the place of a transport."""
        return self.receiver_tp is not None and self.receiver_tp != self.tp and self.num_tp_ranks > 1

    def reshard(self, *, gradient: bool) -> tuple[Message, ...]:
        """The messages that bring it from the sender's layout to the receiver's, or its gradient back.

        In each message ``sender`` is a TP rank of the stage that sends: the
        one before the edge, for a gradient the one after it.

        Raises:
            ValueError: messages alone cannot do it (addends of a complete gradient).
        """
        ends = [self.placement(at_sender=at_sender, gradient=gradient) for at_sender in (True, False)]
        source, sink = reversed(ends) if gradient else ends
        return reshard_messages(self.shape, source, self.num_tp_ranks, sink, self.num_tp_ranks)


@dataclass(frozen=True, slots=True)
class MicroBatchSize:
    """Tokens in a sequence, over all context-parallel ranks, and sequences, of one kind of micro-batch."""

    seq_length: int
    num_rows: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the micro-batch."""
        return self.seq_length * self.num_rows

    def of_lanes(self, number: int) -> MicroBatchSize:
        """That of so many lanes, one behind the other along the rows."""
        return MicroBatchSize(self.seq_length, number * self.num_rows)


@dataclass(frozen=True, slots=True)
class Edge:
    """What crosses between two neighbouring stages: a tuple of tensors, in one of a few variants.

    ``variants`` are the distinct tuples; ``by_micro_batch`` says which of them
    each micro-batch has, and is empty where there is one for all.
    """

    variants: tuple[tuple[Boundary, ...], ...]
    by_micro_batch: tuple[int, ...] = ()

    def members(self, micro_batch: int) -> tuple[Boundary, ...]:
        """The tensors of one micro-batch, in the order in which they are sent."""
        return self.variants[self.by_micro_batch[micro_batch] if self.by_micro_batch else 0]


def describe_boundary(plan: PlanSpec) -> Boundary:
    """The activation of a GPT: invariant over TP, or sharded along the sequence with sequence parallelism.

    Of one context-parallel rank, in a micro-batch of full size, with one residual stream.
    """
    size = MicroBatchSize(plan.model.seq_length, plan.schedule.micro_batch_size)
    return activation(plan, size, plan.model.hidden_size)


def micro_batch_size(plan: PlanSpec, index: int) -> MicroBatchSize:
    """The size of the ``index``-th micro-batch of a data-parallel rank; of own layers, its rows."""
    schedule = plan.schedule
    if plan.own_layers is not None:
        return MicroBatchSize(1, schedule.micro_batch_size)
    is_last = index == schedule.num_micro_batches - 1
    return MicroBatchSize(
        plan.model.seq_length if schedule.seq_lengths is None else schedule.seq_lengths[index],
        (is_last and schedule.last_micro_batch_size) or schedule.micro_batch_size,
    )


def unit_sizes(plan: PlanSpec) -> tuple[tuple[MicroBatchSize, ...], tuple[int, ...]]:
    """The distinct sizes of the plan's units of work, and which of them each has (empty: all have the only one).

    A unit is a micro-batch or, where sequences are cut, one split of it.
    """
    schedule, num_splits = plan.schedule, plan.schedule.num_sequence_splits
    last = schedule.last_micro_batch_size
    if plan.own_layers is not None:
        return (micro_batch_size(plan, 0),), ()
    if schedule.seq_lengths is None and last is None:
        return (MicroBatchSize(plan.model.seq_length // num_splits, schedule.micro_batch_size),), ()
    number: dict[MicroBatchSize, int] = {}
    whole = [micro_batch_size(plan, index) for index in range(schedule.num_micro_batches)]
    sizes = [MicroBatchSize(size.seq_length // num_splits, size.num_rows) for size in whole]
    by_unit = tuple(number.setdefault(size, len(number)) for size in sizes for _ in range(num_splits))
    return tuple(number), by_unit


def activation(plan: PlanSpec, size: MicroBatchSize, width: int) -> Boundary:
    """The activation of a GPT in a micro-batch of ``size``, with ``width`` elements of a token."""
    dims = plan.model.activation_order
    sequence_parallel = plan.topology.sequence_parallel and plan.topology.tp > 1
    placement = sharded(dims.index("s")) if sequence_parallel else INVARIANT
    return Boundary(dims, shape_of(plan, dims, size, width), placement, plan.run.dtype, plan.topology.tp)


def shape_of(plan: PlanSpec, dims: str, size: MicroBatchSize, width: int) -> tuple[int, ...]:
    """The sizes of the dims s, b and h of one context-parallel rank."""
    sizes = {"s": size.seq_length // plan.topology.cp, "b": size.num_rows, "h": width}
    return tuple(sizes[dim] for dim in dims)
