"""Operations of a layer: typed records without a layer's number and without a mesh.

A layer is a list of operations in the order of its forward. Parameters and collectives (``describe_gpt``), FLOPs and
bytes (``layer_work``) and stored activations (``stored_activations``) are read from this list. ``typed_gpt`` is a
second, independent description with which a rule compares this one.

Sizes are elements of one token over all ranks: ``sharded`` elements are divided over TP, ``whole`` ones are not. Names
are without the layer's name. Names of collectives are their labels.
"""

from __future__ import annotations

from fractions import Fraction
from math import prod
from typing import Literal, NamedTuple, TypeAlias

from pipeproof.specs.model import ModelSpec
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.boundary import MicroBatchSize
from pipeproof.stages.describe.layer import attention_of
from pipeproof.stages.describe.mtp_streams import mtp_streams_at
from pipeproof.stages.describe.synthetic import DropoutSite

Cost: TypeAlias = tuple[int, int]
"""(FLOPs, elements read or written) for each element. An addition, product, division or exponential is one FLOP."""

SOFTMAX: Cost = 5, 2
SOFTMAX_BACK: Cost = 4, 3

Rows: TypeAlias = Literal["inside", "between", "visits", "gathered", "groups", "entries", "streams"]
"""The rows of an operation on one rank: its tokens inside of layers, its tokens between layers (with sequence
parallelism a part of the former), the visits of tokens to its experts, the tokens of all EP ranks, its tokens in each
of its groups of heads, the compressed entries of its sequences, or the residual streams of tokens between layers."""
INSIDE: Rows = "inside"
BETWEEN: Rows = "between"
VISITS: Rows = "visits"
GATHERED: Rows = "gathered"
GROUPS: Rows = "groups"
STREAMS: Rows = "streams"
ENTRIES: Rows = "entries"


class Weight(NamedTuple):
    """A weight by its global shape, the dims that TP and EP shard, and its initial value as in ``Parameter``.

    A ``borrowed`` weight belongs to an earlier layer, whose name is in its own. The loss does not depend on a weight
    that is not ``trained`` in a differentiable way: its gradient is zero.
    """

    name: str
    shape: tuple[int, ...]
    tp_dim: int | None = None
    ep_dim: int | None = None
    init_std: float | None = 0.02
    init_value: float = 1.0
    borrowed: bool = False
    trained: bool = True


def bias_of(weight: Weight) -> Weight:
    """The bias of a weight [inner, columns], sharded as its columns; it starts as zero."""
    name, tp_dim = weight.name.removesuffix("weight") + "bias", 0 if weight.tp_dim == 1 else None
    return Weight(name, weight.shape[-1:], tp_dim, init_std=None, init_value=0.0)


class Product(NamedTuple):
    """A product of rows with weights [inner, columns], side by side, or with one for each expert.

    An ``entered`` product reads a tensor that ``Enter`` gathers. Products that read the same tensor give its name in
    ``reads``: it is stored once. For ``narrow`` see ``Work``. ``dtype`` is the type of the input if it differs from the
    activations' type. The weight of a ``transposed`` product is [columns, inner]. A ``biased`` one adds the ``bias_of``
    each weight to its columns, which are not addends of a sum over TP.
    """

    name: str
    weights: tuple[Weight, ...]
    rows: Rows = INSIDE
    entered: bool = False
    reads: str = ""
    narrow: bool = True
    dtype: str | None = None
    transposed: bool = False
    biased: bool = False

    @property
    def trained(self) -> bool:
        """False if it has no gradients."""
        return all(weight.trained for weight in self.weights)


class Norm(NamedTuple):
    """A norm of a vector of ``size`` elements for each token between layers, or for each of its ``heads`` inside.

    Or for each compressed entry, if ``of_entries``, or each residual stream, if ``of_streams``.

    For costs see ``Elementwise``. It stores ``factors`` numbers for each vector, in float32. ``is_input`` is true if it
    reads the layer's input.
    """

    name: str
    size: int
    weights: tuple[Weight, ...]
    forward: Cost
    backward: Cost
    weight: Cost
    factors: int
    heads: int = 0
    is_input: bool = False
    of_entries: bool = False
    of_streams: bool = False

    @property
    def rows(self) -> Rows:
        """The rows of all vectors."""
        if self.of_entries or self.of_streams:
            return ENTRIES if self.of_entries else STREAMS
        return INSIDE if self.heads else BETWEEN

    @property
    def trained(self) -> bool:
        """False if it has no gradients."""
        return all(weight.trained for weight in self.weights)


