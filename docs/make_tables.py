"""Writes the generated parts of ``docs/plan.md``, ``docs/backends.md`` and ``docs/design.md``.

``python docs/make_tables.py`` writes, ``--check`` exits 1 if a part is stale.
The tables come from where the facts are: the typed plan, the list of keys
that come later, the backend tables, the docstring that holds the grammar.
"""  # noqa: INP001 - a directory of scripts, not a package

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

from pages import DOCS, fill, main, table

from pipeproof.comm.capabilities import backend_table
from pipeproof.schedule import ops
from pipeproof.specs.later import LATER
from pipeproof.specs.schema import plan_json_schema
from pipeproof.verify.certificate import plan_digest


def pages() -> dict[Path, str]:
    """Every page with its generated parts as they must be."""
    return {
        DOCS / "plan.md": fill(DOCS / "plan.md", {"keys": keys_part(), "later": later_part()}),
        DOCS / "backends.md": fill(DOCS / "backends.md", {"tables": tables_part()}),
        DOCS / "design.md": fill(DOCS / "design.md", {"grammar": grammar_part(), "digest": digest_part()}),
    }


def keys_part() -> str:
    """A table for each section of a plan, from its JSON Schema."""
    schema = plan_json_schema()
    top, sections = [], []
    for name, about in schema["properties"].items():
        if "$ref" not in about:
            top.append((f"`{name}`", _type(about), _default(name, about, schema), about["description"]))
            continue
        section = schema["$defs"][about["$ref"].rpartition("/")[2]]
        default = "" if name in schema["required"] else "every key's own"
        top.append((f"[`{name}`](#{name})", "mapping", default, about["description"]))
        sections.append(_section(name, section))
    header = ("key", "value", "default", "meaning")
    return "\n".join(["### The whole plan\n", table(header, top), *sections])


def _section(name: str, section: dict[str, Any]) -> str:
    mapping = next((option for option in section.get("anyOf", ()) if "properties" in option), section)
    rows = [
        (f"`{name}.{key}`", _type(about), _default(key, about, mapping), about["description"])
        for key, about in mapping["properties"].items()
    ]
    description = section["description"].replace("``", "`")
    return f"### {name}\n\n{description}\n\n" + table(("key", "value", "default", "meaning"), rows)


def _default(key: str, about: dict[str, Any], mapping: dict[str, Any]) -> str:
    if key in mapping.get("required", ()):
        return "required"
    return "" if about.get("default") is None else f"`{_literal(about['default'])}`"


def _literal(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    return value if isinstance(value, str) else json.dumps(value)


def _type(about: dict[str, Any]) -> str:
    """A value's type and bounds in words."""
    if "anyOf" in about:
        options = [_type(option) for option in about["anyOf"] if option.get("type") != "null"]
        return " or ".join(dict.fromkeys(options))
    if "const" in about:
        return f"`{_literal(about['const'])}`"
    if "enum" in about:
        return " or ".join(f"`{_literal(value)}`" for value in about["enum"])
    match about["type"]:
        case "array":
            return f"list of {_type(about['items'])}"
        case "boolean":
            return "`true` or `false`"
        case "string" if "pattern" in about:
            return "a fraction `a/b`"
        case "null":
            return "none yet"
        case "integer" | "number":
            return about["type"] + _bounds(about)
        case other:
            return str(other)


def _bounds(about: dict[str, Any]) -> str:
    bounds = []
    for word, sign in (("exclusiveMinimum", ">"), ("minimum", ">="), ("exclusiveMaximum", "<"), ("maximum", "<=")):
        if word in about:
            bounds.append(f"{sign} {_number(about[word])}")
    return f" {', '.join(bounds)}" if bounds else ""


def _number(value: float) -> str:
    """Large powers of two and ten as such."""
    whole = int(value)
    if whole >= 1000 and whole & (whole - 1) == 0:
        return f"2^{whole.bit_length() - 1}"
    if whole >= 1000 and set(str(whole)[1:]) == {"0"} and str(whole)[0] == "1":
        return f"10^{len(str(whole)) - 1}"
    return str(whole)


def later_part() -> str:
    """The keys and values that are refused until their feature is there."""
    rows = []
    for row in LATER:
        rows.append((f"`{row.section}.{row.key}`", row.feature, row.now))
    return table(("key", "what comes later", "in this release"), rows)


def tables_part() -> str:
    """Each backend's table."""
    parts = []
    for backend, device in (("paddle", "cpu"),):
        about = backend_table(backend, device)
        rows = []
        for row in about.rows():
            value = {True: "yes", False: "no"}.get(row.value, row.value) if isinstance(row.value, bool) else row.value
            measured = "yes" if row.probed else "no"
            rows.append((f"`{row.key}`", str(value), row.meaning, row.if_different, row.source, measured))
        header = ("behaviour", "value", "meaning", "if a machine does otherwise", "source", "probed by doctor")
        parts.append(f"## {about.name}: `run: {{backend: {backend}, device: {device}}}`\n\n" + table(header, rows))
    return "\n".join(parts)


def grammar_part() -> str:
    """The EBNF of operations, as the module that parses them has it."""
    text = inspect.getdoc(ops) or ""
    grammar = text.partition("EBNF::\n\n")[2].partition("\n\n")[0]
    return f"```ebnf\n{inspect.cleandoc(grammar)}\n```"


def digest_part() -> str:
    """What the digest is over, as the function that computes it says."""
    _, _, text = (inspect.getdoc(plan_digest) or "").partition("\n\n")
    return text


if __name__ == "__main__":
    sys.exit(main("docs/make_tables.py", pages()))
