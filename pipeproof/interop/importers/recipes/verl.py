"""Importer of shell scripts that start verl with the Megatron backend: overrides such as ``a.b.c=value``.

Keys below ``actor_rollout_ref.actor.megatron`` (or ``engine``, for supervised fine-tuning) are attributes of
Megatron-Core. Defaults are those of verl/trainer/config, and the settings that its workers add those of
verl/workers/megatron_workers.py (verl, commit b178a3c).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pipeproof.diagnostics.finding import Location
from pipeproof.diagnostics.source import PlanFileError, read_text
from pipeproof.interop.importers.import_codes import UNREADABLE
from pipeproof.interop.importers.imported import Flags, Imported
from pipeproof.interop.importers.megatron.flag_values import require_evaluated, script_of
from pipeproof.interop.importers.megatron.launch_script import Argument
from pipeproof.interop.importers.megatron.megatron_importer import import_arguments
from pipeproof.interop.importers.recipes.launcher_keys import LauncherSettings
from pipeproof.interop.importers.recipes.layered_yaml import Placed, Unknown, literal

_OVERRIDE: Final = re.compile(r"[+~]*([A-Za-z_][\w.@/]*)=(.*)", re.DOTALL)
_ACTOR, _ENGINE = "actor_rollout_ref.actor.megatron.", "engine."
_OTHER_MODELS: Final = ("actor_rollout_ref.ref.megatron.", "critic.megatron.")
_SUBSECTIONS: Final = ("override_transformer_config.", "override_ddp_config.", "override_mcore_model_config.")
_OWN: Final = frozenset(
    {
        "param_offload", "grad_offload", "optimizer_offload", "use_dist_checkpointing", "dist_checkpointing_path",
        "dist_checkpointing_prefix", "seed", "use_mbridge", "vanilla_mbridge", "use_remove_padding", "forward_only",
        "strategy", "load_weight", "dtype",
    }
)  # fmt: skip
"""Keys of verl's own McoreEngineConfig and McoreActorConfig (verl/workers/config) that no flag of Megatron-LM has."""
DIRECTORIES: Final = {"HOME": "~", "RAY_DATA_HOME": "~"}
_PP: Final = "pipeline_model_parallel_size"
_DEFAULT_SEQUENCE, _DEFAULT_BATCH, _DEFAULT_GPUS = 512, 256, 8
_PER_NODE: Final = re.compile(r"--nproc[-_]per[-_]node(?:=(\d+))?")
_NODES: Final = re.compile(r"--nnodes(?:=(\d+))?")


def import_verl(files: Sequence[Path], flags: Flags) -> Imported:
    """Import one shell script that starts verl.

    Raises:
        PlanFileError: PP100 or PP170 if it cannot be read or has no settings of the Megatron backend, PP171 if
            Megatron-Core refuses the settings.
    """
    if len(files) != 1:
        message = f"a training of verl is one shell script, found {len(files)}"
        raise PlanFileError(UNREADABLE.finding(message))
    name = str(files[0])
    script, source = script_of(read_text(name), name, DIRECTORIES)
    settings = LauncherSettings("verl", source)
    command = max(script.commands, key=lambda words: len(_megatron_keys(_overrides(words))), default=())
    overrides = _overrides(command)
    if not _megatron_keys(overrides):
        settings.refuse(
            f"no command here sets keys of verl's Megatron backend, such as `{_ACTOR}{_PP}=2`", Location(source.file),
            "give the script that starts the training",
        )  # fmt: skip
    require_evaluated(command, source)
    job = _Job(settings, overrides, command)
    job.read(flags)
    return import_arguments(settings.arguments(), flags)


def _overrides(command: Sequence[Argument]) -> dict[str, Placed]:
    """Return the keys of a command that are overridden; the last of each wins."""
    values: dict[str, Placed] = {}
    for argument in command:
        match = _OVERRIDE.fullmatch(argument.text if argument.text is not None else argument.start)
        if match is not None:
            is_known = argument.text is not None
            value = literal(match[2]) if is_known else Unknown(argument.why, argument.location)
            values[match[1]] = Placed(value, argument.location)
    return values


def _megatron_keys(overrides: Mapping[str, Placed]) -> tuple[str, ...]:
    return tuple(key for key in overrides if key.startswith(_ACTOR)) or tuple(
        key for key in overrides if key.startswith(_ENGINE) and "parallel_size" in key
    )