class Elementwise(NamedTuple):
    """An elementwise operation: costs of forward, input gradient and weight gradient; None if nothing runs.

    Until I it stores ``stored`` tensors of its size, in float32 if ``is_float32``; with activations of 16 bits, also
    ``widened`` ones in float32. It may add ``weights`` to the sum of
    all TP ranks' addends: their gradients are sums of the gradient of its result.
    """

    name: str
    forward: Cost | None
    backward: Cost | None
    weight: Cost | None = None
    sharded: int = 0
    whole: int = 0
    rows: Rows = INSIDE
    stored: int = 0
    widened: int = 0
    is_float32: bool = False
    weights: tuple[Weight, ...] = ()


class AttentionCore(NamedTuple):
    """Attention from queries, keys and values to mixed values: elements of all heads."""

    name: str
    num_heads: int
    queries: int
    keys: int
    values: int
    mixed: int


class CompressedCore(NamedTuple):
    """Attention of heads of ``size`` elements to one head of keys, which are also the values, and to sinks.

    The keys are the last ``window`` tokens, with entries of ``rate`` tokens, if there are any, and of these at most
    ``top_k``; of the query's own document, if there are ``documents``.
    """

    name: str
    num_heads: int
    size: int
    window: int
    sinks: Weight
    rate: int | None = None
    top_k: int | None = None
    documents: tuple[int, ...] | None = None

    def seen(self, length: int) -> int:
        """Pairs of a query and a key or an entry that it sees, in a sequence of that length, without sinks."""
        if self.documents is not None:
            return sum(map(self._replace(documents=None).seen, self.documents))
        near, rate = min(self.window, length), self.rate
        pairs = near * (near + 1) // 2 + (length - near) * near
        if rate is None:
            return pairs
        # The queries of a window see the entries before it, and its last one also the window's own.
        num = length // rate
        most = num if self.top_k is None else min(num, self.top_k)
        before = most * (most - 1) // 2 + (num - most) * most  # of one query of each window
        return pairs + rate * before + most + most * (length - num * rate)


class IndexerScores(NamedTuple):
    """The score of each entry for each token, by ``num_heads`` queries of ``size`` elements, without a gradient."""

    name: str
    num_heads: int
    size: int
    rate: int


class Dropout(NamedTuple):
    """Dropout of an activation between layers."""

    name: str
    site: DropoutSite


class Lookup(NamedTuple):
    """Rows of the vocabulary-parallel embedding. Each TP rank has an addend of the result."""

    name: str
    weight: Weight


class Loss(NamedTuple):
    """The vocabulary-parallel cross-entropy of each token, from ``sharded`` logits."""

    name: str
    sharded: int
    whole: int = 0


class StreamWeights(NamedTuple):
    """The weights with which a sub-layer reads and writes several residual streams."""

    name: str
    weights: tuple[Weight, ...]


class StreamProduct(NamedTuple):
    """The product of a token's streams with the weight [inner, columns] of their gates."""

    name: str
    inner: int
    columns: int


class Stored(NamedTuple):
    """``numel`` elements of a token between layers, stored to the end of I, or to the end of W, or only between them.

    An input that is stored ``if_recomputed`` is stored only if the block is computed again from it.
    """

    name: str
    lifetime: Literal["TO_INPUT", "TO_WEIGHT", "BETWEEN"]
    numel: int
    is_float32: bool = False
    is_input: bool = False
    if_recomputed: bool = False


class Enter(NamedTuple):
    """Collectives from between layers into column-parallel weights; what is not ``trained`` has no gradient."""

    name: str
    size: int
    feeds_weights: bool = True
    trained: bool = True


class Leave(NamedTuple):
    """Collectives from a row-parallel product back between layers."""

    name: str
    size: int


class GatherKeys(NamedTuple):
    """Collectives that give every context-parallel rank keys and values of the whole sequence."""

    name: str
    sharded: int = 0
    whole: int = 0


class Exchange(NamedTuple):
    """All-to-all over EP ranks: of visits and of their gradients, with their types if they are not the usual one.

    Or of ``counts``, the numbers of tokens for each expert, which have no gradient.
    """

    name: str
    dtype: str | None = None
    grad_dtype: str | None = None
    counts: int = 0


class GatherTokens(NamedTuple):
    """Collectives that give every EP rank a row of ``size`` elements for each token of all EP ranks."""

    name: str
    size: int


class SumResults(NamedTuple):
    """Collectives that add the EP ranks' addends for all their tokens; each rank gets its own tokens."""

    name: str
    size: int


_Attention: TypeAlias = AttentionCore | CompressedCore | IndexerScores
_Computed: TypeAlias = Product | Norm | Elementwise | _Attention | Dropout | Lookup | Loss
_OfStreams: TypeAlias = StreamWeights | StreamProduct | Stored
_OfExperts: TypeAlias = Exchange | GatherTokens | SumResults
Operation: TypeAlias = _Computed | _OfStreams | Enter | Leave | GatherKeys | _OfExperts
Operations: TypeAlias = tuple[Operation, ...]


