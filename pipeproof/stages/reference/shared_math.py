"""Operations that both references share: on arrays, or by methods that tensors of both frameworks have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from pipeproof.specs.compressed_attention import AttentionType, CompressedAttentionSpec
from pipeproof.specs.model import HyperConnectionsSpec
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.gradient_facts import bias_key, loss_key, loss_weights, moves_biases, routers
from pipeproof.stages.describe.synthetic import DropoutKeys, DropoutSite, dropout_rate, hash_tables

Array: TypeAlias = npt.NDArray[Any]
Choice: TypeAlias = npt.NDArray[np.bool_]
Window: TypeAlias = tuple[int, bool]
"""The first token of a window, and whether it is the first window of a document."""
_Values = TypeVar("_Values")
"""Arrays or tensors with the methods and operators of both."""


def without_biases(weights: Mapping[str, Array]) -> dict[str, Array]:
    """Return the weights without router biases."""
    return {name: weight for name, weight in weights.items() if not name.startswith(bias_key(""))}


class RouterSteps(ABC, Generic[_Values]):
    """Biases, losses and visit counts of all routers of the plan's model.

    ``state`` has the biases under the names of ``bias_key``. Missing biases are zero. Losses and biases of 16-bit runs
    are float32.
    """

    def __init__(self, plan: PlanSpec, state: Mapping[str, Array]) -> None:
        self._plan, self._weights = plan, loss_weights(plan)
        names = routers(describe_gpt(plan)) if moves_biases(plan) else ()
        num_experts = 0 if plan.model.moe is None else plan.model.moe.num_experts
        zero = np.zeros(num_experts, dtype=np.float64 if plan.run.dtype == "float64" else np.float32)
        self.biases: dict[str, Any] = {n: self._placed(np.array(state.get(bias_key(n), zero))) for n in names}
        self.visits: dict[str, Any] = {n: self._placed(np.zeros(num_experts, dtype=np.int64)) for n in names}
        self.values: dict[str, Any] = {}
        self._roots: list[Any] = []
        self._work_item = 0, 0

    @abstractmethod
    def _placed(self, numbers: Array) -> _Values:
        """Biases or visits where routers use them."""

    @abstractmethod
    def _read(self, values: _Values) -> Array:
        """A copy as an array."""

    @cached_property
    def _tables(self) -> dict[str, npt.NDArray[np.int64]]:
        return hash_tables(self._plan)

    def begin_step(self) -> dict[str, Array]:
        """Reset losses and visits, and return the biases at the beginning of the step."""
        self.values = {}
        for visits in self.visits.values():
            visits[:] = 0
        return self._state()

    def select(self, micro_batch: int, split: int = 0) -> None:
        """Select the next work item; ``micro_batch`` counts over all data ranks."""
        self._work_item = micro_batch, split

    def _add_root(self, loss: str, name: str, split: int, root: Any, value: _Values) -> None:
        """Add a weighted loss of a router, as a root of backward and as a value; splits count from the selected one."""
        self._roots.append(root)
        self.values[loss_key(loss, name, self._work_item[0], self._work_item[1] + split)] = value

    def take_roots(self) -> list[Any]:
        """Return the losses since the last call, as roots of backward in addition to the main loss."""
        roots, self._roots = self._roots, []
        return roots

    def end_step(self) -> dict[str, Array]:
        """Move the biases and return the losses and biases of the step, for comparison."""
        moe = self._plan.model.moe
        for name, bias in self.biases.items():
            assert moe is not None
            assert moe.expert_bias_rate is not None
            visits = self._read(self.visits[name])
            side = np.sign(visits.sum() - visits * moe.num_experts)
            bias += self._placed(side.astype(self._read(bias).dtype) * moe.expert_bias_rate)
        return {**{key: self._read(value) for key, value in self.values.items()}, **self._state()}

    def _state(self) -> dict[str, Array]:
        return {bias_key(name): self._read(bias) for name, bias in self.biases.items()}


class Dropout(ABC):
    """Dropout of the selected micro-batch: values are multiplied by a tensor of gains and zeros."""

    def __init__(self, plan: PlanSpec) -> None:
        self._plan, self._keys = plan, DropoutKeys(plan, 0, 0)

    @abstractmethod
    def _gains(self, mask: Choice, rate: float, like: Any) -> Any:
        """The tensor of gains and zeros of a mask, in the type of another tensor."""

    def select(self, step: int, index: int) -> None:
        """Select a micro-batch of a step; ``index`` counts over all data ranks."""
        self._keys = DropoutKeys(self._plan, step, index)

    def tokens(self, x: Any, site: DropoutSite, layer: str, start: int = 0) -> Any:
        """Apply dropout to [S, B, H] or [B, S, H], whose first position is ``start``."""
        rate = dropout_rate(self._plan, site)
        if rate == 0.0:
            return x
        sequence_first = self._plan.gpt.activation_order == "sbh"
        mask = self._keys.of_tokens(layer, rate, (start, start + x.shape[0 if sequence_first else 1]))
        return x * self._gains(np.swapaxes(mask, 0, 1) if sequence_first else mask, rate, x)

    def drops_probabilities(self) -> bool:
        """True if the plan has dropout of attention's probabilities."""
        return dropout_rate(self._plan, "attention") > 0.0

    def probabilities(self, p: Any, layer: str, first_head: int = 0, start: int = 0) -> Any:
        """Apply dropout to [B, .., S, keys]; the dims between are heads, from ``first_head`` on."""
        if not self.drops_probabilities():
            return p
        rate, shape = dropout_rate(self._plan, "attention"), tuple(p.shape)
        heads, positions = first_head + int(np.prod(shape[1:-2])), start + shape[-2]
        mask = self._keys.of_attention(layer, rate, (first_head, heads), (start, positions))
        return p * self._gains(mask.reshape(shape), rate, p)