class _Job:
    """The overrides of a command, and the settings of its training."""

    def __init__(
        self, settings: LauncherSettings, overrides: Mapping[str, Placed], command: Sequence[Argument]
    ) -> None:
        self._settings = settings
        self._overrides = overrides
        self._command = command
        self._top = command[0].location
        self._is_actor = any(key.startswith(_ACTOR) for key in overrides)
        self._shown = _ACTOR if self._is_actor else _ENGINE
        self._read_keys: set[str] = set()

    def read(self, flags: Flags) -> None:
        """Set the flags of the training."""
        settings = self._settings
        dtype = self._get(f"{self._shown}dtype")
        settings.switch("--fp16" if dtype is not None and dtype.value == "float16" else "--bf16", self._top)
        settings.switch("--variable-seq-lengths", self._top)
        self._sections()
        self._batches()
        settings.world_size = self._world_size()
        settings.public_depth(self._get("actor_rollout_ref.model.path" if self._is_actor else "model.path"), flags)
        for other in _OTHER_MODELS:
            pp = self._get(f"{other}{_PP}")
            if pp is not None and pp.value != 1:
                settings.notes.append((f"the pipeline of `{other.rstrip('.')}` is not checked", pp.location))
        rest = [key for key in self._overrides if key not in self._read_keys and not key.startswith(_OTHER_MODELS)]
        if rest:
            note = f"{len(rest)} settings outside of `{self._shown.rstrip('.')}` are not read"
            settings.notes.append((note, self._overrides[rest[0]].location))

    def _get(self, key: str) -> Placed | None:
        self._read_keys.add(key)
        return self._overrides.get(key)

    def _sections(self) -> None:
        """Read the keys of the backend, and those that it passes on to Megatron-Core."""
        sections: dict[str, dict[str, Placed]] = {"": {}, **{name: {} for name in _SUBSECTIONS}}
        for key, placed in self._overrides.items():
            if not key.startswith(self._shown):
                continue
            self._read_keys.add(key)
            rest = key.removeprefix(self._shown)
            section = next((name for name in _SUBSECTIONS if rest.startswith(name)), "")
            sections[section][rest.removeprefix(section)] = placed
        for flag in ("sequence_parallel", "use_distributed_optimizer"):
            if flag not in sections[""]:
                self._settings.switch(f"--{flag.replace('_', '-')}", self._top)
        for name, values in sections.items():
            self._settings.read(values, f"{self._shown}{name}", elsewhere=() if name else _OWN)

    def _number(self, key: str, default: int) -> int | None:
        """Return an integer, or its default; None if only a run determines it."""
        placed = self._get(key)
        value: Any = default if placed is None else placed.value
        if isinstance(value, Unknown):
            return None
        if type(value) is not int or value < 0:
            location = self._top if placed is None else placed.location
            self._settings.refuse(f"`{key}` needs an integer, found `{value}`", location)
        return value

    def _batches(self) -> None:
        if self._is_actor:
            actor = "actor_rollout_ref.actor."
            size, per_gpu, dynamic = f"{actor}ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "use_dynamic_bsz"
            micro, batch, copies = self._get(f"{actor}{per_gpu}"), self._number(size, _DEFAULT_BATCH), 1
            rollouts = self._number("actor_rollout_ref.rollout.n", 1)
            lengths = [self._number(f"data.max_{part}_length", _DEFAULT_SEQUENCE) for part in ("prompt", "response")]
            copies = rollouts if rollouts is not None else 0
            by_tokens = self._get(f"{actor}{dynamic}")
        else:
            size, copies = "data.train_batch_size", 1
            micro, batch = self._get("data.micro_batch_size_per_gpu"), self._number(size, _DEFAULT_BATCH)
            lengths = [self._number("data.max_length", 2 * _DEFAULT_SEQUENCE)]
            by_tokens = self._get("data.use_dynamic_bsz")
        settings = self._settings
        if None not in lengths:
            settings.default("--seq-length", sum(length or 0 for length in lengths), self._top)
        settings.take("--micro-batch-size", micro, "micro_batch_size_per_gpu")
        if by_tokens is not None and by_tokens.value is True:
            why = "not the number of micro-batches: with `use_dynamic_bsz`, it depends on the lengths of the data"
            settings.unknown("--global-batch-size", why, by_tokens.location)
        elif batch and copies:
            placed = self._get(size)
            settings.default("--global-batch-size", batch * copies, self._top if placed is None else placed.location)

    def _world_size(self) -> int | None:
        """Return the processes that train: those of `trainer`, or of torchrun."""
        if self._is_actor:
            nodes, gpus = self._number("trainer.nnodes", 1), self._number("trainer.n_gpus_per_node", _DEFAULT_GPUS)
        else:
            nodes, gpus = self._launched(_NODES, 1), self._launched(_PER_NODE, None)
        return None if nodes is None or gpus is None else nodes * gpus or None

    def _launched(self, pattern: re.Pattern[str], default: int | None) -> int | None:
        for word, following in zip(self._command, (*self._command[1:], None), strict=True):
            match = pattern.fullmatch(word.text or "")
            if match is not None:
                text = match[1] or (following.text if following is not None else None) or ""
                return int(text) if text.isdecimal() and len(text) < _LONGEST_NUMBER else None
        return default


_LONGEST_NUMBER: Final = 9
