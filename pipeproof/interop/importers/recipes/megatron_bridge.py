"""Importer of Megatron-Bridge and NeMo recipes: Python functions that build a configuration, read and not run.

A recipe is a function without required arguments that returns a ``ConfigContainer`` (Megatron-Bridge, commit 067f987:
src/megatron/bridge/recipes). Functions and classes that it uses are read where their files are found.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from pipeproof.diagnostics.finding import Location
from pipeproof.diagnostics.source import PlanFileError
from pipeproof.interop.importers.import_codes import UNREADABLE
from pipeproof.interop.importers.imported import Flags, Imported
from pipeproof.interop.importers.megatron.flag_values import Arguments, Setting
from pipeproof.interop.importers.megatron.megatron_importer import import_arguments
from pipeproof.interop.importers.megatron.stage_flags import CHUNKS, LAYOUT
from pipeproof.interop.importers.recipes.megatron_settings import (
    MODEL_FLAGS,
    OVERLAP_FLAGS,
    plain_setting,
    settings_of,
)
from pipeproof.interop.importers.recipes.modules import Module, Modules
from pipeproof.interop.importers.recipes.public_checkpoints import depth_of
from pipeproof.interop.importers.recipes.recipe_choice import chosen_recipe, factories_of
from pipeproof.interop.importers.recipes.static_python import Evaluator
from pipeproof.interop.importers.recipes.static_values import Placed, Record, Unknown

_NUM_GPUS: Final = re.compile(r"_(\d{1,6})gpus?_")


def recipes_of(module: Module) -> tuple[str, ...]:
    """Return the names of the functions of a module that can be recipes: public, and called without arguments."""
    return factories_of(module, _returns_recipe)


def _returns_recipe(node: ast.FunctionDef) -> bool:
    returned = ast.unparse(node.returns) if node.returns is not None else ""
    return returned.endswith("ConfigContainer") or node.name.endswith(("_config", "_recipe"))


def import_megatron_bridge(files: Sequence[Path], flags: Flags) -> Imported:
    """Import one recipe of a Python file: the one that ``flags.recipe`` names, or its only one.

    Raises:
        PlanFileError: PP100 or PP170 if it cannot be read or its parallelism is not known without running it, PP171 if
            Megatron-Core refuses the settings.
    """
    if len(files) != 1:
        message = f"a recipe is in one Python file, found {len(files)}"
        raise PlanFileError(UNREADABLE.finding(message))
    modules = Modules()
    module = modules.read(files[0])
    name = chosen_recipe(module, recipes_of(module), flags)
    node = module.definitions[name]
    evaluator = Evaluator(modules)
    config = evaluator.result(module, name)
    if not isinstance(config, Record):
        why = config.why if isinstance(config, Unknown) else "no configuration"
        evaluator.refuse(f"what `{name}` returns is not known without running it: {why}", module, node)
    model = config.get("model")
    if model is None or not isinstance(model.value, Record):
        evaluator.refuse(
            f"`{name}` begins with `{config.name}()`, which gives no `model` that can be read",
            module, node, "give the file inside of a checkout of its package, or install the package",
        )  # fmt: skip
    settings = {setting.name: setting for setting in _settings(config, model.value, module.location(node))}
    if LAYOUT in settings:
        settings.pop(CHUNKS, None)
    _require_depth(modules, model, settings, flags)
    gpus = _NUM_GPUS.search(name)
    arguments = Arguments(
        module.file, module.lines, settings, {}, world_size=int(gpus[1]) if gpus else None, has_all=True
    )
    return import_arguments(arguments, flags)


def _require_depth(modules: Modules, model: Placed, settings: dict[str, Setting], flags: Flags) -> None:
    """Refuse a pipeline of an unknown number of blocks: an assumed number would decide whether they divide.

    Raises:
        PlanFileError: PP170.
    """
    is_known = "--num-layers" in settings or ("model", "num_layers") in flags.settings or flags.model_config is not None
    pp = settings.get("--pipeline-model-parallel-size")
    if is_known or pp is None or pp.value == "1":
        return
    names = [argument for argument in model.value.arguments if isinstance(argument, str)]
    named = f"of `{names[0]}` " if names else ""
    modules.refuse(
        f"the number of blocks {named}is not in the recipe, and decides whether they divide over the pipeline",
        model.location, "give it with `--set model.num_layers=N`, or `--model-config FILE`",
    )  # fmt: skip


def _settings(config: Record, model: Record, recipe: Location) -> Iterator[Setting]:
    """Yield the flags of Megatron-LM that mean the same as the configuration."""
    sequence = config.get("dataset", "seq_length") or config.get("dataset", "sequence_length")
    yield from plain_setting("--seq-length", sequence, "cfg.dataset.seq_length")
    yield from _known_depth(model)
    yield from settings_of(iter(model.attributes.items()), MODEL_FLAGS, "cfg.model.")
    shared = config_value(model, "share_embeddings_and_output_weights")
    if shared is not None and shared.value is False:
        yield Setting("--untie-embeddings-and-output-weights", (), shared.location, shared.location)
    for name in ("global_batch_size", "micro_batch_size"):
        yield from plain_setting(f"--{name.replace('_', '-')}", config.get("train", name), f"cfg.train.{name}")
    for name in ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"):
        yield from plain_setting(f"--{name.replace('_', '-')}", config.get("ddp", name), f"cfg.ddp.{name}")
    yield from plain_setting("--ddp-bucket-size", config.get("ddp", "bucket_size"), "cfg.ddp.bucket_size")
    overlap = config.get("comm_overlap")
    if overlap is not None and isinstance(overlap.value, Record):
        yield from settings_of(iter(overlap.value.attributes.items()), OVERLAP_FLAGS, "cfg.comm_overlap.")
    yield from _precision(config, recipe)


def config_value(model: Record, name: str) -> Placed | None:
    """Return an attribute that is set to a literal."""
    placed = model.get(name)
    return None if placed is None or isinstance(placed.value, Record | Unknown) else placed


def _known_depth(model: Record) -> Iterator[Setting]:
    """Yield ``--num-layers`` of a public checkpoint that the model is made from."""
    names: list[Any] = [argument for argument in model.arguments if isinstance(argument, str)]
    depth = next((depth for depth in map(depth_of, names) if depth is not None), None)
    if depth is not None:
        yield Setting("--num-layers", (str(depth),), model.location, model.location)


def _precision(config: Record, recipe: Location) -> Iterator[Setting]:
    """Yield the type of weights: bfloat16, unless the configuration names float16."""
    placed = config.get("mixed_precision")
    text = "bf16"
    if placed is not None:
        text = placed.value if isinstance(placed.value, str) else getattr(placed.value, "name", text)
    location = recipe if placed is None else placed.location
    yield Setting("--fp16" if "fp16" in text else "--bf16", (), location, location)
