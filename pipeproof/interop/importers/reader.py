"""One reader of Megatron's arguments: from a command, a file of values, a printed block, or the process of a tool."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from pipeproof.diagnostics.finding import Finding, Location
from pipeproof.diagnostics.problems import describe_value
from pipeproof.diagnostics.source import SourceMap, read_text
from pipeproof.diagnostics.yaml_tree import parse_text
from pipeproof.interop.importers.import_codes import one_file, unreadable
from pipeproof.interop.importers.imported import Flags, Imported
from pipeproof.interop.importers.megatron.argument_block import arguments_of_block, has_block
from pipeproof.interop.importers.megatron.flag_values import (
    Arguments,
    Setting,
    arguments_of_text,
    require_evaluated,
    script_of,
    settings_of_words,
)
from pipeproof.interop.importers.megatron.launch_script import Argument
from pipeproof.interop.importers.megatron.megatron_importer import import_arguments
from pipeproof.interop.importers.names import plain
from pipeproof.interop.importers.tools.job import Job
from pipeproof.interop.importers.tools.tool import MEGATRON_LM, Tool, fork_of
from pipeproof.interop.importers.tools.trainers import FORKS
from pipeproof.interop.importers.tree import Placed, Tree, Unknown, literal, read_tree, tree_of

_YAML_ARGUMENTS: Final = re.compile(r"^MODEL_ARGS:\s*$", re.MULTILINE)
_VALUES: Final = (".yaml", ".yml", ".json")
_OVERRIDE: Final = re.compile(r"[+~]*([A-Za-z_][\w.@/]*)=(.*)", re.DOTALL)
_DIRECTORIES: Final = {"HOME": "~", "RAY_DATA_HOME": "~"}


def import_tool(tool: Tool, files: Sequence[Path], options: Flags) -> Imported:
    """Import one file of a tool.

    Raises:
        PlanFileError: PP100 or PP170 if it cannot be read or is of another kind, PP171 if Megatron-Core refuses the
            settings, PP177 if it would and not all of them are understood.
    """
    path = one_file(files, f"a training of {tool.name} is one file", "give the file that starts it")
    text = read_text(str(path))
    if tool is not MEGATRON_LM:
        return _import_tree(tool, read_tree(path) if path.suffix in _VALUES else _command(tool, path, text), options)
    if has_block(text):
        return import_flags(arguments_of_block(text, str(path)), options)
    if _YAML_ARGUMENTS.search(text):
        return import_flags(_yaml_arguments(text, str(path)), options)
    return import_flags(arguments_of_text(text, str(path)), options)


def import_flags(arguments: Arguments, options: Flags) -> Imported:
    """Import flags of Megatron-LM, or of the fork that has the remaining flags.

    Raises:
        PlanFileError: as for files.
    """
    tool = fork_of(FORKS, arguments.flags, arguments.program, MEGATRON_LM)
    source = SourceMap(arguments.file, arguments.lines)
    tree = tree_of({plain(name): _placed(setting) for name, setting in arguments.flags.items()}, source)
    job = Job(tool, tree, options, dict(arguments.flags), [*arguments.notes])
    tool.adapt(job)
    return import_arguments(job.arguments(arguments), options, tool)


def _import_tree(tool: Tool, tree: Tree, options: Flags) -> Imported:
    if not any(map(tree.has, tool.marks)):
        shown = " or ".join(f"`{mark}`" for mark in tool.marks)
        message = f"{shown}, by which {tool.name} is known, is not here"
        raise unreadable(message, Location(tree.source.file), source=tree.source)
    return import_values(tool, tree, options)


def import_values(tool: Tool, tree: Tree, options: Flags) -> Imported:
    """Import the values of a tool, as its table places them.

    Raises:
        PlanFileError: PP170, PP171 or PP177 as for files.
    """
    job = Job(tool, tree, options)
    for section in tool.sections:
        job.read(section, tool.elsewhere)
    for value, flag in tool.values.items():
        job.take(flag, value)
    tool.adapt(job)
    job.switch(*tool.switches)
    job.public_depth(*tool.models)
    return import_arguments(job.arguments(), options, tool)


# --- commands ---


def _command(tool: Tool, path: Path, text: str) -> Tree:
    """Return the values of the command that starts a training of a tool: its overrides, and torchrun's flags."""
    script, source = script_of(text, str(path), _DIRECTORIES)
    command = next((command for command in script.commands if tool.entry.search(_words(command))), None)
    if command is None:
        message = f"no command here starts a training of {tool.name} with Megatron-Core"
        raise unreadable(message, Location(source.file), "give the script that starts it")
    require_evaluated(command, source)
    return tree_of(_overrides(command) | _launched(command), source)


