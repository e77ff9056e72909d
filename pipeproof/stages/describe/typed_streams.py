"""The residual of a typed block: a sum, or several streams that are read, written and mixed.

Dims: ``p`` the streams, ``p_to`` those that are written, ``p_all`` their
``p_to`` x ``p``, ``p_gates`` all numbers that gate and mix them, ``p_three``
the scales of these numbers. What else is named stands in ``typed_gpt``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pipeproof.specs.model import ModelSpec
from pipeproof.stages.describe.streams import BlockStreams
from pipeproof.stages.describe.typed_ops import ProgramBuilder

SubLayer = Callable[[ProgramBuilder, str], str]
"""Writes a sub-layer behind its input and returns the name of what it makes."""


def stream_sizes(model: ModelSpec) -> Mapping[str, int]:
    """The sizes of the dims of streams; none where there is one residual."""
    spec, count = model.hyper_connections, model.num_streams
    if spec is None:
        return {}
    return {"p": count, "p_to": count, "p_all": count * count, "p_gates": spec.num_gates, "p_three": 3}


def residual_block(
    p: ProgramBuilder,
    streams: BlockStreams | None,
    sub_layers: Sequence[tuple[str, str, SubLayer]],
    between: Mapping[str, str],
) -> ProgramBuilder:
    """A block of sub-layers (its name, that of what stands behind it, what it computes), each with its residual."""
    if streams is None:
        x = p.input("x", "s b h", **between)
        for _, made, write in sub_layers:
            x = p.add(made, x, write(p, x))
        p.result(x, **between)
        return p
    if streams.expands:
        p.input("given", "s b h", **between)
        x = p.multiply("x", "given", p.constant("each", "p"))
    else:
        x = p.input("x", "s b p h", **between)
    for name, made, write in sub_layers:
        x = _around(p, name, x, write, f"{made}.streams" if streams.contracts else made)
    if streams.contracts:
        x = p.multiply(sub_layers[-1][1], x, over="p")
    p.result(x, **between)
    return p


def _around(p: ProgramBuilder, name: str, x: str, write: SubLayer, made: str) -> str:
    """The streams ``x`` behind one sub-layer, under the name ``made``."""
    at = f"{name}_streams"
    p.parameter(f"{at}.weight", "p h p_gates")
    p.parameter(f"{at}.scale", "p_three")
    p.parameter(f"{at}.bias", "p_gates")
    p.multiply(f"{at}.plain", p.apply(f"{at}.normed", x, along="p h"), f"{at}.weight", over="p h")
    gates = p.apply(f"{at}.gates", f"{at}.plain", f"{at}.scale", f"{at}.bias", along="p_gates", drop="p_three")
    p.select(f"{at}.pre", gates, "p_gates", "p")
    p.select(f"{at}.post", gates, "p_gates", "p_to")
    p.split(f"{at}.matrix", p.select(f"{at}.plain_res", gates, "p_gates", "p_all"), "p_all", "p_to p")
    p.apply(f"{at}.res", f"{at}.matrix", along="p_to p")
    read = p.multiply(f"{at}.read", f"{at}.pre", x, over="p")
    p.multiply(f"{at}.mixed", f"{at}.res", x, over="p")
    p.multiply(f"{at}.written", f"{at}.post", write(p, read))
    return p.select(made, p.add(f"{at}.sum", f"{at}.mixed", f"{at}.written"), "p_to", "p")
