"""Times of stages after a cut of the same layers into another number of stages.

A plan has times of its stages, not of its layers. The assumption is that the
time of a stage is spread evenly over its transformer blocks. The first and the
last stage also have the embedding and the head: their additional time, compared
with the mean per block of the other stages, belongs to embedding and head. The whole
time of a stage is distributed over its layers, and no cut changes the total.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

from pipeproof.stages.describe.layer import is_empty

Stages = tuple[tuple[str, ...], ...]
"""Names of the layers of each stage."""


def is_block(layer: str) -> bool:
    """True for a transformer block; false for the embedding, the last norm and the head."""
    return layer.startswith("layer.")


def _with_work(stage: Sequence[str]) -> list[str]:
    """The layers of a stage that take time: without empty layers and a norm next to blocks; or else all."""
    without = {"norm"} if any(map(is_block, stage)) else set()
    return [name for name in stage if not (is_empty(name) or name in without)] or list(stage)


def num_blocks(stage: Sequence[str]) -> int:
    """Transformer blocks of a stage."""
    return sum(map(is_block, stage))


def layer_times(stages: Stages, times: Sequence[Fraction]) -> dict[str, Fraction]:
    """The time of each layer, from the measured times of the stages.

    Raises:
        ValueError: a stage has a time and no layer.
    """
    inner = [stage for stage, names in enumerate(stages) if names and all(map(is_block, _with_work(names)))]
    blocks = sum(num_blocks(stages[stage]) for stage in inner)
    usual = sum((times[stage] for stage in inner), Fraction(0)) / blocks if blocks else None
    result: dict[str, Fraction] = {}
    for stage, names in enumerate(stages):
        if not names:
            raise ValueError(f"stage {stage} has a time and no layers")
        result |= {**dict.fromkeys(names, Fraction(0)), **_shared_out(_with_work(names), times[stage], usual)}
    return result


def _shared_out(names: Sequence[str], time: Fraction, usual: Fraction | None) -> Mapping[str, Fraction]:
    """Time of a stage distributed over its layers; ``usual`` is the time of a block in stages with only blocks."""
    blocks = [name for name in names if is_block(name)]
    others = [name for name in names if not is_block(name)]
    if not blocks:
        return dict.fromkeys(others, time / len(others))
    above = time - usual * len(blocks) if others and usual is not None else Fraction(0)
    above = max(above, Fraction(0))
    return {
        **dict.fromkeys(blocks, (time - above) / len(blocks)),
        **dict.fromkeys(others, above / len(others) if others else Fraction(0)),
    }


def stage_times(stages: Stages, layers: Mapping[str, Fraction]) -> tuple[Fraction, ...]:
    """The time of each stage of a cut, from the times of its layers."""
    return tuple(sum((layers[name] for name in names), Fraction(0)) for names in stages)
