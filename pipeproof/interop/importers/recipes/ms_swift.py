"""Importer of ms-swift's Megatron trainings: command lines ``megatron sft``, ``pt`` and ``rlhf``, and YAML files.

Arguments and defaults are those of swift/megatron/arguments/megatron_args.py (ms-swift, commit 3602360). In a YAML
file for Ray, the section ``train`` has the arguments and the number of GPUs of the training.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pipeproof.diagnostics.finding import Location
from pipeproof.diagnostics.source import PlanFileError, SourceMap, read_text
from pipeproof.interop.importers.import_codes import UNREADABLE
from pipeproof.interop.importers.imported import Flags, Imported
from pipeproof.interop.importers.megatron.flag_values import require_evaluated, script_of
from pipeproof.interop.importers.megatron.launch_script import Argument
from pipeproof.interop.importers.megatron.megatron_importer import import_arguments
from pipeproof.interop.importers.recipes.launcher_keys import LauncherSettings
from pipeproof.interop.importers.recipes.layered_yaml import Placed, Unknown, literal, read_layered
from pipeproof.interop.importers.recipes.verl import DIRECTORIES

_STARTS: Final = frozenset({"sft", "pt", "rlhf"})
_PROGRAM: Final = re.compile(r"(?:.*/)?(?:swift/)?cli/_megatron/(?:sft|pt|rlhf)\.py")
_OWN: Final = {"max_length": "--seq-length"}
_RAY_SECTIONS: Final = ("train", "rollout", "teacher")
_DEFAULTS: Final = {
    "--micro-batch-size": 1,
    "--global-batch-size": 16,
    "--recompute-granularity": "selective",
    "--attention-backend": "flash",
    "--expert-tensor-parallel-size": 1,
}


def import_ms_swift(files: Sequence[Path], flags: Flags) -> Imported:
    """Import one shell script that starts ms-swift's Megatron trainer, or one YAML file with its arguments.

    Raises:
        PlanFileError: PP100 or PP170 if it cannot be read or starts no such training, PP171 if Megatron-Core refuses
            the settings.
    """
    if len(files) != 1:
        message = f"a training of ms-swift is one file, found {len(files)}"
        raise PlanFileError(UNREADABLE.finding(message))
    is_yaml = files[0].suffix in (".yaml", ".yml")
    values, source, world_size = _of_yaml(files[0]) if is_yaml else _of_script(files[0])
    settings = LauncherSettings("ms-swift", source)
    settings.world_size = world_size
    top = next((placed.location for placed in values.values()), Location(source.file))
    recompute = values.get("recompute_granularity")
    settings.read(values, "--", _OWN)
    for flag, value in _DEFAULTS.items():
        settings.default(flag, value, top)
    if recompute is not None and recompute.value == "none":
        del settings.flags["--recompute-granularity"]
    if _is_on(values, "use_distributed_optimizer"):
        settings.switch("--use-distributed-optimizer", top)
    if _is_on(values, "padding_free"):
        settings.switch("--variable-seq-lengths", top)
    if "--fp16" not in settings.flags:
        settings.switch("--bf16", top)
    settings.public_depth(values.get("model"), flags)
    return import_arguments(settings.arguments(), flags)


def _is_on(values: Mapping[str, Placed], name: str) -> bool:
    """Return True for an argument that is true, which is its default."""
    return name not in values or values[name].value is not False


def _of_yaml(path: Path) -> tuple[dict[str, Placed], SourceMap, int | None]:
    config = read_layered(path)
    values = {**config.section(), **config.section(_RAY_SECTIONS[0])}
    if not {"tensor_model_parallel_size", "pipeline_model_parallel_size", "micro_batch_size"} & set(values):
        message = "no key here is one of ms-swift's Megatron trainer"
        raise PlanFileError(UNREADABLE.finding(message, Location(str(path))), source=config.source)
    gpus = values.pop("gpus", None)
    return values, config.source, gpus.value if gpus is not None and type(gpus.value) is int else None


def _of_script(path: Path) -> tuple[dict[str, Placed], SourceMap, int | None]:
    script, source = script_of(read_text(str(path)), str(path), DIRECTORIES)
    started = [index for index, command in enumerate(script.commands) if _first_argument(command) is not None]
    if not started:
        message = "no command here starts a training of ms-swift on Megatron (`megatron sft`, `pt` or `rlhf`)"
        raise PlanFileError(UNREADABLE.finding(message, Location(source.file)), source=source)
    index = started[0]
    environment = script.environments[index]

    def variable(name: str) -> int | None:
        text = environment[name] if name in environment else script.value(name) if name in script.variables else "1"
        return int(text) if text is not None and text.isdecimal() and len(text) < _LONGEST_NUMBER else None

    gpus, nodes = variable("NPROC_PER_NODE"), variable("NNODES")
    command = script.commands[index]
    require_evaluated(command, source)
    return dict(_arguments(command[_first_argument(command) :])), source, gpus * nodes if gpus and nodes else None


def _first_argument(command: Sequence[Argument]) -> int | None:
    """Return the index of the first argument after the start of a training; None if the command starts none."""
    for index, (word, following) in enumerate(zip(command, (*command[1:], None), strict=True)):
        if word.text is None:
            continue
        if word.text.rpartition("/")[2] == "megatron" and following is not None and following.text in _STARTS:
            return index + 2
        if _PROGRAM.fullmatch(word.text):
            return index + 1
    return None


def _arguments(words: Sequence[Argument]) -> Iterator[tuple[str, Placed]]:
    """Yield the arguments by name with the words up to the next one: true without any, a list of several."""
    name: Argument | None = None
    values: list[Argument] = []

    def placed() -> Iterator[tuple[str, Placed]]:
        if name is None:
            return
        unknown = next((word for word in values if word.text is None), None)
        texts = [literal(word.text or "") for word in values]
        value: Any = True if not texts else texts[0] if len(texts) == 1 else " ".join(map(str, texts))
        if unknown is not None:
            value = Unknown(unknown.why, unknown.location)
        yield (name.text or "").removeprefix("--").partition("=")[0].replace("-", "_"), Placed(value, name.location)

    for word in words:
        if word.text is not None and re.match(r"--[A-Za-z]", word.text):
            yield from placed()
            name, values = word, []
            if "=" in word.text:
                values.append(Argument(word.text.partition("=")[2], word.location))
        else:
            values.append(word)
    yield from placed()


_LONGEST_NUMBER: Final = 9
