"""The reference that adds in a parallel run's order: one process, one model, no ranks.

Addition of rounded numbers is not associative, so a tensor- or data-parallel
run cannot have the bits of the uncut model. It can have the bits of a model
whose sums are written in the run's order, and this is that model:

- a column-parallel product is one product per piece of the weight's columns; a
  row-parallel one is one product per piece of its rows, added in piece order;
- the gradient of what all pieces read is added in piece order;
- with sequence parallelism a norm is applied to each piece of the sequence
  with a copy of its weight, and the copies' gradients are added in piece order
  after the last micro-batch;
- the embedding, the softmax's denominator and the target logit are added over
  pieces of the vocabulary in piece order; the maximum does not round;
- the gradient of each parameter adds its micro-batches in the order in which
  the plan's schedule does, from +0.0 on; where there are copies of a stage,
  which share out the micro-batches, each copy adds its own, and the copies'
  sums are added after that in their order;
- the gradient sums and losses of the data-parallel ranks' micro-batches are
  added in rank order after that;
- where sequences are cut, every split is computed by itself and its gradients
  are addends of their own; that of keys and values adds what later splits make
  of it, from the last one back, and then the split's own.

Piece k is what tensor-parallel rank k holds. With one piece this is the uncut
model's arithmetic. It shares no code with what it judges.

Shape letters: S sequence, B rows, H hidden, A heads, D head size, V vocabulary,
T pieces. Activations are written [S, B, H]; with activation order ``bsh`` they
are [B, S, H].
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import paddle
import paddle.nn.functional as F

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.layers import describe_gpt
from pipeproof.stages.describe.synthetic import Batch, initial_weight, loss_scale, micro_batch
from pipeproof.stages.reference.orders import ByCopy, Orders
from pipeproof.stages.reference.pieces import Copies, Pieces, add, add_pieces, cut_dim, leaf, products
from pipeproof.stages.reference.result import StepResult

Tensor: TypeAlias = paddle.Tensor


def run_ordered(plan: PlanSpec, orders: Orders) -> Iterator[StepResult]:
    """Train for the plan's steps in the order of sums of its parallel run, yielding after each; lazy."""
    model = OrderedModel(plan)
    optimizer = _optimizer(plan, [piece for pieces in model.weights.values() for piece in pieces])
    num_dp, num_micro_batches = plan.topology.dp, plan.schedule.num_micro_batches
    for step in range(plan.run.steps):
        weights = {name: model.joined(name, pieces) for name, pieces in model.weights.items()}
        losses, sums = [], []
        for rank in range(num_dp):
            loss = ByCopy[np.floating[Any]](orders.loss)
            sums_of = {name: ByCopy[Tensor](copies) for name, copies in orders.gradients.items()}
            for index in range(num_micro_batches):
                units = _micro_batch(model, step, rank * num_micro_batches + index)
                for unit, (of_one, gradients_of_one) in enumerate(units, start=index * model.num_splits):
                    loss.put(unit, [of_one])
                    for name, pieces in gradients_of_one.items():
                        sums_of[name].put(unit, pieces)
            losses.append(loss.total()[0])
            sums.append({name: model.summed(name, by_copy.total()) for name, by_copy in sums_of.items()})
        gradients = {name: add_pieces([of_rank[name] for of_rank in sums]) for name in model.weights}
        for name, pieces in model.weights.items():
            for piece, grad in zip(pieces, gradients[name], strict=True):
                piece.grad = grad
        whole = {name: model.joined(name, pieces) for name, pieces in gradients.items()}
        optimizer.step()
        yield StepResult(step, add(losses), whole, weights)


def _micro_batch(model: OrderedModel, step: int, index: int) -> list[tuple[np.floating[Any], dict[str, Pieces]]]:
    """Run one micro-batch: of each split of its sequences the scaled loss, and its gradients in pieces."""
    model.zero_gradients()
    scale = loss_scale(model.plan, step, index)
    losses = [loss * scale for loss in model.losses(micro_batch(model.plan, step, index))]
    paddle.autograd.backward(losses)
    return [(loss.numpy()[()], model.gradients(split)) for split, loss in enumerate(losses)]