def _words(command: Sequence[Argument]) -> str:
    return " ".join(re.sub(r"\s", "_", word.text or "?") for word in command) + " "


def _overrides(command: Sequence[Argument]) -> dict[str, Placed]:
    """Return the keys of a command that are overridden (``a.b=value``); the last of each wins."""
    values: dict[str, Placed] = {}
    for argument in command:
        match = _OVERRIDE.fullmatch(argument.text if argument.text is not None else argument.start)
        if match is not None:
            is_known = argument.text is not None
            value = literal(match[2]) if is_known else Unknown(argument.why, argument.location)
            values[match[1]] = Placed(value, argument.location)
    return values


def _launched(command: Sequence[Argument]) -> dict[str, Placed]:
    """Return the flags of torchrun, as ``launcher.nnodes`` and ``launcher.nproc_per_node``."""
    flags = {plain(name): replace(one, values=one.values[:1]) for name, one in settings_of_words(command).items()}
    return {f"launcher.{name}": _placed(setting) for name, setting in flags.items()}


def _placed(setting: Setting) -> Placed:
    """Return a flag with its value: True without any, its words for several."""
    value: Any = True
    if None in setting.values:
        value = Unknown(setting.why, setting.location)
    elif setting.values:
        texts = [text or "" for text in setting.values]
        value = literal(texts[0]) if len(texts) == 1 else " ".join(texts)
    return Placed(value, setting.location)


# --- the files of Megatron-LM's functional tests ---


def _yaml_arguments(text: str, name: str) -> Arguments:
    """Read ``MODEL_ARGS``, a mapping of flags to values, as tests/functional_tests of Megatron-LM pass them."""
    tree = parse_text(text, name)
    source = tree.source
    problem = next((problem for problem in tree.problems if not _repeats_alike(problem, source)), None)
    if problem is not None:
        raise unreadable(problem.message, problem.location, source=source)
    model_args = tree.data["MODEL_ARGS"] if isinstance(tree.data, dict) else None
    if not isinstance(model_args, dict) or not model_args:
        message = f"`MODEL_ARGS` must be a mapping of flags to values, found {describe_value(model_args)}"
        raise unreadable(message, source.locate(("MODEL_ARGS",)), source=source)
    settings = (_setting(str(flag), value, source) for flag, value in model_args.items() if value != "")
    return Arguments(name, source.lines, {setting.name: setting for setting in settings}, {})


def _repeats_alike(problem: Finding, source: SourceMap) -> bool:
    """True for a flag that is given twice with the same value, which Megatron-LM's tests do."""
    if problem.code != "PP103" or problem.location is None:
        return False
    flag, _, value = source.lines[problem.location.line - 1].partition(":")
    first = source.keys.get(("MODEL_ARGS", flag.strip()))
    return first is not None and source.lines[first.line - 1].partition(":")[2].strip() == value.strip()


def _setting(flag: str, value: Any, source: SourceMap) -> Setting:
    """Return a flag with its values; an empty one, which the tests leave out, has none."""
    path = ("MODEL_ARGS", flag)
    text = " ".join(str(value).split())
    values: tuple[str, ...]
    if value is True or text == "true":
        values = ()
    elif text.startswith("[") and text.endswith("]"):
        values = tuple(text[1:-1].split())
    else:
        values = (text,)
    name = f"--{flag.removeprefix('--').replace('_', '-')}"
    return Setting(name, values, source.locate(path, key=True), source.locate(path))
