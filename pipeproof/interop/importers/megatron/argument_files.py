"""Files with the arguments of Megatron-LM: the block that it prints, a YAML file of arguments, or a shell script."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from pipeproof.diagnostics.finding import Finding, Location
from pipeproof.diagnostics.problems import describe_value
from pipeproof.diagnostics.source import PlanFileError, SourceMap, read_text
from pipeproof.diagnostics.yaml_tree import parse_text
from pipeproof.interop.importers.import_codes import UNREADABLE
from pipeproof.interop.importers.megatron.argument_block import arguments_of_block, has_block
from pipeproof.interop.importers.megatron.flag_values import Arguments, Setting, arguments_of_text

_YAML_ARGUMENTS: Final = re.compile(r"^MODEL_ARGS:\s*$", re.MULTILINE)


def read_arguments(path: Path) -> Arguments:
    """Read the arguments of a training in the form that the file has.

    That is the block that Megatron-LM prints at its start, ``MODEL_ARGS`` of its functional tests (YAML), a shell
    script, or a file that lists arguments.

    Raises:
        PlanFileError: PP100 if the file cannot be read, PP170 if it has none of these forms.
    """
    name = str(path)
    text = read_text(name)
    if has_block(text):
        return arguments_of_block(text, name)
    if _YAML_ARGUMENTS.search(text):
        return _yaml_arguments(text, name)
    return arguments_of_text(text, name)


def _yaml_arguments(text: str, name: str) -> Arguments:
    """Read ``MODEL_ARGS``, a mapping of flags to values, as tests/functional_tests of Megatron-LM pass them."""
    tree = parse_text(text, name)
    source = tree.source
    problem = next((problem for problem in tree.problems if not _repeats_alike(problem, source)), None)
    if problem is not None:
        raise PlanFileError(UNREADABLE.finding(problem.message, problem.location), source=source)
    given = tree.data["MODEL_ARGS"] if isinstance(tree.data, dict) else None
    if not isinstance(given, dict) or not given:
        location = source.locate(("MODEL_ARGS",))
        message = f"`MODEL_ARGS` must be a mapping of flags to values, found {describe_value(given)}"
        raise PlanFileError(UNREADABLE.finding(message, location), source=source)
    flags = {}
    for flag, value in given.items():
        setting = _setting(str(flag), value, source)
        if setting is not None:
            flags[setting.name] = setting
    return Arguments(name, source.lines, flags, {})


def _repeats_alike(problem: Finding, source: SourceMap) -> bool:
    """True for a flag that is given twice with the same value, which Megatron-LM's tests do."""
    if problem.code != "PP103" or problem.location is None:
        return False
    flag, _, value = source.lines[problem.location.line - 1].partition(":")
    first = source.keys.get(("MODEL_ARGS", flag.strip()))
    return first is not None and source.lines[first.line - 1].partition(":")[2].strip() == value.strip()


def _setting(flag: str, value: Any, source: SourceMap) -> Setting | None:
    """Return a flag with its values; None for one that the tests leave out."""
    path = ("MODEL_ARGS", flag)
    key: Location = source.locate(path, key=True)
    location = source.locate(path)
    if value == "":
        return None
    text = " ".join(str(value).split())
    values: tuple[str, ...]
    if value is True or text == "true":
        values = ()
    elif text.startswith("[") and text.endswith("]"):
        values = tuple(text[1:-1].split())
    else:
        values = (text,)
    return Setting(f"--{flag.removeprefix('--').replace('_', '-')}", values, key, location)