class OrderedModel:
    """The GPT of the plan, its weights in pieces, its sums in piece order."""

    def __init__(self, plan: PlanSpec) -> None:
        self.plan = plan
        self.num_pieces = plan.topology.tp
        self.num_splits = plan.schedule.num_sequence_splits
        self.sequence_first = plan.model.activation_order == "sbh"
        self.sequence_pieces = self.num_pieces if plan.topology.sequence_parallel else 1
        self.sequence_dim = 0 if self.sequence_first else 1
        self.weights: dict[str, Pieces] = {
            p.name: self._in_pieces(p.name, initial_weight(p, plan.run.seed, plan.run.dtype))
            for layer in describe_gpt(plan)
            for p in layer.parameters
        }
        self.of_splits = [self.weights] * self.num_splits
        self.split, self.used = 0, self.weights
        self.earlier: dict[str, list[tuple[Tensor, ...]]] = {}
        self.head_size = plan.model.hidden_size // plan.model.num_heads
        frequencies = 10000.0 ** -(np.arange(self.head_size // 2, dtype=np.float64) * 2 / self.head_size)
        angles = np.arange(plan.model.seq_length)[:, None] * frequencies  # [S, D / 2]
        self.cos = paddle.to_tensor(np.cos(angles), dtype=plan.run.dtype)
        self.sin = paddle.to_tensor(np.sin(angles), dtype=plan.run.dtype)

    # Weights and gradients

    def _in_pieces(self, name: str, whole: npt.NDArray[Any]) -> Pieces:
        dim = cut_dim(name)
        arrays = np.split(whole, self.num_pieces, dim) if dim is not None else [whole] * self.sequence_pieces
        return [paddle.to_tensor(np.ascontiguousarray(array), stop_gradient=False) for array in arrays]

    def zero_gradients(self) -> None:
        """Begin every gradient buffer as +0.0; where sequences are cut, each split has buffers of its own."""
        if self.num_splits > 1:
            self.of_splits = [
                {name: [leaf(piece) for piece in pieces] for name, pieces in self.weights.items()}
                for _ in range(self.num_splits)
            ]
        for weights in self.of_splits:
            for pieces in weights.values():
                for piece in pieces:
                    piece.grad = paddle.zeros_like(piece)

    def gradients(self, split: int = 0) -> dict[str, Pieces]:
        """The gradients from one split as they are, in pieces, each a tensor of its own."""
        return {name: [piece.grad.clone() for piece in pieces] for name, pieces in self.of_splits[split].items()}

    def summed(self, name: str, pieces: Pieces) -> Pieces:
        """A sum over micro-batches; copies of a norm's weight all get the sum over copies."""
        return pieces if cut_dim(name) is not None else [add(pieces)] * len(pieces)

    def joined(self, name: str, pieces: Pieces) -> npt.NDArray[Any]:
        """The named weight, or its gradient, from its pieces: an array of its own."""
        dim = cut_dim(name)
        arrays = [piece.numpy() for piece in pieces]
        return np.concatenate(arrays, dim) if dim is not None else arrays[0].copy()

    # The model. Between blocks an activation is cut along the sequence with
    # sequence parallelism, else one whole tensor.

    def losses(self, batch: Batch) -> list[Tensor]:
        """Of each split of the sequences, in order: the cross-entropy summed over its counted tokens, a scalar."""
        self.earlier.clear()
        cut = (np.array_split(words, self.num_splits, axis=1) for words in (batch.tokens, batch.labels))
        losses = []
        for self.split, (tokens, labels) in enumerate(zip(*cut, strict=True)):
            self.used = self.of_splits[self.split]
            losses.append(self.loss(Batch(tokens, labels)))
        return losses

    def loss(self, batch: Batch) -> Tensor:
        """That of the split that is its turn."""
        x = self.embed(batch)
        for i in range(self.plan.model.num_layers):
            x = self.add(x, self.attention(self.norm(x, f"layer.{i}.attn_norm.weight"), f"layer.{i}.attn"))
            x = self.add(x, self.mlp(self.norm(x, f"layer.{i}.mlp_norm.weight"), f"layer.{i}.mlp"))
        entered = self.enter(self.norm(x, "norm.weight"))
        return self.cross_entropy(products(entered, self.used["head.weight"]), batch)

    def embed(self, batch: Batch) -> Pieces:
        """Embedded tokens: pieces of the vocabulary contribute zeros for each other's tokens."""
        tokens = self._ordered(batch.tokens)
        tables = self.used["embed.weight"]
        if len(tables) == 1:
            return [F.embedding(tokens, tables[0])]
        partials = []
        for table, (row, is_here) in zip(tables, self._places(tokens), strict=True):
            partials.append(F.embedding(row, table) * is_here.astype(table.dtype).unsqueeze(-1))
        return self.leave(partials)

    def enter(self, x: Pieces) -> Pieces:
        """All tokens, once for each piece of the weights that read them."""
        whole = x[0] if len(x) == 1 else paddle.concat(x, axis=self.sequence_dim)
        return [whole] if self.num_pieces == 1 else list(Copies.apply(whole, self.num_pieces))

    def leave(self, partials: Pieces) -> Pieces:
        """The sum of the pieces' products in piece order, as activations are between blocks."""
        whole = add(partials)
        if self.sequence_pieces == 1:
            return [whole]
        return list(paddle.split(whole, self.sequence_pieces, axis=self.sequence_dim))

    def add(self, x: Pieces, y: Pieces) -> Pieces:
        """The residual sum."""
        return [a + b for a, b in zip(x, y, strict=True)]

    def norm(self, x: Pieces, name: str) -> Pieces:
        """RMSNorm over the last dim; each piece of the sequence has its copy of the weight."""
        normed = []
        for piece, weight in zip(x, self.used[name], strict=True):
            # A copy, so that no tensor feeds three operations, whose gradients
            # autograd would add in an order that is nobody's promise.
            a = paddle.assign(piece)
            inverse = paddle.rsqrt(paddle.square(a).mean(axis=-1, keepdim=True) + 1e-6)
            normed.append(a * inverse * weight)
        return normed

    def attention(self, x: Pieces, name: str) -> Pieces:
        """Causal rotary attention, heads in pieces."""
        fused = products(self.enter(x), self.used[f"{name}.qkv.weight"])
        mixed = [self.mix(qkv, f"{name} of piece {piece}") for piece, qkv in enumerate(fused)]
        return self.leave(products(mixed, self.used[f"{name}.out.weight"]))

    def mix(self, qkv: Tensor, where: str) -> Tensor:
        """Attention of one piece's heads: [S, B, A / T * 3 * D] to [S, B, A / T * D]."""
        num_heads, size = self.plan.model.num_heads // self.num_pieces, self.head_size
        rows = qkv.shape[:2]
        to_heads, from_heads = ([1, 2, 0, 3], [2, 0, 1, 3]) if self.sequence_first else ([0, 2, 1, 3],) * 2
        heads = qkv.reshape([*rows, num_heads, 3 * size]).transpose(to_heads)
        q, k, v = heads.split(3, axis=-1)  # [B, A / T, S, D] each
        k, v = self.up_to_here(self.rotary(k), f"keys of {where}"), self.up_to_here(v, f"values of {where}")
        scores = paddle.matmul(self.rotary(q), k, transpose_y=True) * size**-0.5
        is_future = ~np.tri(q.shape[2], k.shape[2], k.shape[2] - q.shape[2], dtype=bool)
        mask = paddle.to_tensor(np.where(is_future, -np.inf, 0.0), dtype=scores.dtype)
        mixed = paddle.matmul(F.softmax(scores + mask, axis=-1), v)
        return mixed.transpose(from_heads).reshape([*rows, num_heads * size])

    def up_to_here(self, own: Tensor, what: str) -> Tensor:
        """Keys or values of the splits up to this one, joined.

        Each later split reads a copy; gradients are added from the last split's back to the split's own.
        """
        num_readers = self.num_splits - self.split
        self.earlier.setdefault(what, []).append(Copies.apply(own, num_readers) if num_readers > 1 else (own,))
        read = [copies[num_readers - 1] for copies in self.earlier[what]]
        return read[0] if len(read) == 1 else paddle.concat(read, axis=2)

    def rotary(self, heads: Tensor) -> Tensor:
        """Turn each pair (i, i + D/2) of a head by its position's angle."""
        a, b = heads.split(2, axis=-1)
        begin = self.split * heads.shape[2]
        cos, sin = (table[begin : begin + heads.shape[2]] for table in (self.cos, self.sin))
        return paddle.concat([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def mlp(self, x: Pieces, name: str) -> Pieces:
        """SwiGLU, the feed-forward width in pieces."""
        entered = self.enter(x)
        gates = products(entered, self.used[f"{name}.gate.weight"])
        ups = products(entered, self.used[f"{name}.up.weight"])
        gated = [F.silu(gate) * up for gate, up in zip(gates, ups, strict=True)]
        return self.leave(products(gated, self.used[f"{name}.down.weight"]))

    def cross_entropy(self, logits: Pieces, batch: Batch) -> Tensor:
        """The summed cross-entropy; logits are [S, B, V / T] each."""
        labels = self._ordered(batch.labels)
        if len(logits) == 1:
            flat = logits[0].reshape([-1, logits[0].shape[-1]])
            return F.cross_entropy(flat, labels.reshape([-1]), ignore_index=-100, reduction="none").sum()
        highest = logits[0].detach().max(axis=-1)
        for piece in logits[1:]:
            highest = paddle.maximum(highest, piece.detach().max(axis=-1))
        shifted = [piece - highest.unsqueeze(-1) for piece in logits]
        sum_exp = add([paddle.exp(piece).sum(axis=-1) for piece in shifted])
        targets = []
        for piece, (column, is_here) in zip(shifted, self._places(labels), strict=True):
            logit = paddle.take_along_axis(piece, column.unsqueeze(-1), axis=-1).squeeze(-1)
            targets.append(logit * is_here.astype(piece.dtype))
        losses = paddle.log(sum_exp) - add(targets)
        return (losses * (labels != -100).astype(losses.dtype)).sum()

    def _ordered(self, words: npt.NDArray[np.int64]) -> Tensor:
        """Tokens or labels [B, S] in the order of the activations."""
        return paddle.to_tensor(np.ascontiguousarray(words.T if self.sequence_first else words))

    def _places(self, words: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """For each piece of the vocabulary: where in it each word is (0 if elsewhere), and whether it is there."""
        size = self.plan.model.vocab_size // self.num_pieces
        for piece in range(self.num_pieces):
            is_here = paddle.floor_divide(words, paddle.full_like(words, size)) == piece
            yield paddle.where(is_here, words - piece * size, paddle.zeros_like(words)), is_here


def _optimizer(plan: PlanSpec, weights: Pieces) -> paddle.optimizer.Optimizer:
    """Paddle's SGD, or its AdamW with betas 0.9 and 0.999, epsilon 1e-8 and decay 0.01 of every weight."""
    if plan.run.optimizer == "sgd":
        return paddle.optimizer.SGD(plan.run.learning_rate, parameters=weights)
    return paddle.optimizer.AdamW(
        plan.run.learning_rate, beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.01, parameters=weights
    )
