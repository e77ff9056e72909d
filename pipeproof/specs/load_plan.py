"""Reading a plan: from a file or a dict to a ``PlanSpec``, or to all findings."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from pipeproof.diagnostics.finding import Finding, Severity, file_order
from pipeproof.diagnostics.problems import (
    PROBLEMS,
    KeyPath,
    Problem,
    describe_value,
    dotted,
    listed,
    nearest_name,
    shortened,
)
from pipeproof.diagnostics.source import PlanFileError, SourceMap, read_text
from pipeproof.diagnostics.yaml_tree import parse_text
from pipeproof.specs.custom_layers import CustomModelSpec
from pipeproof.specs.model import ModelSpec
from pipeproof.specs.plan import PlanSpec
from pipeproof.specs.section import sections_in

# --- Conversion of pydantic's errors to problems with our codes, messages and suggested fixes ---


_SECTION = "a mapping of keys"
_MODEL, _FAMILIES = "model", ("gpt", "layers")
_UNKNOWN = ("extra_forbidden", "invalid_key")

_HABITS: Mapping[str, str] = MappingProxyType(
    {
        "sp": "sequence_parallel",
        "tensor_parallel": "tp",
        "tensor_model_parallel_size": "tp",
        "tensor_parallel_size": "tp",
        "pipeline_parallel": "pp",
        "pipeline_model_parallel_size": "pp",
        "pipeline_parallel_size": "pp",
        "context_parallel_size": "cp",
        "expert_parallel_size": "ep",
        "expert_model_parallel_size": "ep",
        "data_parallel": "dp",
        "data_parallel_size": "dp",
        "mbs": "micro_batch_size",
        "gbs": "global_batch_size",
        "vpp": "num_chunks",
        "virtual_pp_degree": "num_chunks",
        "zero_bubble": "zb_h1",
        "fp16": "float16",
        "bf16": "bfloat16",
        "half": "float16",
        "fp32": "float32",
        "fp64": "float64",
        "fp8": "float8",
    }
)
"""Names of keys and values in other tools, where they are not similar to ours."""

_EXPECTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "none_required": "null",
    "model_type": _SECTION,
    "model_attributes_type": _SECTION,
}

_BOUNDS = {
    "greater_than": ("gt", "more than {}"),
    "greater_than_equal": ("ge", "at least {}"),
    "less_than": ("lt", "less than {}"),
    "less_than_equal": ("le", "at most {}"),
}


def problems_of(error: ValidationError) -> list[Problem]:
    """Return all problems of a validation error of ``PlanSpec``, in the order of the keys."""
    details = error.errors(include_url=False)
    problems = [problem for detail in details for problem in _problems(detail)]
    misspelt = {
        (*_shown(path[:-1]), suggestion)
        for path in (tuple(detail["loc"]) for detail in details if detail["type"] in _UNKNOWN)
        if (suggestion := _near_key(path)) is not None
    }
    # A key that is given under a misspelt name is not also reported as missing.
    return [problem for problem in problems if not (problem.code == "PP104" and problem.path in misspelt)]


def _problems(detail: ErrorDetails) -> Iterator[Problem]:
    kind, path, value = detail["type"], tuple(detail["loc"]), detail["input"]
    context: Mapping[str, Any] = detail.get("ctx", {})
    if kind == PROBLEMS:
        for problem in context[PROBLEMS]:
            yield Problem(problem.code, (*_shown(path), *problem.path), problem.message, problem.help, problem.at_key)
    elif kind == "missing":
        yield Problem("PP104", _shown(path), f"`{_dotted(path)}` is missing", _addition(path), at_key=True)
    elif kind in _UNKNOWN:
        yield _unknown_key(path)
    elif kind in _EXPECTED:
        yield _wrong_type(path, value, _EXPECTED[kind])
    elif kind == "literal_error":
        yield _not_allowed(path, value)
    elif kind in _BOUNDS:
        key, bound = _BOUNDS[kind]
        yield Problem(
            "PP106",
            _shown(path),
            f"`{_dotted(path)}` must be {bound.format(context[key])}, found {describe_value(value)}",
        )
    elif kind == "finite_number":
        yield Problem("PP106", _shown(path), f"`{_dotted(path)}` must be finite, found {describe_value(value)}")
    else:
        yield Problem("PP106", _shown(path), f"`{_dotted(path)}`: {detail['msg']}, found {describe_value(value)}")


def _shown(path: KeyPath) -> KeyPath:
    """The path in the plan file: without the family of a model, which pydantic puts behind ``model``."""
    return (path[0], *path[2:]) if len(path) > 1 and path[0] == _MODEL else path


def _dotted(path: KeyPath) -> str:
    return dotted(_shown(path))


def _wrong_type(path: KeyPath, value: object, expected: str) -> Problem:
    message = f"`{_dotted(path)}` must be {expected}, found {describe_value(value)}"
    return Problem("PP105", _shown(path), message, _conversion(value, expected))


def _conversion(value: object, expected: str) -> str | None:
    if expected in ("an integer", "a number"):
        if isinstance(value, float) and value.is_integer() and abs(value) < 10**15:
            return f"write {int(value)}"
        if isinstance(value, str) and len(value) < 20 and value.strip().isdecimal():
            return "remove the quotes"
    if expected == "true or false" and isinstance(value, str):
        if value.lower() in ("yes", "on", "y", "true"):
            return "write true"
        if value.lower() in ("no", "off", "n", "false"):
            return "write false"
    if expected == _SECTION and value is None:
        return "remove the key, or give keys below it"
    if expected == "a list" and isinstance(value, str):
        return f"write [{shortened(value)}]"
    return None


def _not_allowed(path: KeyPath, value: object) -> Problem:
    allowed = _FAMILIES if _shown(path) == (_MODEL, "kind") else _choices(_annotation(path))
    expected = listed(allowed) if allowed else "another value"
    if type(value) not in {type(option) for option in allowed}:
        return _wrong_type(path, value, f"{'one of ' if len(allowed) > 1 else ''}{expected}")
    near = None
    if _shown(path) == ("pipeproof",):
        message = f"this release reads plans of version {expected}, found {describe_value(value)}"
        return Problem("PP106", path, message, help=f"write `pipeproof: {expected}`")
    if isinstance(value, str):
        habitual = _HABITS.get(value)
        near = habitual if habitual in allowed else nearest_name(value, allowed)
    return Problem(
        "PP106",
        _shown(path),
        f"`{_dotted(path)}` must be {expected}, found {describe_value(value)}",
        help=f"did you mean `{near}`?" if near else None,
    )


def _choices(annotation: Any) -> tuple[Any, ...]:
    literals = [option for option in (annotation, *get_args(annotation)) if get_origin(option) is Literal]
    return tuple(value for literal in literals for value in get_args(literal))


def _unknown_key(path: KeyPath) -> Problem:
    section, name = path[:-1], str(path[-1])
    shown = shortened(name)
    names = _sections().get(_without_indices(section), ())
    owner = f"`{_dotted(section)}`" if len(_shown(section)) else "a plan"
    return Problem("PP102", _shown(path), f"{owner} has no key `{shown}`", _key_help(path, names), at_key=True)


def _key_help(path: KeyPath, names: tuple[str, ...]) -> str:
    section, name = _without_indices(path[:-1]), str(path[-1])
    if ":" in name:
        return "put a space after the colon that ends the key"
    if name == "<<":
        return "merge keys are not part of YAML 1.2: repeat the keys that you need"
    if not section and name.startswith("rank "):
        return "for a schedule as text, name it FILE.txt: `pipeproof check FILE.txt`"
    near = _near_key(path)
    if near is not None and (near == _HABITS.get(name) or near.startswith(f"{name}_")):
        return f"did you mean `{near}`?"
    sections = _sections()
    families = [other[1] for other, keys in sections.items() if _is_sibling(other, section) and name in keys]
    if families:
        return f"it is a key of `kind: {families[0]}`" + (f"; did you mean `{near}`?" if near else "")
    homes = _homes(name, section)
    if homes:
        return f"did you mean {listed([f'`{_dotted((*home, name))}`' for home in homes])}? It belongs there"
    if near is not None:
        return f"did you mean `{near}`?"
    for other, keys in sections.items():
        elsewhere = nearest_name(name, keys, prefixes=False) if _shown(other) != _shown(section) else None
        if elsewhere is not None:
            return f"did you mean `{_dotted((*other, elsewhere))}`?"
    return f"known here: {', '.join(names)}"


def _homes(name: str, section: KeyPath) -> list[KeyPath]:
    """The nearest other sections with a key of this name: below the same top key, else the outermost; not in lists."""
    homes = [other for other, keys in _sections().items() if other != section and name in keys]
    homes = [home for home in homes if not home or get_origin(_field_of(home).annotation) is not tuple] or homes
    homes = [home for home in homes if section and home[:1] == section[:1]] or homes
    least = min(map(len, homes), default=0)
    return [home for home in homes if len(home) == least]


def _is_sibling(other: KeyPath, section: KeyPath) -> bool:
    """True for the same section of two families of models."""
    return other != section and _shown(other) == _shown(section)


def _near_key(path: KeyPath) -> str | None:
    section, name = _without_indices(path[:-1]), str(path[-1])
    names = _sections().get(section, ())
    habitual = _HABITS.get(name)
    return habitual if habitual in names else nearest_name(name, names)


def _without_indices(path: KeyPath) -> KeyPath:
    """The path without list indices: all items of a list have the same keys."""
    return tuple(part for part in path if isinstance(part, str))


def _sections() -> dict[KeyPath, tuple[str, ...]]:
    """The keys of each section at any depth, the top first."""
    sections: dict[KeyPath, tuple[str, ...]] = {}

    def add(path: KeyPath, model: type[BaseModel]) -> None:
        sections[path] = tuple(model.model_fields)
        for name, field in model.model_fields.items():
            for nested in sections_in(field.annotation):
                add((*path, name, *_family(nested)), nested)

    add((), PlanSpec)
    return sections


def _family(section: type[BaseModel]) -> KeyPath:
    """The tag that pydantic puts behind ``model`` for a family of models; empty for other sections."""
    return tuple(
        name for name, family in zip(_FAMILIES, (ModelSpec, CustomModelSpec), strict=True) if section is family
    )


def _field_of(path: KeyPath) -> Any:
    """The pydantic field at a path of keys, list indices left out; None if there is none."""
    model: type[BaseModel] = PlanSpec
    field, choice = None, tuple[type[BaseModel], ...]()
    for part in _without_indices(path):
        if part in _FAMILIES and choice:
            model = next(section for section in choice if part in _family(section))
            choice = ()
            continue
        field = model.model_fields.get(str(part))
        choice = sections_in(field.annotation) if field is not None else ()
        model, choice = (choice[0], ()) if len(choice) == 1 else (model, choice)
    return field


def _annotation(path: KeyPath) -> Any:
    """The type of a value at ``path``; of an item, if the path ends in an index."""
    field = _field_of(path)
    annotation = field.annotation if field is not None else None
    return get_args(annotation)[0] if isinstance(path[-1], int) else annotation


def _addition(path: KeyPath) -> str | None:
    allowed = _choices(_annotation(path))
    if len(allowed) == 1:
        return f"add `{path[-1]}: {allowed[0]}`"
    if allowed:
        return f"add `{path[-1]}`: one of {listed(allowed)}"
    field = _field_of(path)
    return f"add `{path[-1]}`: {field.description}" if field is not None and field.description else None


_NO_SETTINGS: Mapping[KeyPath, object] = MappingProxyType({})


@dataclass(frozen=True)
class LoadedPlan:
    """A valid plan and the text that it was read from (None for plans made in Python)."""

    spec: PlanSpec
    source: SourceMap | None = None


def load_plan(path: str | os.PathLike[str], settings: Mapping[KeyPath, object] = _NO_SETTINGS) -> LoadedPlan:
    """Read and validate a plan file (YAML or JSON).

    ``settings`` are values by key, which replace the file's.

    Raises:
        PlanFileError: all findings in the order of the file, PP100 to PP109.
    """
    name = os.fspath(path)
    tree = parse_text(read_text(name), name)
    source = tree.source
    findings = [*tree.problems]
    spec = None
    if tree.complete:
        data, problems = with_settings(tree.data, settings)
        if not problems:
            spec, problems = _validate(data)
        findings += _without_repeats(_given_finding(problem, source, settings) for problem in problems)
    if findings or spec is None:
        raise PlanFileError(*sorted(findings, key=file_order), source=source)
    return LoadedPlan(spec, source)


def with_settings(data: object, settings: Mapping[KeyPath, object]) -> tuple[object, list[Problem]]:
    """Return a plan's data with its settings, and a problem for each setting whose parent is not a mapping."""
    problems = []
    for path, value in settings.items():
        data, blocked = _with_setting(data, path, value, 0)
        if blocked is not None:
            message = f"`{dotted(path)}` cannot be set: `{dotted(blocked)}` is not a mapping of keys"
            problems.append(Problem("PP105", blocked, message))
    return data, problems


