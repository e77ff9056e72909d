"""Layers and weights of the ordered reference's model, with sums in the order of a parallel run.

Shape letters: S sequence, B rows, H hidden, K heads of keys and values, G query heads of each, D head size, V
vocabulary, T shards. Activations are written [S, B, H]; with activation order ``bsh`` they are [B, S, H].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import paddle
import paddle.nn.functional as F

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.layer import attention_of
from pipeproof.stages.describe.mtp_streams import embeds_again, has_own_embedding, num_modules
from pipeproof.stages.describe.synthetic import Batch, DropoutSite
from pipeproof.stages.reference.compressed_attention import CompressedMath
from pipeproof.stages.reference.experts import (
    Routers,
    Routing,
    gathered_mixture,
    in_router_type,
    mixture,
)
from pipeproof.stages.reference.layer_math import DropoutRng, Heads, LayerMath
from pipeproof.stages.reference.sharded_tensors import (
    Copies,
    RoundedShards,
    Shards,
    add,
    is_expert_weight,
    leaf,
    products,
)
from pipeproof.stages.reference.shared_math import without_biases

EMBEDDING = "embed.weight"


class OrderedWeights:
    """The sharded weights of the plan's GPT. The argument ``weights`` has them whole, and may have router biases.

    ``leaves[split][rank]`` has, by name, the leaves that a sequence split and an expert-parallel rank compute with. The
    part of a sequence on a context-parallel rank is also a split. If ``is_whole``, there is one shard, rank and split.
    """

    def __init__(self, plan: PlanSpec, weights: Mapping[str, npt.NDArray[Any]], *, is_whole: bool = False) -> None:
        self.plan = plan
        self.num_shards, self.num_ranks, self.num_cp, self.num_splits = 1, 1, 1, 1
        if not is_whole:
            self.num_shards, self.num_ranks, self.num_cp = plan.topology.tp, plan.topology.ep, plan.topology.cp
            self.num_splits = plan.schedule.num_sequence_splits * self.num_cp
        self.sequence_shards = self.num_shards if plan.topology.sequence_parallel else 1
        parameters = [parameter for layer in describe_gpt(plan) for parameter in layer.parameters]
        self._shard_dims = {parameter.name: parameter.tp.dim for parameter in parameters}
        self._copied = {parameter.name for parameter in parameters if "tp" in parameter.partial_over}
        self.weights: dict[str, Shards] = {
            name: [paddle.to_tensor(array, stop_gradient=False) for array in self.shard_array(name, whole)]
            for name, whole in without_biases(weights).items()
        }
        self.leaves = [[self.weights] * self.num_ranks for _ in range(self.num_splits)]

    def shard_array(self, name: str, whole: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """Shard an array of the named weight's shape. A scalar that belongs to the weight is copied for each shard."""
        dim = self._shard_dims[name]
        if dim is not None and whole.ndim:
            return [np.ascontiguousarray(array) for array in np.split(whole, self.num_shards, dim)]
        return [whole] * (self.num_shards if dim is not None or name in self._copied else 1)

    def zero_gradients(self) -> None:
        """Set every gradient buffer to +0.0.

        Each sequence split and each expert-parallel rank has its own buffers; ranks share the experts' buffers. Each
        layer that uses the embedding's weight has its own buffer for it.
        """
        if self.num_splits * self.num_ranks > 1 or self.borrowers_of(EMBEDDING):
            self.leaves = []
            for _ in range(self.num_splits):
                first = self._new_leaves()
                experts = {name: shards for name, shards in first.items() if is_expert_weight(name)}
                self.leaves.append([first, *(self._new_leaves() | experts for _ in range(1, self.num_ranks))])
        for weights in (weights for of_split in self.leaves for weights in of_split):
            for shards in weights.values():
                for shard in shards:
                    shard.grad = paddle.zeros_like(shard)

    def _new_leaves(self) -> dict[str, Shards]:
        borrowed = {f"{layer}.weight": self.weights[EMBEDDING] for layer in self.borrowers_of(EMBEDDING)}
        return {name: [leaf(shard) for shard in shards] for name, shards in (self.weights | borrowed).items()}

    def borrowers_of(self, name: str) -> list[str]:
        """Layers that use the embedding's weight: a tied head, and modules that look up tokens themselves."""
        model = self.plan.gpt
        if name != EMBEDDING:
            return []
        lends = embeds_again(model) and not has_own_embedding(model)
        modules = [f"mtp.{number}" for number in range(num_modules(model) if lends else 0)]
        return [*modules, "head"] if model.tied_embedding else modules

    def gradients(self, split: int = 0, rank: int = 0) -> dict[str, Shards]:
        """Copies of the sharded gradients of one split and rank. The gradients of experts are rank 0's."""
        weights = self.leaves[split][rank].items()
        own = {name: shards for name, shards in weights if rank == 0 or not is_expert_weight(name)}
        return {name: [shard.grad.clone() for shard in shards] for name, shards in own.items()}

    def summed(self, name: str, shards: Shards) -> Shards:
        """Complete a sum over micro-batches: the copies of a norm's or router's weight all get the sum over copies."""
        return shards if self._shard_dims[name] is not None else [add(shards)] * len(shards)

    def distinct(self, name: str, shards: Shards) -> list[Shards]:
        """The parts of a gradient on different ranks, without copies: shards by expert-parallel rank."""
        shards = shards if self._shard_dims[name] is not None else shards[:1]
        if not is_expert_weight(name):
            return [shards]
        return [list(of_rank) for of_rank in zip(*(shard.split(self.num_ranks) for shard in shards), strict=True)]

    def joined(self, name: str, shards: Shards) -> npt.NDArray[Any]:
        """Join the shards of the named weight, or of its gradient, into a new array."""
        dim = self._shard_dims[name]
        arrays = [shard.numpy() for shard in shards]
        return np.concatenate(arrays, dim) if dim is not None else arrays[0].copy()


