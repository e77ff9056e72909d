"""Typed programs run on numbers: every rank with its local arrays, forward and backward, and one rank with all.

Written from the meaning of the types, not from the rules: a value of type S is a part, of type P an addend, and so on.
Programs that the rules accept must then denote the values and gradients of the one rank.
"""

from itertools import product

import numpy as np

from pipeproof.stages.describe.typed_ops import INVARIANT, PARTIAL, TypedKind


class Numbers:
    """One program on all ranks of its mesh."""

    def __init__(self, layer, seed):
        self.layer, self.program = layer, layer.program
        self.axes = list(self.program.mesh)  # the first cuts finest
        self.ranks = list(product(*(range(self.program.mesh[axis]) for axis in self.axes)))
        self.random = np.random.default_rng(seed)

    def draw(self, dims):
        return self.random.integers(-3, 4, [self.program.sizes[d] for d in dims]).astype(float)

    def spread(self, whole, dims, types):
        """Each rank's array of a whole one; addends are drawn at random."""
        parts = dict.fromkeys(self.ranks, whole)
        for place, axis in reversed(list(enumerate(self.axes))):
            kind, size = types.get(axis, INVARIANT), self.program.mesh[axis]
            if kind.is_cut:
                dim = dims.index(kind.dim)
                parts = {r: np.split(a, size, axis=dim)[r[place]] for r, a in parts.items()}
            elif kind == PARTIAL:
                drawn = {}
                for rank, array in parts.items():
                    base = tuple(
                        k if a != axis and not types.get(a, INVARIANT).is_equal else 0
                        for a, k in zip(self.axes, rank, strict=True)
                    )
                    drawn.setdefault(base, [self.random.integers(-3, 4, array.shape) for _ in range(size - 1)])
                    addends = [*drawn[base], array - sum(drawn[base])]
                    parts[rank] = addends[rank[place]]
        return parts

    def joined(self, parts, dims, types):
        """The whole array that the ranks' arrays denote; asserts that equal values are equal."""
        for axis in self.axes:
            kind = types.get(axis, INVARIANT)
            merged = {}
            for rank in sorted({r[1:] for r in parts}):
                mates = [parts[k, *rank] for k in range(self.program.mesh[axis])]
                if kind.is_cut:
                    merged[rank] = np.concatenate(mates, axis=dims.index(kind.dim))
                elif kind == PARTIAL:
                    merged[rank] = sum(mates)
                else:
                    assert all(np.allclose(mates[0], mate) for mate in mates), "said to be equal, and is not"
                    merged[rank] = mates[0]
            parts = merged
        return parts[()]

    def check(self):
        """Assert that all values and all gradients denote the values and gradients of one rank."""
        program, values = self.program, self.layer.values
        outside = [*program.inputs, *(parameter.value for parameter in program.parameters)]
        whole = {value.name: self.draw(value.dims) for value in outside}
        local = {v.name: self.spread(whole[v.name], v.dims, values[v.name].types) for v in outside}
        for op in program.ops:
            dims = [values[name].dims for name in op.inputs]
            whole[op.name] = whole[op.inputs[0]] if op.axis else forward(op, [whole[n] for n in op.inputs], dims)
            if op.axis:
                kinds = values[op.inputs[0]].types[op.axis], values[op.name].types[op.axis]
                local[op.name] = self.change(local[op.inputs[0]], op.output.dims, op.axis, *kinds)
            else:
                local[op.name] = {r: forward(op, [local[n][r] for n in op.inputs], dims) for r in self.ranks}
            found = self.joined(local[op.name], op.output.dims, values[op.name].types)
            assert np.allclose(found, whole[op.name]), f"{op.name} does not denote its value"
        self.check_gradients(whole, local, outside)

    def check_gradients(self, whole, local, outside):
        values, ops = self.layer.values, [op for op in self.program.ops if op.output.differentiable]
        if not ops:
            return
        one, all_ranks = {}, {}
        seed = self.draw(ops[-1].output.dims)
        add(one, ops[-1].name, seed)
        duals = self.layer.gradient_of(ops[-1].name)
        for rank, part in self.spread(seed, ops[-1].output.dims, duals).items():
            add(all_ranks, (ops[-1].name, rank), part)
        for op in reversed(ops):
            if op.name not in one:
                continue
            dims = [values[name].dims for name in op.inputs]
            grads = {rank: all_ranks[op.name, rank] for rank in self.ranks}
            if op.axis:
                kinds = values[op.name].types[op.axis].dual, values[op.inputs[0]].types[op.axis].dual
                add(one, op.inputs[0], one[op.name])
                for rank, part in self.change(grads, op.output.dims, op.axis, *kinds).items():
                    add(all_ranks, (op.inputs[0], rank), part)
                continue
            parts = backward(op, one[op.name], [whole[n] for n in op.inputs], dims)
            for name, grad in zip(op.inputs, parts, strict=True):
                add(one, name, grad)
            for rank in self.ranks:
                parts = backward(op, grads[rank], [local[n][rank] for n in op.inputs], dims)
                for name, grad in zip(op.inputs, parts, strict=True):
                    add(all_ranks, (name, rank), grad)
        for value in outside:
            if not value.differentiable or value.name not in one:
                continue
            types = dict(self.layer.gradient_of(value.name))
            if value.name in self.layer.partial_over:
                types = {axis: PARTIAL if axis in self.layer.partial_over[value.name] else kind.dual
                         for axis, kind in values[value.name].types.items()}  # fmt: skip
            found = self.joined({r: all_ranks[value.name, r] for r in self.ranks}, value.dims, types)
            assert np.allclose(found, one[value.name]), f"the gradient of {value.name} is not what its type says"

    def change(self, parts, dims, axis, taken, made):
        """From one type over ``axis`` to another, as the collective for it does; I and R hold the same values."""
        place, size = self.axes.index(axis), self.program.mesh[axis]
        result = {}
        for rank, own in parts.items():
            mates = [parts[(*rank[:place], k, *rank[place + 1 :])] for k in range(size)]
            if taken.is_cut:
                joined = np.concatenate(mates, axis=dims.index(taken.dim))
            elif taken == PARTIAL and made != PARTIAL and not (made.is_equal and taken == made):
                joined = sum(mates)
            else:
                joined = own
            if made == PARTIAL and taken.is_cut:  # the part in its place, zeros elsewhere
                joined = np.zeros_like(joined)
                at = [slice(None)] * joined.ndim
                dim = dims.index(taken.dim)
                at[dim] = slice(rank[place] * own.shape[dim], (rank[place] + 1) * own.shape[dim])
                joined[tuple(at)] = own
            result[rank] = np.split(joined, size, axis=dims.index(made.dim))[rank[place]] if made.is_cut else joined
        return result


