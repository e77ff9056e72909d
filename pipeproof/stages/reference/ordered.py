"""The ordered reference: one process, one model, no ranks, but sums in the order of a parallel run.

Addition of rounded numbers is not associative, so a tensor- or data-parallel run cannot have the bits of the
unpartitioned model. It can have the bits of a model whose sums have the run's order. This is that model. Shard k is
the part of tensor-parallel rank k.

- A column-parallel product is one product per shard of the weight's columns. A row-parallel product is one product per
  shard of its rows, added in shard order.
- The gradient of an input that all shards read is added in shard order.
- With sequence parallelism a norm is applied to each sequence shard with a copy of its weight. The copies' gradients
  are added in shard order after the last micro-batch.
- The embedding, the softmax's denominator and the target logit are added over vocabulary shards in shard order. The
  maximum does not round.
- The gradient of each parameter adds its micro-batches in the order of the plan's schedule, from +0.0 on. If a stage
  has copies with different micro-batches, each copy adds its own, and the copies' sums are added in their order.
- A tied head has its own sum for the embedding's weight. It is added to the embedding's sum, for each copy, and then
  over copies.
- Each shard routes tokens with a copy of the router. The copies' gradients are added in shard order after the last
  micro-batch. An expert has the tokens of all expert-parallel ranks, in one product in rank order.
- With ``memory.shard_gradients`` the sums over ranks are of each micro-batch, and are added over micro-batches.
- The gradient sums and losses of expert-parallel ranks are added in rank order after that, without experts' gradients,
  and then the sums of data-parallel ranks.
- Each context-parallel rank's part of a sequence is computed separately. The gradient of keys and values adds the
  gradients from each rank's queries. Weight gradients and losses are added over these ranks, in rank order, before
  expert-parallel ranks.
- If sequences are split over time, each split is computed separately and its gradients are separate addends. The
  gradient of keys and values adds the gradients from later splits, from the last one back, and then the split's own.

With one shard this is the arithmetic of the unpartitioned model. It shares no code with the stages that it checks.

Its layers and their weights are in ``ordered_layers``.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import paddle

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.layer import layer_order
from pipeproof.stages.describe.layer_records import LayerWatch, Side
from pipeproof.stages.describe.mtp_streams import embeds_again, num_modules, shifted_batch
from pipeproof.stages.describe.stage_memory import num_shards, shards_gradients
from pipeproof.stages.describe.synthetic import Batch, loss_scale, micro_batch
from pipeproof.stages.reference.optimizer import clip_factor, optimizer_of, restore_optimizer
from pipeproof.stages.reference.ordered_layers import OrderedLayers
from pipeproof.stages.reference.reference_state import InitialState, StepResult, initial_state
from pipeproof.stages.reference.sharded_tensors import Shards, add, add_shards, is_expert_weight, products
from pipeproof.stages.reference.streams import (
    Residual,
    contracted,
    contracted_by,
    copies_for_mtp_streams,
    expanded,
    residual,
    stacked_losses,
    training_loss,
)

_Addend = TypeVar("_Addend")


@dataclass(frozen=True)
class Orders:
    """Order in which the losses, and the gradients by parameter, of a data-parallel rank's work items are added.

    A work item is a micro-batch or a sequence split: split p of n of micro-batch k is work item k n + p. There is one
    order for each copy of a stage; most schedules have one copy.

    ``tied`` is the order for a weight that several layers use, by weight name. Each entry is a rank that holds the
    weight, with the sums that it adds, as (name in ``gradients``, copy). Then the ranks' sums are added in order.
    """

    loss: Sequence[Sequence[int]]
    gradients: Mapping[str, Sequence[Sequence[int]]]
    tied: Mapping[str, Sequence[Sequence[tuple[str, int]]]] = field(default_factory=dict)


class OrderedSum(Generic[_Addend]):
    """Sum of lists of equal length in a fixed order. The lists may arrive in any order and are stored until needed."""

    def __init__(self, order: Sequence[int]) -> None:
        self._order = list(reversed(order))
        self._held: dict[int, list[_Addend]] = {}
        self.total: list[_Addend] = []

    def put(self, index: int, addends: list[_Addend]) -> None:
        """Add the addends of one work item."""
        self._held[index] = addends
        while self._order and self._order[-1] in self._held:
            following = self._held.pop(self._order.pop())
            pairs = zip(self.total, following, strict=True) if self.total else ()
            self.total = [operator.add(*pair) for pair in pairs] if self.total else following


class SumByCopy(Generic[_Addend]):
    """Sums of several copies, each in its own order, and their sum in the order of the copies."""

    def __init__(self, orders: Sequence[Sequence[int]]) -> None:
        self._copies = [OrderedSum[_Addend](order) for order in orders]
        self._copy_of = {index: copy for copy, order in zip(self._copies, orders, strict=True) for index in order}

    def __contains__(self, index: int) -> bool:
        return index in self._copy_of

    def put(self, index: int, addends: list[_Addend]) -> None:
        """Add the addends of one work item."""
        self._copy_of[index].put(index, addends)

    def totals(self) -> list[list[_Addend]]:
        """The sum of each copy, after all work items have been added."""
        return [copy.total for copy in self._copies]

    def total(self) -> list[_Addend]:
        """The sum over all copies, after all work items have been added."""
        return [add(sums) for sums in zip(*self.totals(), strict=True)]


Tensor: TypeAlias = paddle.Tensor


def run_ordered(
    plan: PlanSpec, orders: Orders, watch: LayerWatch | None = None, start: InitialState | None = None
) -> Iterator[StepResult]:
    """Train for the plan's steps with the sums of its parallel run, and yield the result of each step.

    Training begins with ``start``, if given. ``watch`` records the tensors between layers and joins sequence shards.
    """
    start = start or initial_state(plan)
    model = OrderedModel(plan, watch, start.weights)
    optimizer = optimizer_of(plan.run, [shard for shards in model.weights.values() for shard in shards])
    restore_optimizer(
        optimizer,
        model.weights,
        {key: model.shard_array(key[0], array) for key, array in start.optimizer_state.items()},
    )
    num_dp, num_ep, num_cp = plan.topology.dp, plan.topology.ep, plan.topology.cp
    num_micro_batches = plan.schedule.num_micro_batches
    num_sums = num_micro_batches if shards_gradients(plan) else 1
    for step in range(start.step, plan.run.steps):
        weights = {name: model.joined(name, shards) for name, shards in model.weights.items()}
        losses, sums, biases = [], [], model.routers.begin_step()
        for dp in range(num_dp):
            ep_ranks = [[_RankSums(orders, num_sums) for _ in range(num_cp)] for _ in range(num_ep)]
            for index in range(num_micro_batches):
                data = [(dp * num_ep + ep) * num_micro_batches + index for ep in range(num_ep)]
                work_items = _micro_batches(model, step, data)
                for number, addends in enumerate(work_items):
                    cp, split = divmod(number, len(work_items) // num_cp)
                    work_item = index * (len(work_items) // num_cp) + split
                    for ranks, (loss, addend) in zip(ep_ranks, addends, strict=True):
                        ranks[cp].put(work_item, loss, addend)
            losses.append(add([add([rank.loss.total()[0] for rank in ranks]) for ranks in ep_ranks]))
            sums.append(
                {name: [_over_experts(model, name, ep_ranks, n) for n in range(num_sums)] for name in model.weights}
            )
        gradients = {
            name: add_shards([add_shards(ranks) for ranks in zip(*(of_dp[name] for of_dp in sums), strict=True)])
            for name in model.weights
        }
        if plan.run.clip_norm is not None:
            parts = {name: model.distinct(name, shards) for name, shards in gradients.items()}
            limit, shares = plan.run.clip_norm, num_shards(plan)
            factor = paddle.to_tensor(clip_factor(limit, plan.run.weight_dtype, parts, shares))
            gradients = {name: [shard * factor for shard in shards] for name, shards in gradients.items()}
        for name, shards in model.weights.items():
            for shard, grad in zip(shards, gradients[name], strict=True):
                shard.grad = grad
        whole = {name: model.joined(name, shards) for name, shards in gradients.items()}
        optimizer.step()
        yield StepResult(step, add(losses), whole, weights | biases, model.routers.end_step())


class _RankSums:
    """The sums of one context-parallel rank of an expert-parallel rank over its micro-batches.

    With ``num_sums`` above 1, which is the number of micro-batches, each of these has its own sum of gradients, and
    there are no copies of stages.
    """

    def __init__(self, orders: Orders, num_sums: int) -> None:
        self.loss = SumByCopy[np.floating[Any]](orders.loss)
        self.gradients = {
            name: [SumByCopy[Tensor](copies)] if num_sums == 1 else [SumByCopy[Tensor]([[one]]) for one in copies[0]]
            for name, copies in orders.gradients.items()
        }
        self.tied = orders.tied

    def put(self, work_item: int, loss: np.floating[Any], gradients: Mapping[str, Shards]) -> None:
        """Add one work item."""
        self.loss.put(work_item, [loss])
        for name, shards in gradients.items():
            next(one for one in self.gradients[name] if work_item in one).put(work_item, shards)

    def total(self, name: str, number: int) -> Shards:
        """The ``number``-th sum of a weight's gradients: over all micro-batches, or over one of them."""
        if name not in self.tied:
            return self.gradients[name][number].total()
        holders = [[self.gradients[use][number].totals()[copy] for use, copy in uses] for uses in self.tied[name]]
        return add_shards([add_shards(sums) for sums in holders])


