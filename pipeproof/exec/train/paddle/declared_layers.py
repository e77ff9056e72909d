"""A plan that declares its layers one by one: its partition, and its names of the script's weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import paddle

from pipeproof.exec.train.paddle.stage_layers import StageLayers, trained
from pipeproof.exec.train.train_errors import PipelineError

Tensor: TypeAlias = paddle.Tensor


def declared_entries(skeleton: Mapping[str, Any], num_stages: int, num_entries: int) -> list[int] | None:
    """The first entry of each stage by the names in the plan's ``stages``, and the number of entries.

    None if the plan names none.

    Raises:
        PipelineError: the plan has other layers than the list.
    """
    stages, layers = skeleton.get("stages"), skeleton["model"].get("layers")
    if not isinstance(stages, list | tuple):
        return None
    sizes = [len(names) for names in stages]
    if len(stages) != num_stages or sum(sizes) != num_entries:
        raise PipelineError(
            f"the plan's `stages` have {sum(sizes)} layers in {len(stages)} stages, and the list has {num_entries} "
            f"layers for {num_stages} stages"
        )
    if layers and [layer["name"] for layer in layers] != [name for names in stages for name in names]:
        raise PipelineError("the plan's `stages` name other layers than its model, or in another order")
    parts = [0]
    for size in sizes:
        parts.append(parts[-1] + size)
    return parts


def declared_names(stages: StageLayers, number: int, skeleton: Mapping[str, Any]) -> dict[str, Tensor] | None:
    """The weights of a stage by the names of a plan that declares every entry; None if it declares none.

    Raises:
        PipelineError: the plan has neither one layer for each entry nor one for each stage.
    """
    layers = skeleton["model"].get("layers")
    num_stages = len(stages.parts) - 1
    if not layers or (len(layers) == num_stages and stages.parts[-1] != num_stages):
        return None
    if len(layers) != stages.parts[-1]:
        raise PipelineError(
            f"the plan declares {len(layers)} layers, and the script has {stages.parts[-1]} in {num_stages} stages"
        )
    owners = {f"{layer['name']}.{weight['name']}" for layer in layers for weight in layer.get("parameters", ())}
    named: dict[str, Tensor] = {}
    for item in stages.items(number):
        layer = layers[item.position]
        borrowed = list(layer.get("borrows", ()))
        for name, weight in trained(item.module).items():
            full = f"{layer['name']}.{name}"
            if full not in owners and name in item.shared and borrowed:
                full = borrowed[[*item.shared].index(name)]
            named[full] = weight
    return named
