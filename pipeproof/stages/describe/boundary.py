"""Tensors that cross stage boundaries: shapes, layouts, transports, and the messages that change a layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from pipeproof.specs.axis_layout import INVARIANT, Placement, sharded
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.index_map import IndexMap, IndexRange, layout_map


@dataclass(frozen=True, slots=True)
class Boundary:
    """One tensor between two stages: its shape over all TP ranks, and its layout over them on each side.

    ``dims`` names the dims in order (``sbh`` or ``bsh``). ``tp`` is the layout at the sender, ``receiver_tp`` the
    layout at the receiver if it differs. The gradient has the same shape, and on each side the dual placement. It does
    not exist if ``has_gradient`` is False (ids, masks). ``member`` is the name of the tensor among several of one edge;
    it is empty if there is only one.
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
        """Shape on one rank of the sending stage."""
        return self.tp.local_shape(self.shape, self.num_tp_ranks)

    def placement(self, *, at_sender: bool, gradient: bool) -> Placement:
        """Placement over TP of the tensor, or its gradient, on the stage before the edge, or after it."""
        placement = self.tp if at_sender or self.receiver_tp is None else self.receiver_tp
        return placement.dual if gradient else placement

    def local_shape_at(self, *, at_sender: bool) -> tuple[int, ...]:
        """Shape of the tensor and of its gradient on one rank of the stage before the edge, or after it."""
        return self.placement(at_sender=at_sender, gradient=False).local_shape(self.shape, self.num_tp_ranks)

    def grad_placement(self) -> Placement:
        """Placement over TP of the gradient at the sender."""
        return self.tp.dual

    @property
    def changes_layout(self) -> bool:
        """True if the two sides have different layouts: the messages of ``reshard`` then replace a transport."""
        return self.receiver_tp is not None and self.receiver_tp != self.tp and self.num_tp_ranks > 1

    def reshard(self, *, gradient: bool) -> tuple[Message, ...]:
        """The messages that convert it from the sender's layout to the receiver's, or its gradient back.

        In each message ``sender`` is a TP rank of the sending stage: the stage before the edge, for a gradient the
        stage after it.

        Raises:
            ValueError: messages alone cannot do it (addends of a complete gradient).
        """
        sides = [self.placement(at_sender=at_sender, gradient=gradient) for at_sender in (True, False)]
        source, sink = reversed(sides) if gradient else sides
        return reshard_messages(self.shape, source, self.num_tp_ranks, sink, self.num_tp_ranks)


