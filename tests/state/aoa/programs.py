"""Random programs with their results, by numpy: splits, merges, transposes, fused forms, through temporary names."""

from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from pipeproof.state.aoa.tensor_families import TensorMeta
from tests.state.aoa.arrays import numbers


@dataclass
class Drawn:
    """Statements, tensors before and after, and the arrays of both."""

    lines: list = field(default_factory=list)
    source: dict = field(default_factory=dict)
    target: dict = field(default_factory=dict)
    before: dict = field(default_factory=dict)
    after: dict = field(default_factory=dict)


@st.composite
def programs(draw, *, casts=True, removes=True, uneven=True):
    drawn = Drawn()
    names = iter(f"made.{number}.w" for number in range(100))
    for number in range(draw(st.integers(1, 3))):
        dims = draw(st.integers(1, 3))
        shape = tuple(draw(st.sampled_from([4, 6, 12, 16, 24])) for _ in range(dims))
        drawn.source[f"layers.{number + 9}.w"] = TensorMeta("float32", shape, draw(st.sampled_from([1, 2])))
    _fused_sources(draw, drawn)
    drawn.before = numbers(drawn.source)
    live = dict(drawn.before)
    for _ in range(draw(st.integers(1, 6))):
        _step(draw, drawn, live, names, uneven)
    _fused(draw, drawn, live)
    for name in list(live):
        if casts and draw(st.integers(0, 5)) == 0:
            dtype = draw(st.sampled_from(["bfloat16", "float16"]))
            final = next(names)
            drawn.lines.append(f'{name} -> {final}, dtype="{dtype}"')
            live[final] = live.pop(name)
            shards = drawn.target.pop(name).num_shards if name in drawn.target else 1
            drawn.target[final] = TensorMeta(dtype, live[final].shape, shards)
    if removes and len(live) > 1 and draw(st.booleans()):
        gone = next((name for name in live if name in drawn.source), None)
        if gone is not None:
            drawn.lines.append(f"{gone} -> _")
            del live[gone]
    drawn.after = live
    for name, array in live.items():
        shards = drawn.target[name].num_shards if name in drawn.target else 1
        dtype = drawn.target[name].dtype if name in drawn.target else "float32"
        drawn.target[name] = TensorMeta(dtype, array.shape, shards)
    return drawn


def _fused_sources(draw, drawn):
    if draw(st.booleans()):
        shards = draw(st.sampled_from([1, 2, 4]))
        drawn.source["ffn.w"] = TensorMeta("float32", (3, 16), shards)
    if draw(st.booleans()):
        drawn.source["attention.qkv"] = TensorMeta("float32", (5, 16), draw(st.sampled_from([1, 2])))
    if draw(st.booleans()):
        for name, width in (("q", 8), ("k", 4), ("v", 4)):
            drawn.source[f"heads.{name}"] = TensorMeta("float32", (5, width))


def _step(draw, drawn, live, names, uneven):
    plain = [name for name in live if name.split(".")[0] in ("layers", "made")]
    name = draw(st.sampled_from(plain))
    array, final = live[name], next(names)
    view = draw(st.sampled_from(["", "^T"]))
    seen = array.T if view else array
    kind = draw(st.sampled_from(["rename", "permute", "split", "merge", "update"]))
    if kind == "rename":
        drawn.lines.append(f"{name}{view} -> {final}")
        del live[name]
        live[final] = seen
    elif kind == "update" and name not in drawn.source:
        drawn.lines.append(f"{name}^T -> {name}")
        live[name] = array.T
    elif kind == "permute":
        order = draw(st.permutations(range(array.ndim)))
        drawn.lines.append(f'{name} -> {final}, permute="{list(order)}"')
        del live[name]
        live[final] = array.transpose(order)
    elif kind == "split":
        axis = draw(st.integers(0, array.ndim - 1))
        parts = draw(st.sampled_from([n for n in (2, 3, 4) if seen.shape[axis] % n == 0] or [1]))
        if parts == 1:
            return
        finals = [final, *(next(names) for _ in range(parts - 1))]
        drawn.lines.append(f"{name}{view} -> {', '.join(finals)}, axis={axis}")
        del live[name]
        live.update(zip(finals, np.split(seen, parts, axis), strict=True))
    elif kind == "merge":
        axis = draw(st.integers(0, array.ndim - 1))
        fitting = [
            other for other in plain
            if other != name and live[other].ndim == array.ndim
            and (uneven or live[other].shape == seen.shape)
            and np.delete(live[other].shape, axis).tolist() == np.delete(seen.shape, axis).tolist()
        ]  # fmt: skip
        if fitting:
            other = draw(st.sampled_from(fitting))
            drawn.lines.append(f"{name}{view}, {other} -> {final}, axis={axis}")
            live[final] = np.concatenate([seen, live.pop(other)], axis)
            del live[name]


def _fused(draw, drawn, live):
    if "ffn.w" in drawn.source:
        whole, shards = live.pop("ffn.w"), drawn.source["ffn.w"].num_shards
        gate, up = (part.reshape(3, -1) for part in np.moveaxis(whole.reshape(3, shards, 2, -1), 2, 0))
        if draw(st.booleans()):
            drawn.lines.append("ffn.w -> gate, up, fused_ffn")
            live.update(gate=gate, up=up)
        else:
            other = draw(st.sampled_from([1, 2, 4]))
            drawn.lines.append("ffn.w -> ffn2.w, fused_ffn, axis=1")
            live["ffn2.w"] = np.stack([gate.reshape(3, other, -1), up.reshape(3, other, -1)], 2).reshape(3, -1)
            drawn.target["ffn2.w"] = TensorMeta("float32", (3, 16), other)
    heads = "num_heads=4, num_key_value_groups=2, axis=1"
    if "attention.qkv" in drawn.source:
        whole = live.pop("attention.qkv")
        if draw(st.booleans()):
            drawn.lines.append(f"attention.qkv -> q, k, v, fused_qkv, {heads}")
            groups = whole.reshape(5, 2, 8)
            q, k, v = groups[:, :, :4], groups[:, :, 4:6], groups[:, :, 6:]
        else:
            shards = drawn.source["attention.qkv"].num_shards
            drawn.lines.append(f"attention.qkv -> q, k, v, fused_qkv_old, {heads}")
            ranks = whole.reshape(5, shards, 16 // shards)
            q, k, v = np.split(ranks, [8 // shards, 12 // shards], 2)
        live.update(q=q.reshape(5, -1), k=k.reshape(5, -1), v=v.reshape(5, -1))
    if "heads.q" in drawn.source:
        q, k, v = (live.pop(f"heads.{name}") for name in "qkv")
        kind, ranks = draw(st.sampled_from([("fused_qkv", 2), ("fused_qkv_old", 1), ("fused_qkv_old", 2)]))
        drawn.lines.append(f"heads.q, heads.k, heads.v -> fused.qkv, {kind}, {heads}")
        live["fused.qkv"] = np.concatenate([x.reshape(5, ranks, -1) for x in (q, k, v)], 2).reshape(5, -1)
        drawn.target["fused.qkv"] = TensorMeta("float32", (5, 16), ranks)
