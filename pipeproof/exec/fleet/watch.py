"""What Fleet does on one rank, as its own hooks and the groups below it tell: computations and messages, in order.

Fleet knows its messages only by their order. Here each tensor that a forward
or a backward gives is known by the object, so a message can be told by what
it carries, and a computation by what it was given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class Message:
    """A tensor sent to ``peer`` or received from it, a global rank.

    ``label`` of one that is sent says what computed it, as in ``0F2``; nothing
    where no stage did (Fleet's exchange of shapes).
    """

    sent: bool
    peer: int
    shape: tuple[int, ...]
    dtype: str
    num_slices: int
    label: str = ""


@dataclass(slots=True)
class Computed:
    """A forward or backward of a stage, as in ``1B0``, and which of the rank's receives it was given, by place."""

    op: str
    given: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Story:
    """One step of one rank. ``receives`` in ``Computed.given`` count the received messages alone."""

    messages: list[Message] = field(default_factory=list)
    computed: list[Computed] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """As the rank leaves it."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Story:
        """What ``to_json`` wrote."""
        messages = [Message(**{**one, "shape": tuple(one["shape"])}) for one in content["messages"]]
        return cls(messages, [Computed(**one) for one in content["computed"]])


class Watch:
    """Takes a rank's story down, step by step; ``enter`` is told each computation when it begins.

    ``num_ranks`` is how many pipeline ranks there are, ``place`` is this one's.
    """

    def __init__(self, place: int, num_ranks: int, enter: Callable[[str], None]) -> None:
        self._place, self._num_ranks, self._enter = place, num_ranks, enter
        self.chunk_of: Callable[[], int] = lambda: 0
        """The virtual stage that Fleet is at."""
        self._begin()

    def _begin(self) -> None:
        self._story, self._counts = Story(), Counter[str]()
        self._num_received = 0
        self._made: dict[int, tuple[Any, str]] = {}  # by id of the tensor, which is held so that the id stays its own
        self._came: dict[int, tuple[Any, int]] = {}

    def take(self) -> Story:
        """The story of the step that ended; a new one begins."""
        story = self._story
        self._begin()
        return story

    def sends(self, tensor: Any, peer: int, num_slices: int) -> None:
        """As ``Notes.sends``."""
        _, label = self._made.pop(id(tensor), (None, ""))
        self._note(tensor, peer, num_slices, label, sent=True)

    def receives(self, tensor: Any, peer: int, num_slices: int) -> None:
        """As ``Notes.receives``."""
        self._came[id(tensor)] = tensor, self._num_received
        self._num_received += 1
        self._note(tensor, peer, num_slices, "", sent=False)

    def _note(self, tensor: Any, peer: int, num_slices: int, label: str, *, sent: bool) -> None:
        dtype = str(tensor.dtype).removeprefix("paddle.")
        self._story.messages.append(Message(sent, peer, tuple(tensor.shape), dtype, num_slices, label))

    def forward_begins(self, *, input_tensor: Any, **_: Any) -> None:
        """Fleet's hook before a forward."""
        self._computes("F", input_tensor)

    def forward_ends(self, *, output_tensor: Any, **_: Any) -> None:
        """Fleet's hook behind a forward."""
        self._makes(output_tensor)

    def backward_begins(self, *, output_tensor_grad: Any, **_: Any) -> None:
        """Fleet's hook before a backward."""
        self._computes("B", output_tensor_grad)

    def backward_ends(self, *, input_tensor_grad: Any, **_: Any) -> None:
        """Fleet's hook behind a backward."""
        self._makes(input_tensor_grad)

    def _computes(self, kind: str, given: Any) -> None:
        stage = f"{self.chunk_of() * self._num_ranks + self._place}{kind}"
        op = f"{stage}{self._counts[stage]}"  # each stage takes micro-batches in their order, of which Fleet makes sure
        self._counts[stage] += 1
        came = [self._came.pop(id(one))[1] for one in _tensors(given) if id(one) in self._came]
        self._story.computed.append(Computed(op, came))
        self._enter(op)

    def _makes(self, made: Any) -> None:
        for one in _tensors(made):
            self._made[id(one)] = one, self._story.computed[-1].op


def _tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        for one in value:
            yield from _tensors(one)
    elif value is not None:
        yield value
