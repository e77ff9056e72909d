"""Partition of the layers into stages: listed, even, or as Fleet's ``PipelineLayer`` does it.

Fleet's ``seg_method``: ``SegmentLayers`` in
python/paddle/distributed/fleet/meta_parallel/parallel_layers/pp_layers.py.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from pipeproof.diagnostics.finding import BadPlanAtError, RuleDoc
from pipeproof.diagnostics.problems import listed, names_text, nearest_name
from pipeproof.specs.plan import PlanSpec
from pipeproof.specs.plan_sections import BY_CLASS, UNIFORM
from pipeproof.stages.describe.layer import CLASS_NAMES, counts_in_even_cut, layer_order, layer_prefix

TOO_FEW_LAYERS = RuleDoc(
    code="PP110",
    title="fewer layers than stages",
    explanation=(
        "Without `stages` the transformer layers and the empty layers are divided evenly, at least one per stage. "
        "`stages: uniform` divides all layers. With fewer layers than stages, a stage would be empty."
    ),
    wrong="model: {num_layers: 2}\ntopology: {pp: 4}",
    right="model: {num_layers: 4}\ntopology: {pp: 4}",
)
UNKNOWN_LAYER = RuleDoc(
    code="PP111",
    title="`stages` names a layer that the model does not have",
    explanation=(
        "The layers of a GPT are `embed`, `layer.0` to `layer.(num_layers - 1)`, `norm` and `head`, and "
        "`empty.0` and so on if `model.empty_layers` is set."
    ),
    wrong="model: {num_layers: 2}\nstages: [[embed, layer0], [layer.1, norm, head]]",
    right="model: {num_layers: 2}\nstages: [[embed, layer.0], [layer.1, norm, head]]",
)
UNEVEN_MATCHES = RuleDoc(
    code="PP143",
    title="the layers that `stages: layer:REGEX` counts do not divide into the stages",
    explanation=(
        "The pattern is matched against the class names of PaddleFleet's layers. Each stage gets the same number of "
        "matching layers. If that is not possible, Fleet refuses to build the model. `model.empty_layers` adds the "
        "missing layers."
    ),
    wrong="model: {num_layers: 3}\ntopology: {pp: 2}\nstages: layer:TransformerLayer",
    right=(
        "model: {num_layers: 3, empty_layers: {tail: 1}}\ntopology: {pp: 2}\nstages: layer:TransformerLayer|EmptyLayer"
    ),
)
PARTITION_CODES = (TOO_FEW_LAYERS, UNKNOWN_LAYER, UNEVEN_MATCHES)


def gpt_stages(plan: PlanSpec) -> tuple[tuple[str, ...], ...]:
    """Layer names by global stage: as listed in ``stages``, else an even partition.

    The even partition counts transformer layers and empty layers. The earliest stages get the remainder of the
    division, one layer each (the last stage already has the work of the head). Every stage ends directly after its last
    counted layer. Layers that do not count belong to the stage of the next counted layer, after the last one to the
    last stage.

    Raises:
        BadPlanAtError: PP110, fewer layers than stages; PP111, ``stages`` names an unknown layer; PP143, the layers
            that ``layer:REGEX`` matches do not divide into the stages.
    """
    names = layer_order(plan.gpt)
    if plan.stages is None:
        return _even_cut(plan, names)
    if plan.stages == UNIFORM:
        _require_enough(plan, names, "layers")
        return uniform_cut(names, plan.num_stages)
    if isinstance(plan.stages, str):
        return _cut_by_class(plan, names, plan.stages.removeprefix(BY_CLASS))
    _require_known(plan.stages, names, _closest, "the model", names_text(names))
    return plan.stages


def _closest(name: str, names: Sequence[str]) -> str | None:
    return next(iter(difflib.get_close_matches(name, names, n=1)), None)


def _require_known(
    stages: Sequence[Sequence[str]],
    layer_names: Sequence[str],
    nearest: Callable[[str, Sequence[str]], str | None],
    owner: str,
    layers_text: str,
) -> None:
    for stage, names in enumerate(stages):
        for index, name in enumerate(names):
            if name not in layer_names:
                near = nearest(name, layer_names)
                hint = f"did you mean `{near}`? " if near else ""
                message = f"stage {stage} names the layer `{name}`, which {owner} does not have"
                fix = f"{hint}the layers are {layers_text}"
                raise BadPlanAtError(UNKNOWN_LAYER.finding(message, help=fix), ("stages", stage, index))


def _even_cut(plan: PlanSpec, names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    counted = [counts_in_even_cut(name) for name in names]
    _require_enough(
        plan,
        [name for name in names if counts_in_even_cut(name)],
        "transformer and empty layers" if any(plan.gpt.num_empty) else "transformer layers",
    )
    return cut_behind(names, counted, even_shares(sum(counted), plan.num_stages))


def _require_enough(plan: PlanSpec, names: Sequence[str], layer_text: str) -> None:
    if len(names) < plan.num_stages:
        message = (
            f"{len(names)} {layer_text} cannot be cut evenly onto {plan.num_stages} stages: a stage would be empty"
        )
        raise _too_few_layers(plan, len(names), message, "list the layers of each stage under `stages`")


def _too_few_layers(plan: PlanSpec, number: int, message: str, alternative: str) -> BadPlanAtError:
    """PP110 at the key that makes too many stages: the number of chunks, or of ranks, that leaves each one a layer."""
    schedule = plan.schedule
    path: tuple[str, ...] = ("topology", "pp")
    pp, chunks = plan.topology.pp, schedule.num_chunks
    if isinstance(schedule.placement, tuple):
        path, fix = ("schedule", "placement"), f"place at most {number} stages"
    elif plan.modules:
        path, fix = ("modules",), f"give the modules at most {number} stages"
    elif number // chunks and chunks <= max(2, number // pp):
        fix = f"set topology.pp to at most {number // chunks}"
    elif pp <= number:
        path, fix = ("schedule", "num_chunks"), f"set schedule.num_chunks to at most {number // pp}"
    else:
        fix = f"set topology.pp to at most {number} and schedule.num_chunks to 1"
    return BadPlanAtError(TOO_FEW_LAYERS.finding(message, help=f"{fix}, or {alternative}"), path)


def _cut_by_class(plan: PlanSpec, names: Sequence[str], pattern: str) -> tuple[tuple[str, ...], ...]:
    classes = [CLASS_NAMES[layer_prefix(name)] for name in names]
    counted = [is_matched(pattern, class_name) for class_name in classes]
    number, num_stages = sum(counted), plan.num_stages
    if number and number % num_stages == 0:
        return cut_behind(names, counted, even_shares(number, num_stages))
    if not number:
        message = f"`{pattern}` matches the class of no layer of the model"
        fix = f"the classes are {listed(list(dict.fromkeys(classes)), 'and')}"
    else:
        message = f"`{pattern}` matches {number} layers, which do not divide into {num_stages} stages"
        missing = -number % num_stages
        fix = f"count {missing} more, as `model.empty_layers` and `EmptyLayer` in the pattern do, or list the stages"
    raise BadPlanAtError(UNEVEN_MATCHES.finding(message, help=fix), ("stages",))


def custom_stages(plan: PlanSpec) -> tuple[tuple[str, ...], ...]:
    """Names of custom layers by global stage: as listed in ``stages``, else evenly, the remainder to early stages.

    Raises:
        BadPlanAtError: PP110, fewer layers than stages; PP111, ``stages`` names a layer that is not declared.
    """
    names = [layer.name for layer in plan.custom.layers]
    if plan.stages is not None:
        assert not isinstance(plan.stages, str), "refused when the plan is read"
        _require_known(plan.stages, names, nearest_name, "model.layers", ", ".join(names))
        return plan.stages
    if len(names) < plan.num_stages:
        message = f"{len(names)} layers cannot be cut onto {plan.num_stages} stages: a stage would be empty"
        raise _too_few_layers(plan, len(names), message, "declare more layers")
    return _between(names, [0, *accumulate(even_shares(len(names), plan.num_stages))])


def cut_behind(names: Sequence[str], is_counted: Sequence[bool], shares: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """Divide layers into parts with ``shares`` counted layers each, in order.

    Each part ends directly after its last counted layer. Layers before the first counted layer belong to the first
    part, layers after the last one to the last part. The shares are positive and add up to the number of counted
    layers.
    """
    counted_at = [index for index, counted in enumerate(is_counted) if counted]
    assert sum(shares) == len(counted_at)
    assert min(shares) > 0
    ends = [counted_at[last - 1] + 1 for last in accumulate(shares)]
    return _between(names, [0, *ends[:-1], len(names)])


def even_shares(number: int, num_parts: int) -> list[int]:
    """Divide ``number`` evenly; the first parts get the remainder, one each."""
    share, remainder = divmod(number, num_parts)
    return [share + (part < remainder) for part in range(num_parts)]


def uniform_cut(names: Sequence[str], num_parts: int) -> tuple[tuple[str, ...], ...]:
    """Divide all layers evenly; the last parts get the remainder, one each: Fleet's ``uniform``."""
    return _between(names, [0, *accumulate(reversed(even_shares(len(names), num_parts)))])


def is_matched(pattern: str, class_name: str) -> bool:
    """True if Fleet counts a layer of that class: the pattern matches anywhere in its name, in any case."""
    return re.search(pattern, class_name, re.IGNORECASE) is not None


def _between(names: Sequence[str], bounds: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(names[first:end]) for first, end in pairwise(bounds))
