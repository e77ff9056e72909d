"""Importer of NeMo-RL's YAML configurations: the training of the policy on Megatron-Core.

``policy.megatron_cfg`` has attributes of Megatron-Core (NeMo-RL, commit 7ea279a: nemo_rl/models/megatron/setup.py).
The processes that train are those of ``cluster`` without the nodes that generate, the reward model's and the teachers'
(nemo_rl/algorithms/grpo.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pipeproof.diagnostics.finding import Location
from pipeproof.diagnostics.source import PlanFileError
from pipeproof.interop.importers.import_codes import UNREADABLE
from pipeproof.interop.importers.imported import Flags, Imported
from pipeproof.interop.importers.megatron.megatron_importer import import_arguments
from pipeproof.interop.importers.recipes.launcher_keys import LauncherSettings
from pipeproof.interop.importers.recipes.layered_yaml import LayeredYaml, read_layered

_MEGATRON: Final = ("policy", "megatron_cfg")
_OVERRIDES: Final = (*_MEGATRON, "model_overrides")
_SHOWN: Final = "policy.megatron_cfg."
_RECOMPUTE: Final = ("recompute_granularity", "recompute_modules")
_READ_BEFORE: Final = frozenset({"enabled", "activation_checkpointing", *_RECOMPUTE})
_OTHER_MODELS: Final = ("value", "teacher")
_RESOURCES: Final = ("policy", "generation", "colocated", "resources")
_TEACHERS: Final = ("on_policy_distillation", "non_colocated_teachers")
_PP: Final = "pipeline_model_parallel_size"


def import_nemo_rl(files: Sequence[Path], flags: Flags) -> Imported:
    """Import one YAML file of NeMo-RL, with its base files.

    Raises:
        PlanFileError: PP100 or PP170 if it cannot be read or its policy does not train on Megatron-Core, PP171 if
            Megatron-Core refuses the settings.
    """
    if len(files) != 1:
        message = f"a configuration of NeMo-RL is one YAML file, found {len(files)}"
        raise PlanFileError(UNREADABLE.finding(message))
    config = read_layered(files[0])
    settings = LauncherSettings("NeMo-RL", config.source)
    _require_megatron(config, settings)
    settings.read(config.section(*_MEGATRON), _SHOWN, elsewhere=_READ_BEFORE)
    settings.read(config.section(*_OVERRIDES), f"{_SHOWN}model_overrides.")
    _recomputation(config, settings)
    _batches(config, settings)
    _optimizer(config, settings)
    _other_parts(config, settings)
    settings.world_size = _world_size(config, settings)
    settings.public_depth(config.get("policy", "model_name"), flags)
    return import_arguments(settings.arguments(), flags)


def _require_megatron(config: LayeredYaml, settings: LauncherSettings) -> None:
    top = Location(config.source.file)
    if not config.names(*_MEGATRON):
        fix = "give the YAML configuration of NeMo-RL, or the kind of file that this is"
        settings.refuse("`policy.megatron_cfg`, which has the pipeline, is not in the file", top, fix)
    enabled = config.get(*_MEGATRON, "enabled")
    if enabled is None or enabled.value is not True:
        location = top if enabled is None else enabled.location
        settings.refuse("`policy.megatron_cfg.enabled` is not true: the policy trains without a pipeline", location)


def _recomputation(config: LayeredYaml, settings: LauncherSettings) -> None:
    """Set the flags of recomputation, whose other keys have an effect with ``activation_checkpointing`` only."""
    switch = config.get(*_MEGATRON, "activation_checkpointing")
    if switch is None or switch.value is not True:
        return
    settings.default("--recompute-granularity", "full", switch.location)
    settings.read({name: placed for name, placed in config.section(*_MEGATRON).items() if name in _RECOMPUTE}, _SHOWN)


def _batches(config: LayeredYaml, settings: LauncherSettings) -> None:
    for flag, name in (
        ("--global-batch-size", "train_global_batch_size"),
        ("--micro-batch-size", "train_micro_batch_size"),
        ("--seq-length", "max_total_sequence_length"),
    ):
        settings.take(flag, config.get("policy", name), f"policy.{name}")
    for name in ("sequence_packing", "dynamic_batching"):
        packing = config.get("policy", name, "enabled")
        if packing is not None and packing.value is True:
            why = f"not the number of micro-batches: with `policy.{name}`, they depend on the data"
            settings.unknown("--global-batch-size", why, packing.location)


def _optimizer(config: LayeredYaml, settings: LauncherSettings) -> None:
    optimizer = (*_MEGATRON, "optimizer")
    for flag, path in (
        ("--use-distributed-optimizer", (*optimizer, "use_distributed_optimizer")),
        ("--clip-grad", (*optimizer, "clip_grad")),
        ("--overlap-grad-reduce", (*_MEGATRON, "distributed_data_parallel_config", "overlap_grad_reduce")),
    ):
        settings.take(flag, config.get(*path), ".".join(path))
    precision = config.get("policy", "precision")
    if precision is not None and precision.value in ("bfloat16", "float16"):
        settings.switch("--bf16" if precision.value == "bfloat16" else "--fp16", precision.location)
    enabled = config.get(*_MEGATRON, "enabled")
    if enabled is not None:  # setup.py sets it for every training
        settings.switch("--calculate-per-token-loss", enabled.location)


def _other_parts(config: LayeredYaml, settings: LauncherSettings) -> None:
    """Note the pipelines of other models, and adapters."""
    for name in _OTHER_MODELS:
        pp = config.get(name, "megatron_cfg", _PP)
        enabled = config.value(name, "megatron_cfg", "enabled")
        if pp is not None and pp.value != 1 and enabled is True:
            settings.notes.append((f"the pipeline of `{name}` ({pp.value} ranks) is not checked", pp.location))
    adapters = config.get(*_MEGATRON, "peft", "enabled")
    if adapters is not None and adapters.value is True:
        settings.notes.append(("adapters are not described: all weights train here", adapters.location))


def _world_size(config: LayeredYaml, settings: LauncherSettings) -> int | None:
    """Return the processes that train the policy; None if the file does not have their number.

    Raises:
        PlanFileError: PP170, no node is left for the training.
    """
    nodes, gpus = config.value("cluster", "num_nodes"), config.value("cluster", "gpus_per_node")
    if type(nodes) is not int or type(gpus) is not int:
        return None
    all_nodes = nodes
    place = config.get("cluster", "num_nodes")
    reward = _reward_model(config)
    if all_nodes > 1:
        nodes -= reward[0]
    else:
        gpus -= reward[1]
    nodes -= _teacher_nodes(config)
    colocated = config.get("policy", "generation", "colocated", "enabled")
    if colocated is not None and colocated.value is False:
        resources = config.value(*_RESOURCES, "num_nodes"), config.value(*_RESOURCES, "gpus_per_node")
        if nodes == 1:
            gpus -= resources[1] if type(resources[1]) is int else 0
        else:
            nodes -= resources[0] if type(resources[0]) is int else 0
    if nodes < 1 or gpus < 1:
        location = Location(config.source.file) if place is None else place.location
        settings.refuse(
            f"no process is left for training: {max(nodes, 0)} nodes with {max(gpus, 0)} GPUs after those that "
            "generate and score", location, "raise `cluster.num_nodes`, or give `--world-size N`",
        )  # fmt: skip
    return nodes * gpus


def _reward_model(config: LayeredYaml) -> tuple[int, int]:
    """Return the nodes, and the GPUs of a node, of a reward model that is an environment of the data."""
    names = [config.value("data", *path, "env_name") for path in ((), ("train",), ("default",), ("validation",))]
    if "reward_model" not in names:
        return 0, 0
    nodes, gpus = (config.value("env", "reward_model", "resources", name) for name in ("num_nodes", "gpus_per_node"))
    return (nodes if type(nodes) is int else 0), (gpus if type(gpus) is int else 0)


def _teacher_nodes(config: LayeredYaml) -> int:
    """Return the nodes of teachers that do not share those of the policy; one checkpoint is one teacher."""
    if config.value(*_TEACHERS, "enabled") is not True:
        return 0
    teachers = {
        model.value: alias for alias, model in config.section(_TEACHERS[0], "teacher_model_by_agent_name").items()
    }
    default = config.value(*_TEACHERS, "default_teacher_cfg", "num_nodes")
    numbers = [config.value(*_TEACHERS, "teacher_overrides", alias, "num_nodes") for alias in teachers.values()]
    return sum(number if type(number) is int else default if type(default) is int else 1 for number in numbers)