@dataclass(frozen=True, slots=True)
class MicroBatchSize:
    """Size of a micro-batch: tokens in a sequence, over all context-parallel ranks, and number of sequences."""

    seq_length: int
    num_rows: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the micro-batch."""
        return self.seq_length * self.num_rows

    def with_mtp_streams(self, number: int) -> MicroBatchSize:
        """The size of ``number`` MTP streams, joined along the rows."""
        return MicroBatchSize(self.seq_length, number * self.num_rows)


@dataclass(frozen=True, slots=True)
class Edge:
    """The tensors between two neighbouring stages: a tuple, which may differ per micro-batch.

    ``variants`` are the distinct tuples. ``by_micro_batch`` is the index of the variant of each micro-batch, empty if
    there is only one variant.
    """

    variants: tuple[tuple[Boundary, ...], ...]
    by_micro_batch: tuple[int, ...] = ()

    def members(self, micro_batch: int) -> tuple[Boundary, ...]:
        """The tensors of one micro-batch, in send order."""
        return self.variants[self.by_micro_batch[micro_batch] if self.by_micro_batch else 0]


@dataclass(frozen=True, slots=True)
class DirectEdge:
    """A tensor that its producer stage sends to later stages itself; for ``variants`` see ``Edge``."""

    name: str
    producer: int
    consumers: tuple[int, ...]
    """In ascending order."""
    variants: tuple[Boundary, ...]

    @property
    def has_gradient(self) -> bool:
        """True if each consumer sends a gradient back."""
        return self.variants[0].has_gradient


def gpt_boundary(plan: PlanSpec) -> Boundary:
    """The activation of a GPT: invariant over TP, or sharded along the sequence with sequence parallelism.

    Its size is for one context-parallel rank, a micro-batch of full size, and one residual stream.
    """
    size = MicroBatchSize(plan.model.seq_length, plan.schedule.micro_batch_size)
    return activation(plan, size, plan.gpt.hidden_size)


def micro_batch_size(plan: PlanSpec, index: int) -> MicroBatchSize:
    """The size of the ``index``-th micro-batch of a data-parallel rank. Custom layers may have no length: 1."""
    schedule = plan.schedule
    is_last = index == schedule.num_micro_batches - 1
    return MicroBatchSize(
        plan.model.seq_length if schedule.seq_lengths is None else schedule.seq_lengths[index],
        (is_last and schedule.last_micro_batch_size) or schedule.micro_batch_size,
    )


def work_item_sizes(plan: PlanSpec) -> tuple[tuple[MicroBatchSize, ...], tuple[int, ...]]:
    """The distinct sizes of the plan's work items, and the index of each work item's size (empty: one size for all).

    A work item is a micro-batch or, if sequences are split, one split of it.
    """
    schedule, num_splits = plan.schedule, plan.schedule.num_sequence_splits
    last = schedule.last_micro_batch_size
    if schedule.seq_lengths is None and last is None:
        return (MicroBatchSize(plan.model.seq_length // num_splits, schedule.micro_batch_size),), ()
    number: dict[MicroBatchSize, int] = {}
    whole = [micro_batch_size(plan, index) for index in range(schedule.num_micro_batches)]
    sizes = [MicroBatchSize(size.seq_length // num_splits, size.num_rows) for size in whole]
    by_work_item = tuple(number.setdefault(size, len(number)) for size in sizes for _ in range(num_splits))
    return tuple(number), by_work_item


def activation(plan: PlanSpec, size: MicroBatchSize, width: int) -> Boundary:
    """The activation of a GPT in a micro-batch of ``size``, with ``width`` elements per token."""
    dims = plan.gpt.activation_order
    sequence_parallel = plan.topology.sequence_parallel and plan.topology.tp > 1
    placement = sharded(dims.index("s")) if sequence_parallel else INVARIANT
    return Boundary(dims, shape_of(plan, dims, size, width), placement, plan.run.dtype, plan.topology.tp)


def shape_of(plan: PlanSpec, dims: str, size: MicroBatchSize, width: int) -> tuple[int, ...]:
    """The sizes of ``dims`` (s, b and h) on one context-parallel rank."""
    sizes = {"s": size.seq_length // plan.topology.cp, "b": size.num_rows, "h": width}
    return tuple(sizes[dim] for dim in dims)


class Message(NamedTuple):
    """``length`` elements from ``send_start`` of the sender's tensor to ``recv_start`` of the receiver's.

    Ranks count within the TP group of their side. Starts count flattened local elements.
    """

    sender: int
    receiver: int
    send_start: int
    recv_start: int
    length: int


def reshard_messages(
    shape: Sequence[int], sender: Placement, num_senders: int, receiver: Placement, num_receivers: int
) -> tuple[Message, ...]:
    """Messages that convert a tensor of global ``shape`` from the layout ``sender`` to the layout ``receiver``.

    Each element is sent once. Messages are in the order of receivers, then positions. If several senders hold an
    element, the one with the receiver's number sends it, else the first.

    Raises:
        ValueError: the ranks do not divide a dim, or a receiver needs elements that no sender holds (addends of a
            tensor that is already summed).
    """
    held = [layout_map(shape, sender, num_senders, rank) for rank in range(num_senders)]
    messages = []
    for rank in range(num_receivers):
        wanted = layout_map(shape, receiver, num_receivers, rank)
        nearest = [rank] if rank < num_senders else []
        order = nearest + [sending for sending in range(num_senders) if sending != rank]
        messages += _messages_to(rank, wanted, [(sending, held[sending].inverted()) for sending in order])
    return tuple(messages)


def _messages_to(receiver: int, wanted: IndexMap, holders: Sequence[tuple[int, IndexMap]]) -> list[Message]:
    messages: list[Message] = []
    missing = wanted.ranges
    for sender, by_whole in holders:
        still_missing: list[IndexRange] = []
        for needed in missing:
            # from the receiver's to the sender's local index
            taken = by_whole.part(needed.whole, needed.whole + needed.length, needed.local)
            messages += [Message(sender, receiver, send, recv, length) for recv, send, length in taken.ranges]
            still_missing += _rest(needed, taken)
        missing = still_missing
    if missing:
        raise ValueError(f"no sender holds the elements of receiver {receiver} from {missing[0].local} on")
    return sorted(messages, key=lambda message: message.recv_start)


def _rest(needed: IndexRange, taken: IndexMap) -> Iterator[IndexRange]:
    """The parts of ``needed`` that are not in ``taken`` (by the receiver's local index)."""
    position = needed.local
    for start, _, length in (*taken.ranges, IndexRange(needed.local + needed.length, 0, 0)):
        if start > position:
            yield IndexRange(position, needed.whole + position - needed.local, start - position)
        position = start + length


# Transports: how a tensor crosses a stage boundary, and which layouts survive it.
#
# ``full`` sends each rank's local tensor to its counterpart. ``partial`` is
# Paddle Fleet's ``enable_partial_send_recv`` (Megatron-LM calls it
# scatter-gather, arXiv:2104.04473, section 4.1): TP rank k sends the k-th 1/n of
# its flattened tensor and the receivers all-gather over TP, which presumes that
# all n ranks hold the same tensor.


class Transport(StrEnum):
    """The two transports of a boundary tensor."""

    FULL = "full"
    PARTIAL = "partial"


def effective_transport(declared: str, numel: int, num_tp_ranks: int) -> Transport:
    """The effective transport of a tensor of ``numel`` local elements.

    Fleet decides per tensor: without tensor parallelism, or when ``numel`` does
    not divide by the TP degree, ``partial`` silently becomes a full send
    (``_is_valid_send_recv_partial`` in Paddle's pp_utils/p2p_communication.py).
    """
    if declared == Transport.PARTIAL and num_tp_ranks > 1 and numel % num_tp_ranks == 0:
        return Transport.PARTIAL
    return Transport.FULL


def slice_range(numel: int, num_tp_ranks: int, tp_rank: int) -> tuple[int, int]:
    """The half-open range of flattened elements that ``partial`` sends from one TP rank."""
    share = numel // num_tp_ranks
    return tp_rank * share, (tp_rank + 1) * share