def add(grads, key, grad):
    grads[key] = grads[key] + grad if key in grads else grad


def letters(dims):
    return "".join(dims)


def stretched(array, dims, to):
    """``array`` with an axis for each dim of ``to``, of size 1 where it has none."""
    order = [dims.index(d) for d in to if d in dims]
    moved = array.transpose(order)
    return moved.reshape([array.shape[dims.index(d)] if d in dims else 1 for d in to])


def shrunk(grad, dims, to, shape):
    """The gradient of an operand of ``to`` that was stretched to ``dims``."""
    summed = grad.sum(axis=tuple(i for i, d in enumerate(dims) if d not in to))
    left = [d for d in dims if d in to]
    return np.broadcast_to(summed.transpose([left.index(d) for d in to]), shape)


def joined_dims(dims):
    return list(dict.fromkeys(d for one in dims for d in one))


def forward(op, arrays, dims):
    out = op.output.dims
    if op.kind is TypedKind.MULTIPLY:
        return np.einsum(f"{','.join(map(letters, dims))}->{letters(out)}", *arrays)
    if op.kind is TypedKind.ADD:
        return sum(stretched(a, d, out) for a, d in zip(arrays, dims, strict=True))
    if op.kind is TypedKind.DETACH:
        return arrays[0]
    assert op.kind is TypedKind.APPLY
    every = joined_dims(dims)
    total = sum(stretched(a, d, every) for a, d in zip(arrays, dims, strict=True))
    mixed = tuple(every.index(d) for d in dict.fromkeys(op.over))
    made = total * (total**2).sum(axis=mixed, keepdims=True)
    return made.sum(axis=tuple(i for i, d in enumerate(every) if d not in out))


def backward(op, grad, arrays, dims):
    out = op.output.dims
    if op.kind is TypedKind.MULTIPLY:
        return [_product_grad(op, grad, arrays, dims, i) for i in range(len(arrays))]
    if op.kind is TypedKind.ADD:
        return [shrunk(grad, list(out), d, a.shape) for a, d in zip(arrays, dims, strict=True)]
    every = joined_dims(dims)
    total = sum(stretched(a, d, every) for a, d in zip(arrays, dims, strict=True))
    mixed = tuple(every.index(d) for d in dict.fromkeys(op.over))
    wide = np.broadcast_to(stretched(grad, list(out), every), total.shape)
    inner = wide * (total**2).sum(axis=mixed, keepdims=True) + 2 * total * (wide * total).sum(axis=mixed, keepdims=True)
    return [shrunk(inner, every, d, a.shape) for a, d in zip(arrays, dims, strict=True)]


def _product_grad(op, grad, arrays, dims, which):
    others = [(a, d) for i, (a, d) in enumerate(zip(arrays, dims, strict=True)) if i != which]
    known = {d for _, one in others for d in one} | set(op.output.dims)
    spec = ",".join([letters(op.output.dims), *(letters(d) for _, d in others)])
    to = [d for d in dims[which] if d in known]
    part = np.einsum(f"{spec}->{letters(to)}", grad, *(a for a, _ in others))
    return np.broadcast_to(stretched(part, to, list(dims[which])), arrays[which].shape)