Tensor: TypeAlias = paddle.Tensor
_Result = TypeVar("_Result")


class OrderedLayers(OrderedWeights):
    """Layers with sharded weights, for one sequence split and one rank at a time.

    With sequence parallelism an activation between blocks is sharded along the sequence; otherwise it is one tensor.
    """

    def __init__(self, plan: PlanSpec, weights: Mapping[str, npt.NDArray[Any]], *, is_whole: bool = False) -> None:
        super().__init__(plan, weights, is_whole=is_whole)
        self.routers = Routers(plan, weights)
        self.indices: Sequence[int] = (0,)
        self.token_ids: list[npt.NDArray[np.int64]] = []
        self.sequence_first = plan.gpt.activation_order == "sbh"
        self.sequence_dim = 0 if self.sequence_first else 1
        self.step, self.split, self.rank = 0, 0, 0
        self.used: Mapping[str, Shards] = RoundedShards(self.weights, plan.run)
        self.dropout_rng = DropoutRng(plan)
        self.earlier: dict[str, list[tuple[Tensor, ...]]] = {}
        self.math = LayerMath(plan)

    def each(self, work: Callable[..., _Result], *per_rank: Sequence[Any]) -> list[_Result]:
        """Apply ``work`` to each rank's values, with the rank's own weights."""
        results = []
        for self.rank, values in enumerate(zip(*per_rank, strict=True)):
            self.used = RoundedShards(self.leaves[self.split][self.rank], self.plan.run)
            self.dropout_rng.select(self.step, self.indices[self.rank])
            results.append(work(*values))
        return results

    def embed(self, batch: Batch, tables: Shards) -> Shards:
        """Embed tokens. Each vocabulary shard contributes zeros for the tokens of other shards."""
        tokens = self._in_order(batch.tokens)
        if len(tables) == 1:
            return [F.embedding(tokens, tables[0])]
        partials = []
        for table, (row, is_local) in zip(tables, self._local_ids(tokens), strict=True):
            partials.append(F.embedding(row, table) * is_local.astype(table.dtype).unsqueeze(-1))
        return self.leave(partials)

    def enter(self, x: Shards) -> Shards:
        """All tokens, one copy for each shard of the weights that read them."""
        whole = x[0] if len(x) == 1 else paddle.concat(x, axis=self.sequence_dim)
        return [whole] if self.num_shards == 1 else list(Copies.apply(whole, self.num_shards))

    def leave(self, partials: Shards) -> Shards:
        """Add the shards' products in shard order, with the layout of activations between blocks."""
        whole = add(partials)
        if self.sequence_shards == 1:
            return [whole]
        return list(paddle.split(whole, self.sequence_shards, axis=self.sequence_dim))

    def dropped(self, x: Shards, site: DropoutSite, layer: str) -> Shards:
        """Apply dropout to an activation between blocks, or to an addend of it."""
        length = x[0].shape[self.sequence_dim]
        begin = self.split * length * len(x)
        return [self.dropout_rng.tokens(shard, site, layer, begin + k * length) for k, shard in enumerate(x)]

    def add(self, x: Shards, y: Shards) -> Shards:
        """Add two sharded tensors, shard by shard."""
        return [a + b for a, b in zip(x, y, strict=True)]

    def positioned(self, x: Shards) -> Shards:
        """Add the learned vectors of the tokens' positions, if the model has them."""
        length = x[0].shape[self.sequence_dim]
        begins = [(self.split * len(x) + shard) * length for shard in range(len(x))]
        return [
            self.math.placed(own, self.shard_of(k), begin) for k, (own, begin) in enumerate(zip(x, begins, strict=True))
        ]

    def shard_of(self, shard: int) -> Callable[[str], Tensor]:
        """The function from a weight's name to its shard."""
        return lambda name: self.used[name][shard]

    def biased(self, x: Shards, name: str) -> Shards:
        """Add the bias of that name, if the model has it, to each shard."""
        bias = self.used.get(f"{name}.bias")
        return x if bias is None else self.add(x, bias)

    def linear(self, x: Shards, name: str) -> Shards:
        """Products with the shards of a weight, with their biases."""
        return self.biased(products(x, self.used[f"{name}.weight"]), name)

    def norm(self, x: Shards, name: str) -> Shards:
        """The norm over the last dim, with the weights of that name; each shard has its copies of them."""
        return self.normed(x, *(self.used[weight] for weight in self.math.norm_names(name)))

    def normed(self, x: Shards, *weights: Sequence[Tensor]) -> Shards:
        """The norm of each shard with its copies of the weights."""
        return [self.math.normed(*of_shard) for of_shard in zip(x, *weights, strict=True)]

    def attention(self, x: Shards, name: str) -> Shards:
        """Causal attention with sharded heads."""
        kind = attention_of(self.plan.gpt, name.removesuffix(".attn"))
        if kind is not None:
            groups = self.compressed_attention(x, name, CompressedMath(self.plan, kind))
            return self.leave(products(groups, self.used[f"{name}.out.weight"]))
        heads = self.grouped_heads if self.plan.gpt.mla is None else self.latent_heads
        mixed = [self.mix(*of_shard, name, shard) for shard, of_shard in enumerate(heads(x, name))]
        return self.biased(self.leave(products(mixed, self.used[f"{name}.out.weight"])), f"{name}.out")

    def grouped_heads(self, x: Shards, name: str) -> list[Heads]:
        """Queries [B, K / T, G, S, D], keys and values [B, K / T, S, D] of each shard."""
        fused = self.linear(self.enter(x), f"{name}.qkv")
        begin = self.split * fused[0].shape[self.sequence_dim]
        return [self.math.grouped_heads(qkv, name, self.shard_of(k), begin) for k, qkv in enumerate(fused)]

    def latent_heads(self, x: Shards, name: str) -> list[Heads]:
        """Queries [B, A / T, 1, S, D], keys [B, A / T, S, D] and values [B, A / T, S, Z] of each shard."""
        mla = self.plan.gpt.mla
        assert mla is not None
        if mla.q_rank is None:
            queries = self.linear(self.enter(x), f"{name}.q")
        else:
            low = self.norm(self.linear(x, f"{name}.q_down"), f"{name}.q_norm")
            queries = self.linear(self.enter(low), f"{name}.q_up")
        compressed = [y.split([mla.kv_rank, mla.rope_head_size], axis=-1) for y in self.linear(x, f"{name}.kv_down")]
        latents = self.norm([latent for latent, _ in compressed], f"{name}.kv_norm")
        expanded = self.linear(self.enter(latents), f"{name}.kv_up")
        shared = self.enter([shared for _, shared in compressed])
        begin = self.split * queries[0].shape[self.sequence_dim]
        return [self.math.latent_heads(*of_shard, begin) for of_shard in zip(queries, expanded, shared, strict=True)]

    def compressed_attention(self, x: Shards, name: str, math: CompressedMath) -> Shards:
        """The compressed outputs of each shard's groups. Keys, entries and choices are equal on all shards."""
        readers = [list(reader) for reader in zip(*(Copies.apply(own, math.num_readers) for own in x), strict=True)]
        low = self.norm(self.linear(readers[0], f"{name}.q_down"), f"{name}.q_norm")
        keys = self.norm(self.linear(readers[1], f"{name}.kv"), f"{name}.kv_norm")
        entered, own = self.enter(low), self.enter(keys)
        both: Sequence[Tensor | None] = [None] * self.num_shards
        if readers[2:]:
            kv = self.linear(readers[2], f"{name}.compressor.kv")
            gate = self.linear(readers[3], f"{name}.compressor.gate")
            both = self.enter([paddle.concat(parts, axis=-1) for parts in zip(kv, gate, strict=True)])
        whole = x[0] if len(x) == 1 else paddle.concat(x, axis=self.sequence_dim)
        chosen = math.chosen(whole, entered[0], lambda part: self.used[f"{name}.{part}"][0])
        queries = self.linear(entered, f"{name}.q_up")

        def groups(shard: int) -> Tensor:
            def weight_of(part: str) -> Tensor:
                return self.used[f"{name}.{part}"][shard]

            return math.compressed(queries[shard], own[shard], both[shard], weight_of, chosen)

        return [groups(shard) for shard in range(self.num_shards)]

    def mix(self, groups: Tensor, k: Tensor, v: Tensor, name: str, shard: int) -> Tensor:
        """Attention of one shard's heads: [B, K / T, G, S, D] to [S, B, K / T * G * Z].

        All queries of a head of keys and values are rows of one product with it, query head by query head.
        """
        where = f"{name} of shard {shard} of rank {self.rank}"
        rows, num_kv_heads, group, own, size = groups.shape
        k, v = self.up_to_this_split(k, f"keys of {where}"), self.up_to_this_split(v, f"values of {where}")
        seen = k.shape[2]
        scores = paddle.matmul(groups.reshape([rows, num_kv_heads, -1, size]), k, transpose_y=True) * size**-0.5
        mask = paddle.to_tensor(np.where(~np.tri(own, seen, seen - own, dtype=bool), -np.inf, 0.0), dtype=scores.dtype)
        weights = F.softmax(scores.reshape([rows, num_kv_heads, -1, own, seen]) + mask, axis=-1)
        weights = self.dropout_rng.probabilities(weights, name, shard * num_kv_heads * group, seen - own)
        mixed = paddle.matmul(weights.reshape([rows, num_kv_heads, -1, seen]), v)
        mixed = mixed.reshape([rows, num_kv_heads, -1, own, v.shape[-1]])
        mixed = mixed.transpose([3, 0, 1, 2, 4] if self.sequence_first else [0, 3, 1, 2, 4])
        return mixed.reshape([*mixed.shape[:2], -1])

    def up_to_this_split(self, own: Tensor, key: str) -> Tensor:
        """Join the keys, or values, of the splits up to this one.

        Each later split reads a copy. Gradients are added from the last split back to the split itself. On
        context-parallel ranks each split has a copy for every rank, and gradients are added in rank order, including
        the zeros of ranks that do not see the split.
        """
        if self.num_cp > 1:
            self.earlier.setdefault(key, []).append(Copies.apply(own, self.num_splits))
            return paddle.concat([copies[self.split] for copies in self.earlier[key]], axis=2)
        num_readers = self.num_splits - self.split
        self.earlier.setdefault(key, []).append(Copies.apply(own, num_readers) if num_readers > 1 else (own,))
        read = [copies[num_readers - 1] for copies in self.earlier[key]]
        return read[0] if len(read) == 1 else paddle.concat(read, axis=2)

    def mlp(self, x: Shards, name: str) -> Shards:
        """SwiGLU or GELU with a sharded feed-forward width."""
        return self.biased(self.leave(self.mlp_addends(self.enter(x), name)), f"{name}.down")

    def mlp_addends(self, entered: Shards, name: str) -> Shards:
        """The addends of an MLP, without the last bias."""
        factors = [self.linear(entered, f"{name}.{part}") for part in self.math.mlp_inputs]
        inner = [self.math.mlp_inner(*of_shard) for of_shard in zip(*factors, strict=True)]
        return products(inner, self.used[f"{name}.down.weight"])

    def experts(self, xs: Sequence[Shards], name: str) -> list[Shards]:
        """Routed experts for the tokens of all ranks, and shared experts if the model has them.

        A shard has a part of the width of each expert, or with ``experts_over_tp`` whole experts.
        """
        moe = self.plan.model.moe
        assert moe is not None
        readers = 3 if moe.num_shared_experts else 2
        gathers = moe.dispatcher == "all_gather" and len(xs) > 1
        num_readers = len(xs) if gathers else 1

        def inputs_of(x: Shards) -> list[Shards]:
            """All tokens, one copy for each shard: for the router, the routed experts and the shared experts."""
            copies = [Copies.apply(entered, readers) for entered in self.enter(x)]
            return [list(reader) for reader in zip(*copies, strict=True)]

        def routings(inputs: list[Shards]) -> list[list[Routing]]:
            self.routers.select(self.indices[self.rank], self.split)
            router, ids = f"{name}.router.weight", None
            if f"{name}.hash_router.weight" in self.weights:
                router, ids = f"{name}.hash_router.weight", self.token_ids[self.rank]
            factors = inputs[0], self.used[router]
            logits = products(*([in_router_type(shard, moe) for shard in shards] for shards in factors))
            whole_sequences = self.sequence_dim if self.num_splits == 1 else None
            return [
                self.routers.routes(
                    x, name, num_readers, counts=shard == 0, sequence_dim=whole_sequences, token_ids=ids
                )
                for shard, x in enumerate(logits)
            ]

        per_rank = self.each(inputs_of, xs)
        routed = self.each(routings, per_rank)

        def outputs(shard: int) -> list[Tensor]:
            inputs, choices = [inputs[1][shard] for inputs in per_rank], [routing[shard] for routing in routed]
            weights = [self.used[f"{name}.experts.{part}.weight"][shard] for part in ("gate", "up", "down")]
            if self.plan.topology.experts_over_tp:
                own = range(shard * len(weights[0]), (shard + 1) * len(weights[0]))
                return mixture(inputs, [choice for (choice,) in choices], weights, self.plan.gpt, own)
            if gathers:
                return gathered_mixture(inputs, choices, weights, self.plan.gpt)
            return mixture(inputs, [choice for (choice,) in choices], weights, self.plan.gpt)

        def left(inputs: list[Shards], *addends: Tensor) -> Shards:
            shared = self.mlp_addends(inputs[2], f"{name}.shared") if moe.num_shared_experts else None
            return self.leave(list(addends) if shared is None else self.add(list(addends), shared))

        return self.each(left, per_rank, *map(outputs, range(self.num_shards)))

    def cross_entropy(self, logits: Shards, batch: Batch) -> Tensor:
        """The summed cross-entropy; logits are [S, B, V / T] each."""
        labels = self._in_order(batch.labels)
        if len(logits) == 1:
            flat = logits[0].reshape([-1, logits[0].shape[-1]])
            return F.cross_entropy(flat, labels.reshape([-1]), ignore_index=-100, reduction="none").sum()
        highest = logits[0].detach().max(axis=-1)
        for shard in logits[1:]:
            highest = paddle.maximum(highest, shard.detach().max(axis=-1))
        shifted = [shard - highest.unsqueeze(-1) for shard in logits]
        sum_exp = add([paddle.exp(shard).sum(axis=-1) for shard in shifted])
        targets = []
        for shard, (column, is_local) in zip(shifted, self._local_ids(labels), strict=True):
            logit = paddle.take_along_axis(shard, column.unsqueeze(-1), axis=-1).squeeze(-1)
            targets.append(logit * is_local.astype(shard.dtype))
        losses = paddle.log(sum_exp) - add(targets)
        return (losses * (labels != -100).astype(losses.dtype)).sum()

    def _in_order(self, token_ids: npt.NDArray[np.int64]) -> Tensor:
        """Tokens or labels [B, S] with the dims in the order of the activations."""
        return paddle.to_tensor(np.ascontiguousarray(token_ids.T if self.sequence_first else token_ids))

    def _local_ids(self, ids: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """For each vocabulary shard: the index of each id in it (0 for other ids), and a mask of its ids."""
        size = self.plan.gpt.vocab_size // self.num_shards
        for shard in range(self.num_shards):
            is_local = paddle.floor_divide(ids, paddle.full_like(ids, size)) == shard
            yield paddle.where(is_local, ids - shard * size, paddle.zeros_like(ids)), is_local