def _over_experts(model: OrderedModel, name: str, ranks: Sequence[Sequence[_RankSums]], number: int) -> Shards:
    """The sum over context-parallel, then expert-parallel ranks. Experts already have the tokens of all these ranks."""
    holders = ranks[:1] if is_expert_weight(name) else ranks
    return add_shards(
        [add_shards([model.summed(name, rank.total(name, number)) for rank in parts]) for parts in holders]
    )


def _micro_batches(
    model: OrderedModel, step: int, indices: Sequence[int]
) -> list[list[tuple[np.floating[Any], dict[str, Shards]]]]:
    """Run one micro-batch of each expert-parallel rank together.

    The result has, for each sequence split and rank, the scaled loss and the sharded gradients. The gradients of
    experts are rank 0's.
    """
    model.zero_gradients()
    model.step = step
    scales = [loss_scale(model.plan, step, index) for index in indices]
    losses = [
        [loss * scale for loss, scale in zip(of_split, scales, strict=True)]
        for of_split in model.losses([micro_batch(model.plan, step, index) for index in indices], indices)
    ]
    if model.watch is not None:
        for split, of_split in enumerate(losses):
            for index, loss in zip(indices, of_split, strict=True):
                model.watch.see_loss("head", index, split, loss)
    roots = [training_loss(model.plan, loss) for of_split in losses for loss in of_split]
    paddle.autograd.backward(roots + model.routers.take_roots())
    return [
        [(loss.numpy()[()], model.gradients(split, rank)) for rank, loss in enumerate(of_split)]
        for split, of_split in enumerate(losses)
    ]