def rotary_angles(plan: PlanSpec) -> npt.NDArray[np.float64]:
    """Angles [S, D / 2] of the pairs of a head."""
    size = plan.gpt.rotary_size
    frequencies = 10000.0 ** -(np.arange(size // 2, dtype=np.float64) * 2 / size)
    angles: npt.NDArray[np.float64] = np.arange(plan.gpt.seq_length)[:, None] * frequencies
    return angles


def stream_factors(numbers: Any, spec: HyperConnectionsSpec) -> Any:
    """The factors with which residual streams are read."""
    factors = numbers.sigmoid()
    return factors + spec.epsilon if spec.epsilon else factors


def stream_mixing(numbers: Any, spec: HyperConnectionsSpec) -> Any:
    """The matrix [.., n, n] that mixes residual streams, of numbers of the same shape."""
    if spec.sinkhorn == "softmax":
        matrix = (numbers - numbers.logsumexp(-1, keepdim=True)).exp() + spec.epsilon
        for dim in [-2, *[-1, -2] * (spec.sinkhorn_iterations - 1)]:
            matrix = matrix / (matrix.sum(dim, keepdim=True) + spec.epsilon)
    else:
        for _ in range(spec.sinkhorn_iterations):
            numbers = numbers - numbers.logsumexp(-2, keepdim=True)  # columns add up to one
            numbers = numbers - numbers.logsumexp(-1, keepdim=True)  # rows do
        matrix = numbers.exp()
    return matrix.mT if spec.transposed else matrix


class AttentionTables:
    """Entries that queries of one type of compressed attention see, and the angles of positions.

    Shape letters: S sequence, B rows, T entries of m tokens each, N = S + T keys.
    """

    def __init__(self, spec: CompressedAttentionSpec, kind: AttentionType) -> None:
        self.spec, self.rate = spec, spec.rate_of(kind)
        self.radians = _radians(spec, is_plain=self.rate is None)

    def windows(self, rows: int, length: int) -> list[list[Window]]:
        """The windows of each row."""
        return [self._windows(row, length) for row in range(rows)]

    def _windows(self, row: int, length: int) -> list[Window]:
        begin = 0
        windows: list[Window] = []
        for size in self._documents(row, length):
            if self.rate is not None:
                windows += [(begin + i * self.rate, i == 0) for i in range(size // self.rate)]
            begin += size
        return windows

    def _documents(self, row: int, length: int) -> Sequence[int]:
        """The lengths of the documents of a row."""
        documents = self.spec.documents or (length,)
        first = row % len(documents)
        return (*documents[first:], *documents[:first])

    def seen(self, rows: int, length: int) -> Choice:
        """True where a query sees a token, or an entry without an indexer's choice: [B, S, N]."""
        query, key = np.arange(length)[:, None], np.arange(length)
        is_near = (key <= query) & (query - key < self.spec.sliding_window)
        seen = []
        for row, windows in enumerate(self.windows(rows, length)):
            sizes = self._documents(row, length)
            document = np.repeat(np.arange(len(sizes)), sizes)
            first = np.array([start for start, _ in windows], dtype=np.int64)
            is_past = (document[first] == document[:, None]) & (first + (self.rate or 1) <= query + 1)
            seen.append(np.concatenate([is_near & (document == document[:, None]), is_past], axis=1))
        return np.stack(seen)


def _radians(spec: CompressedAttentionSpec, *, is_plain: bool) -> npt.NDArray[np.float64]:
    """Radians of a position for each pair."""
    rope, base = spec.qk_rope_head_dim, spec.rope_theta if is_plain else spec.compress_rope_theta
    plain: npt.NDArray[np.float64] = base ** -(np.arange(rope // 2) * 2 / rope)
    yarn = spec.rope_scaling
    if yarn is None or is_plain:
        return plain
    ends = []
    for beta, rounded in ((yarn.beta_fast, np.floor), (yarn.beta_slow, np.ceil)):
        turns = yarn.original_max_position_embeddings / (2 * np.pi * beta)
        ends.append(float(rounded(rope * np.log(turns) / np.log(base) / 2)))
    low, high = max(ends[0], 0.0), min(ends[1], rope - 1.0)
    stretched = np.clip((np.arange(rope // 2) - low) / (high - low if high != low else 0.001), 0, 1)
    scaled: npt.NDArray[np.float64] = plain * (1 - stretched) + plain / yarn.factor * stretched
    return scaled
