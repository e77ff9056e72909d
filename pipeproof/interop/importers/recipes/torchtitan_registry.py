"""Configurations of torchtitan in Python: functions of a ``config_registry.py``, read and not run.

A function without arguments returns a ``Trainer.Config`` (torchtitan, commit b5bcd76:
torchtitan/models/llama3/config_registry.py). Its parts are the sections that torchtitan's TOML files had.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Final

from pipeproof.diagnostics.finding import Location
from pipeproof.interop.importers.imported import Flags
from pipeproof.interop.importers.recipes.modules import Module, Modules
from pipeproof.interop.importers.recipes.public_checkpoints import depth_of
from pipeproof.interop.importers.recipes.recipe_choice import chosen_recipe, factories_of
from pipeproof.interop.importers.recipes.static_python import Evaluator
from pipeproof.interop.importers.recipes.static_values import Placed, Record, Unknown, is_known
from pipeproof.interop.importers.sectioned_file import SectionedFile

_SECTIONS: Final = ("parallelism", "training")
_RECOMPUTATION: Final = (("Selective", "selective"), ("Full", "full"), ("None", "none"))
_DEGREE: Final = "pipeline_parallel_degree"


def recipes_of(module: Module) -> tuple[str, ...]:
    """Return the names of the functions of a module that return a configuration, without arguments."""
    return factories_of(module, _returns_config)


def _returns_config(node: ast.FunctionDef) -> bool:
    return node.returns is not None and ast.unparse(node.returns).strip("'\"").endswith("Config")


def read_registry(path: Path, flags: Flags, needed: Collection[str]) -> SectionedFile:
    """Read the function that ``flags.recipe`` names as sections; ``needed`` are keys whose value must be known.

    Raises:
        PlanFileError: PP100 or PP170, the file cannot be read, or a value that is needed is not known without a run.
    """
    modules = Modules()
    module = modules.read(path)
    name = chosen_recipe(module, recipes_of(module), flags)
    node = module.definitions[name]
    evaluator = Evaluator(modules)
    config = evaluator.result(module, name)
    if not isinstance(config, Record) or not {*_SECTIONS, "model_spec"}.intersection(config.attributes):
        why = (
            config.why if isinstance(config, Unknown) else "it has no `parallelism` and no `training` that can be read"
        )
        evaluator.refuse(
            f"the configuration that `{name}` returns is not known without running it: {why}", module, node,
            "give the file inside of a checkout of torchtitan",
        )  # fmt: skip
    data: dict[str, dict[str, Any]] = {"parallelism": {}, "training": {}, "model": {}, "activation_checkpoint": {}}
    locations: dict[tuple[str, str], Location] = {(section, ""): module.location(node) for section in data}
    for section, key, placed in (*_settings(config), *_model(config), *_recomputation(config)):
        if isinstance(placed.value, Unknown):
            if key in needed:
                modules.refuse(f"`{section}.{key}` is {placed.value.why}", placed.location)
            continue
        if placed.value is not None and is_known(placed.value):
            data[section][key] = placed.value
            locations[section, key] = placed.location
    return SectionedFile(module.file, module.lines, data, locations)


def _settings(config: Record) -> Iterator[tuple[str, str, Placed]]:
    for section in _SECTIONS:
        part = config.get(section)
        if part is None:
            continue
        if isinstance(part.value, Record):
            yield from ((section, key, placed) for key, placed in part.value.attributes.items())
        elif isinstance(part.value, Unknown):
            yield section, _DEGREE, part


def _model(config: Record) -> Iterator[tuple[str, str, Placed]]:
    """Yield the name of the model, and its number of blocks: its list of layers, else that of a public checkpoint."""
    name = config.get("model_spec", "name")
    if name is not None:
        yield "model", "name", name
    layers, assets = config.get("model_spec", "model", "layers"), config.get("hf_assets_path")
    if layers is not None and isinstance(layers.value, list) and not any(isinstance(x, Unknown) for x in layers.value):
        yield "model", "num_layers", Placed(len(layers.value), layers.location)
    elif assets is not None and isinstance(assets.value, str):
        yield "model", "num_layers", Placed(depth_of(assets.value), assets.location)


def _recomputation(config: Record) -> Iterator[tuple[str, str, Placed]]:
    part = config.get("activation_checkpoint")
    if part is None:
        return
    if part.value is None:
        yield "activation_checkpoint", "mode", Placed("none", part.location)
    elif isinstance(part.value, Record):
        modes = (mode for start, mode in _RECOMPUTATION if part.value.name.startswith(start))
        yield "activation_checkpoint", "mode", Placed(next(modes, None), part.location)