class OrderedModel(OrderedLayers):
    """The GPT of the plan, with sharded weights and sums in shard order."""

    def __init__(
        self,
        plan: PlanSpec,
        watch: LayerWatch | None = None,
        weights: Mapping[str, npt.NDArray[Any]] | None = None,
        *,
        is_whole: bool = False,
    ) -> None:
        super().__init__(plan, initial_state(plan).weights if weights is None else weights, is_whole=is_whole)
        self.watch = watch

    def losses(self, batches: Sequence[Batch], indices: Sequence[int] = (0,)) -> list[list[Tensor]]:
        """The loss of each sequence split, in order, and each rank's micro-batch, a scalar.

        It is the cross-entropy summed over the counted tokens; with MTP modules, a vector of the main loss and theirs.
        There is one micro-batch for each expert-parallel rank; ``indices`` are their numbers over all data ranks.
        """
        self.earlier.clear()
        self.indices = indices
        model, losses = self.plan.gpt, []
        for split in range(self.num_splits):
            self.split = split
            parts = [
                [self._part(shifted_batch(batch, distance)) for distance in range(1 + num_modules(model))]
                for batch in batches
            ]
            main = [of_rank[0].tokens for of_rank in parts]
            self.token_ids = [tokens.T if self.sequence_first else tokens for tokens in main]
            embedded = self.each(self.embedded, parts)
            xs = [of_rank[0] for of_rank in embedded]
            for layer in range(model.num_layers):
                self.each(partial(self.show, f"layer.{layer}", "input"), xs)
                xs = self.block(xs, f"layer.{layer}", layer)
                self.each(partial(self.show, f"layer.{layer}", "output"), xs)
            reads = None if model.mtp is None else model.mtp.reads
            outputs = self.each(self.after_blocks, [[x] for x in xs]) if reads == "after_norm" else [[x] for x in xs]
            for number in range(num_modules(model)):  # a stream has two readers: a watch records both gradients
                name = f"mtp.{number}"
                both = [[[shard.clone() for shard in of_rank[number]] for of_rank in outputs] for _ in range(2)]
                xs, outputs = both[0], [[*of_rank[:number], x] for of_rank, x in zip(outputs, both[1], strict=True)]
                self.each(partial(self.show, name, "input"), xs)
                xs = self.each(partial(self.joined_with, name), xs, [of_rank[number + 1] for of_rank in embedded])
                xs = self.block(xs, name, model.num_layers - 1)
                if reads != "before_norm":
                    xs = self.each(partial(self.norm, name=f"{name}.norm"), xs)
                self.each(partial(self.show, name, "output"), xs)
                outputs = [[*of_rank, x] for of_rank, x in zip(outputs, xs, strict=True)]
            if reads == "streams":
                outputs = self.each(self.after_module, outputs)
            elif reads != "after_norm":
                outputs = self.each(self.after_blocks, outputs)
            losses.append(self.each(self.loss, outputs, parts))
        return losses

    def _part(self, batch: Batch) -> Batch:
        parts = (np.array_split(ids, self.num_splits, axis=1)[self.split] for ids in (batch.tokens, batch.labels))
        return Batch(*parts)

    def embedded(self, batches: Sequence[Batch]) -> list[Shards]:
        """The input of the blocks, then the embedded tokens of each module.

        Modules that look up tokens themselves have their own leaves for the weight.
        """
        names = ["embed", *(f"mtp.{number}" for number in range(len(batches) - 1))]
        if self.plan.gpt.mtp is not None and self.plan.gpt.mtp.embedding == "own":
            tables = [self.used["embed.weight"], *(self.used[f"{name}.embed.weight"] for name in names[1:])]
        elif embeds_again(self.plan.gpt):
            tables = [self.used[f"{name}.weight"] for name in names]
        else:
            of_shards = [copies_for_mtp_streams(shard, len(batches)) for shard in self.used["embed.weight"]]
            tables = [list(of_stream) for of_stream in zip(*of_shards, strict=True)]
        x, *others = [self.embed(batch, table) for batch, table in zip(batches, tables, strict=True)]
        x = self.dropped(self.positioned(x), "embedding", "embed")
        self.show("embed", "output", x)
        num_head, _ = self.plan.gpt.num_empty
        (x,) = self.ends(layer_order(self.plan.gpt)[1 : 1 + num_head], [x])
        return [x, *(self.dropped(y, "embedding", f"{name}.embed") for name, y in zip(names[1:], others, strict=True))]

    def joined_with(self, name: str, hidden: Shards, embedding: Shards) -> Shards:
        """The input of the block of a module."""
        if self.plan.gpt.modules_read_streams:
            each = [shard.reshape([*shard.shape[:-1], -1, self.plan.gpt.hidden_size]) for shard in hidden]
            of_hidden = products(self.norm(each, f"{name}.hidden_norm"), self.used[f"{name}.hidden_proj.weight"])
            embedded = products(self.norm(embedding, f"{name}.embed_norm"), self.used[f"{name}.embed_proj.weight"])
            sums = (of_streams + one.unsqueeze(-2) for of_streams, one in zip(of_hidden, embedded, strict=True))
            return [own.reshape(shard.shape) for own, shard in zip(sums, hidden, strict=True)]
        both = self.norm(hidden, f"{name}.hidden_norm"), self.norm(embedding, f"{name}.embed_norm")
        return products(
            [paddle.concat(of_shard, axis=-1) for of_shard in zip(*both, strict=True)], self.used[f"{name}.proj.weight"]
        )

    def after_module(self, xs: list[Shards]) -> list[Shards]:
        """The main model's contraction of the streams that the module has read, and its final norm."""
        spec = self.plan.gpt.hyper_connections
        assert spec is not None
        return [*self.after_blocks([contracted_by(xs[0], spec, "mtp.0.main_streams", self.used)]), *xs[1:]]

    def ends(self, names: Sequence[str], xs: list[Shards]) -> list[Shards]:
        """The layers before and after the blocks: the final norm, and empty layers."""
        for name in names:
            self.show(name, "input", xs[0])
            if name == "norm":
                of_weights = [
                    zip(*(copies_for_mtp_streams(shard, len(xs)) for shard in self.used[weight]), strict=True)
                    for weight in self.math.norm_names("norm")
                ]
                xs = [self.normed(x, *own) for x, *own in zip(xs, *of_weights, strict=True)]
            self.show(name, "output", xs[0])
        return xs

    def block(self, xs: Sequence[Shards], name: str, number: int) -> list[Shards]:
        """Block ``number`` on all ranks. The ranks exchange tokens at its experts, if it has any."""
        model = self.plan.gpt

        def attended(x: Shards) -> Residual:
            before = residual(expanded(x, model, name), f"{name}.attn", model, self.used)
            y = self.attention(self.norm(before.sub_layer_input, f"{name}.attn_norm"), f"{name}.attn")
            x = before.update(self.dropped(y, "hidden", f"{name}.attn"))
            return residual(x, f"{name}.mlp", model, self.used)

        def ended(before: Residual, y: Shards) -> Shards:
            return contracted(before.update(self.dropped(y, "hidden", f"{name}.mlp")), model, name, self.used)

        befores = self.each(attended, xs)
        normed = self.each(lambda before: self.norm(before.sub_layer_input, f"{name}.mlp_norm"), befores)
        if self.plan.gpt.has_experts(number):
            return self.each(ended, befores, self.experts(normed, f"{name}.mlp"))
        return self.each(ended, befores, self.each(lambda x: self.mlp(x, f"{name}.mlp"), normed))

    def after_blocks(self, xs: list[Shards]) -> list[Shards]:
        """The final norm and the empty layers of the tail, for streams of the current split and rank."""
        num_tail = self.plan.gpt.num_empty[1]
        others = [name for name in layer_order(self.plan.gpt) if not name.startswith("mtp.")]
        return self.ends(others[-2 - num_tail : -1], xs)

    def loss(self, xs: list[Shards], batches: Sequence[Batch]) -> Tensor:
        """The losses of the current split and rank."""
        self.show("head", "input", xs[0])
        of_shards = [copies_for_mtp_streams(shard, len(xs)) for shard in self.used["head.weight"]]
        tied = self.plan.gpt.tied_embedding
        return stacked_losses(
            [
                self.cross_entropy(products(self.enter(x), list(own), transposed=tied), batch)
                for x, own, batch in zip(xs, zip(*of_shards, strict=True), batches, strict=True)
            ]
        )

    def show(self, layer: str, side: Side, x: Shards) -> None:
        """Pass the input or output of a layer to the watch, if there is one."""
        if self.watch is not None:
            self.watch.see(layer, side, self.indices[self.rank], self.split, x)