def weights_of(operation: Operation) -> tuple[tuple[Weight, ...], Rows]:
    """The weights of an operation, and the rows that they see."""
    match operation:
        case Product() if operation.biased:
            return tuple(w for weight in operation.weights for w in (weight, bias_of(weight))), operation.rows
        case Product() | Norm() | Elementwise():
            return operation.weights, operation.rows
        case CompressedCore():
            return (operation.sinks,), INSIDE
        case Lookup():
            return (operation.weight,), INSIDE
        case StreamWeights():
            return operation.weights, BETWEEN
        case _:
            return (), INSIDE


def norm(model: ModelSpec, name: str, size: int | None = None, *, heads: int = 0, is_input: bool = False) -> Norm:
    """A norm of ``size`` elements, by default the hidden size, or of that many for each of a token's ``heads``."""
    shape = (size or model.hidden_size,)
    weight = Weight(f"{name}.weight", shape, init_std=None)
    if model.norm == "rms":
        return Norm(name, *shape, (weight,), (4, 2), (8, 3), (2, 2), factors=1, heads=heads, is_input=is_input)
    weights = weight, bias_of(weight)  # also a mean and a bias, and the gradients of both
    return Norm(name, *shape, weights, (7, 2), (11, 3), (3, 2), factors=2, heads=heads, is_input=is_input)


class RankSizes:
    """Rows and local sizes for one work item of ``size`` in the layer ``layer``; MTP streams are more rows.

    Each rank has an even part of the visits to experts: as many as its own tokens make. With experts over TP ranks,
    which have the same tokens, it is a part of those.
    """

    def __init__(self, plan: PlanSpec, layer: str, size: MicroBatchSize) -> None:
        topology = plan.topology
        self.size = size.with_mtp_streams(mtp_streams_at(plan.gpt, layer))
        self.tp, self.cp, self.ep = topology.tp, topology.cp, topology.ep
        self.is_sharded_between = topology.sequence_parallel and topology.tp > 1
        self.experts_over_tp = topology.experts_over_tp
        self.tokens = Fraction(self.size.num_tokens, topology.cp)
        self.between = self.tokens / self.tp if self.is_sharded_between else self.tokens
        visits = self.tokens * (0 if plan.model.moe is None else plan.model.moe.top_k)
        if self.experts_over_tp:
            visits /= self.tp
        spec, kind = plan.gpt.compressed_attention, attention_of(plan.gpt, layer)
        entries = 0 if spec is None or kind is None else spec.num_entries(kind, self.size.seq_length)
        groups = 0 if spec is None else spec.o_groups
        self._rows = {
            INSIDE: self.tokens, BETWEEN: self.between, VISITS: visits, GATHERED: self.tokens * self.ep,
            GROUPS: self.tokens * groups / self.tp,
            ENTRIES: Fraction(self.size.num_rows * entries), STREAMS: self.between * plan.gpt.num_streams,
        }  # fmt: skip

    def rows(self, rows: Rows) -> Fraction:
        """The number of rows."""
        return self._rows[rows]

    def elements(self, operation: Elementwise | GatherKeys | Loss) -> int:
        """Elements of a row."""
        of_expert = self.experts_over_tp and isinstance(operation, Elementwise) and operation.rows == VISITS
        return operation.sharded // (1 if of_expert else self.tp) + operation.whole

    def cut_dims(self, weight: Weight) -> tuple[int | None, int | None]:
        """The dims of a weight that are sharded over TP and over EP ranks."""
        if self.experts_over_tp and weight.ep_dim is not None:
            return weight.ep_dim, None
        return weight.tp_dim, weight.ep_dim

    def vectors(self, norm: Norm) -> Fraction:
        """The number of vectors of a norm."""
        return self.rows(norm.rows) * (norm.heads // self.tp if norm.heads else 1)

    def product(self, product: Product) -> tuple[int, int, int]:
        """The inner size and the columns of a product, and the number of weights that share its rows."""
        shapes = [self._local_shape(weight) for weight in product.weights]
        inner, columns = shapes[0][-2], sum(shape[-1] for shape in shapes)
        return (columns, inner, 1) if product.transposed else (inner, columns, prod(shapes[0][:-2]))

    def _local_shape(self, weight: Weight) -> tuple[int, ...]:
        ranks = dict(zip(self.cut_dims(weight), (self.tp, self.ep), strict=True))
        return tuple(n // ranks.get(dim, 1) for dim, n in enumerate(weight.shape))
