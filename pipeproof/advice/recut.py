"""What stages would take if the same layers were cut into another number of stages.

A plan has times of its stages, not of its layers. So an assumption is made: a
stage's time lies evenly on its transformer blocks, wherever it is computed.
The first and the last stage have the embedding and the head beside them: what
they take above the mean of the other stages, block for block, is theirs. What
a stage takes is thereby given to its layers to the last fraction, so that no
cut changes the total.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

from pipeproof.stages.describe.order import is_empty

Stages = tuple[tuple[str, ...], ...]
"""Names of the layers of each stage."""


def is_block(layer: str) -> bool:
    """Whether a layer is a transformer block, rather than the embedding, the last norm or the head."""
    return layer.startswith("layer.")


def _with_work(stage: Sequence[str]) -> list[str]:
    """The layers of a stage without empty ones, which take no time; all of them where there are no others."""
    return [name for name in stage if not is_empty(name)] or list(stage)


def num_blocks(stage: Sequence[str]) -> int:
    """Transformer blocks of a stage."""
    return sum(map(is_block, stage))


def layer_times(stages: Stages, times: Sequence[Fraction]) -> dict[str, Fraction]:
    """The time of each layer, from the times of the stages that it was measured in.

    Raises:
        ValueError: a stage has no layer to put its time on.
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
    """A stage's time on its layers; ``usual`` is what a block takes where nothing but blocks stands."""
    blocks = [name for name in names if is_block(name)]
    others = [name for name in names if not is_block(name)]
    if not blocks:
        return dict.fromkeys(others, time / len(others))
    above = time - usual * len(blocks) if others and usual is not None else Fraction(0)
    above = max(above, Fraction(0))
    carriers = [name for name in others if name != "norm"] or others  # a norm is nothing beside a head
    return {
        **dict.fromkeys(blocks, (time - above) / len(blocks)),
        **dict.fromkeys(others, Fraction(0)),
        **dict.fromkeys(carriers, above / len(carriers) if carriers else Fraction(0)),
    }


def stage_times(stages: Stages, layers: Mapping[str, Fraction]) -> tuple[Fraction, ...]:
    """The time of each stage of a cut, from the times of its layers."""
    return tuple(sum((layers[name] for name in names), Fraction(0)) for names in stages)