def _with_setting(data: object, path: KeyPath, value: object, depth: int) -> tuple[object, KeyPath | None]:
    if depth == len(path):
        return value, None
    if data is not None and not isinstance(data, Mapping):
        return data, path[:depth]
    old = data or {}
    inner, blocked = _with_setting(old.get(path[depth]), path, value, depth + 1)
    return {**old, path[depth]: inner}, blocked


def _given_finding(problem: Problem, source: SourceMap | None, settings: Mapping[KeyPath, object]) -> Finding:
    """A finding with its location in the file; for a setting, without a location, but named in the message."""
    set_path = next((path for path in settings if problem.path[: len(path)] == path), None)
    finding = _finding(problem, source)
    if set_path is None:
        return finding
    return replace(finding, message=f"{finding.message} (given by `--set {dotted(set_path)}=..`)", location=None)


def plan_from_dict(
    data: Mapping[str, object], settings: Mapping[KeyPath, object] = _NO_SETTINGS, *, source: SourceMap | None = None
) -> LoadedPlan:
    """Validate a plan made in Python, with the keys and values of a file.

    ``settings`` are as for ``load_plan``; ``source`` gives locations, for a plan that was made from other files.

    Raises:
        PlanFileError: all findings, PP102 to PP109; they have locations only with ``source``.
    """
    spec = None
    changed, problems = with_settings(data, settings)
    if not problems:
        spec, problems = _validate(changed)
    if spec is None:
        findings = (_given_finding(problem, source, settings) for problem in problems)
        raise PlanFileError(*_without_repeats(findings), source=source)
    return LoadedPlan(spec, source)


def _validate(data: object) -> tuple[PlanSpec | None, list[Problem]]:
    """Return the spec, or all problems: one of the two is empty."""
    if not isinstance(data, Mapping):
        value = "nothing: the plan is empty" if data is None else describe_value(data)
        return None, [
            Problem(
                "PP105",
                (),
                f"a plan is a mapping of keys, found {value}",
                help="begin with `pipeproof: 1`, then model, topology and schedule",
            )
        ]
    try:
        sections = {key: dict(value) if isinstance(value, Mapping) else value for key, value in data.items()}
        return PlanSpec.model_validate(sections), []
    except ValidationError as error:
        return None, problems_of(error)


def _finding(problem: Problem, source: SourceMap | None) -> Finding:
    location = source.locate(problem.path, key=problem.at_key) if source is not None else None
    return Finding(problem.code, Severity.ERROR, problem.message, location, problem.help)


def _without_repeats(findings: Iterable[Finding]) -> list[Finding]:
    return list(dict.fromkeys(findings))
