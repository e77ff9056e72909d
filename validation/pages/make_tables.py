"""Write the generated parts of the pages on the plan file, backends, deadlock and the design.

``python validation/pages/make_tables.py`` writes, ``--check`` exits 1 if a part is stale.
The tables come from where the facts are: the typed plan, the list of keys
that come later, the backend tables, the launcher table, the docstring that
holds the grammar.
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

from pages import DOCS, EVIDENCE, fill, main, table

from pipeproof.comm.backends import TABLES
from pipeproof.comm.channel_models import MODELS, QUEUES, queue_text
from pipeproof.exec.store.launcher_table import LAUNCHERS, Source
from pipeproof.schedule import ops
from pipeproof.specs.plan import plan_json_schema
from pipeproof.verify.certificate import graph_digest

TABLES_PAGE = EVIDENCE / "backend-tables.md"


def pages() -> dict[Path, str]:
    """Return every page with its current generated parts."""
    return {
        DOCS / "plan.md": fill(DOCS / "plan.md", {"keys": keys_parts()[0]}),
        TABLES_PAGE: fill(TABLES_PAGE, {"tables": tables_part(), "behaviours": behaviours_part()}),
        DOCS / "running.md": fill(DOCS / "running.md", {"launchers": launchers_part()}),
        DOCS / "deadlock.md": fill(DOCS / "deadlock.md", {"models": models_part()}),
        DOCS / "design.md": fill(DOCS / "design.md", {"grammar": grammar_part(), "digest": digest_part()}),
    }


def keys_page() -> str:
    """Return the page of the site with a table for each section of a plan."""
    return "\n".join(("# Keys of the plan file\n", *keys_parts()[1]))


def keys_parts() -> tuple[str, list[str]]:
    """Return the table of all sections of a plan, from its JSON Schema, and the tables of their keys."""
    schema = plan_json_schema()
    defs = schema["$defs"]
    top: list[tuple[str, ...]] = []
    sections = []
    for name, about in schema["properties"].items():
        families = [option["$ref"] for option in about.get("oneOf", ())]
        if families:
            top.append((f"`{name}`", "mapping", "required", about["description"]))
            for section in (defs[family.rpartition("/")[2]] for family in families):
                kind = section["properties"]["kind"]["const"]
                sections += _sections(name, section, defs, "" if kind == "gpt" else f" of kind {kind}")
            continue
        reference = about.get("$ref") or about.get("items", {}).get("$ref")
        if reference is None:
            top.append((f"`{name}`", _type(about, defs), _default(name, about, schema), about["description"]))
            continue
        if "$ref" in about:
            kind, default = "mapping", "required" if name in schema["required"] else "each key's"
        else:
            kind, default = "a list of mappings", _default(name, about, schema)
        top.append((f"`{name}`", kind, default, about["description"]))
        sections += _sections(name, defs[reference.rpartition("/")[2]], defs)
    return table(("key", "value", "default", "meaning"), top), sections


def _sections(name: str, section: dict[str, Any], defs: dict[str, Any], family: str = "") -> list[str]:
    """Return the tables of a section and of its inner sections; ``family`` is appended to its name."""
    inner = [
        (f"{name}.{key}", defs[option["$ref"].rpartition("/")[2]])
        for key, about in _mapping(section)["properties"].items()
        for option in (*about.get("anyOf", ()), about.get("items", {}))
        if "$ref" in option
    ]
    return [_section(name, section, defs, family), *(part for found in inner for part in _sections(*found, defs))]


def _mapping(section: dict[str, Any]) -> dict[str, Any]:
    """Return the form of a section that has keys, if it may also be a plain string."""
    return next((option for option in section.get("anyOf", ()) if "properties" in option), section)


def _section(name: str, section: dict[str, Any], defs: dict[str, Any], family: str) -> str:
    mapping = _mapping(section)
    rows = [
        (f"`{name}.{key}`", _type(about, defs), _default(key, about, mapping), about["description"])
        for key, about in mapping["properties"].items()
    ]
    description = section["description"].replace("``", "`")
    return f"### {name}{family}\n\n{description}\n\n" + table(("key", "value", "default", "meaning"), rows)


def _default(key: str, about: dict[str, Any], mapping: dict[str, Any]) -> str:
    if key in mapping.get("required", ()):
        return "required"
    return "" if about.get("default") is None else f"`{_literal(about['default'])}`"


def _literal(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    return value if isinstance(value, str) else json.dumps(value)


def _type(about: dict[str, Any], defs: dict[str, Any]) -> str:
    """Return a value's type and bounds as text."""
    if "$ref" in about:
        plain, *_ = defs[about["$ref"].rpartition("/")[2]].get("anyOf", [{}])
        return {"string": "a name, or a mapping", "number": "a number, or a mapping"}.get(
            plain.get("type"), "a mapping"
        )
    if "anyOf" in about:
        options = [_type(option, defs) for option in about["anyOf"] if option.get("type") != "null"]
        return ", or ".join(dict.fromkeys(options))
    if "const" in about:
        return f"`{_literal(about['const'])}`"
    if "enum" in about:
        return " or ".join(f"`{_literal(value)}`" for value in about["enum"])
    match about["type"]:
        case "array" if "$ref" in about["items"]:
            return "a list of mappings"
        case "array" if any("const" in option for option in about["items"].get("anyOf", ())):
            return "a list of " + " or ".join(_plural(_type(option, defs)) for option in about["items"]["anyOf"])
        case "array" if "anyOf" in about["items"]:
            return "a list of these"
        case "array" if "enum" in about["items"]:
            return "a list of " + ", ".join(f"`{_literal(value)}`" for value in about["items"]["enum"])
        case "array":
            return f"a list of {_plural(_type(about['items'], defs))}"
        case "boolean":
            return "`true` or `false`"
        case "string":
            return "a fraction `a/b`" if "/" in about.get("pattern", "") else "a string"
        case "integer" | "number" as kind:
            return _number(kind, about)
        case other:
            return str(other)


def _plural(text: str) -> str:
    """Return ``a list of strings`` or ``a string`` with the first noun in the plural."""
    noun, *rest = text.removeprefix("a ").split(" ")
    plural = f"{noun.removesuffix(',')}s{',' if noun.endswith(',') else ''}"
    return " ".join([plural, *rest])


def _number(kind: str, about: dict[str, Any]) -> str:
    """``integer, 1 to 2^16``, both ends included."""
    low = about.get("minimum", about.get("exclusiveMinimum"))
    if "maximum" not in about and "exclusiveMaximum" not in about:
        return kind if low is None else f"{kind}, {low} or more"
    if kind == "number" and "exclusiveMaximum" in about:
        return f"number, {low} or more, less than {about['exclusiveMaximum']}"
    high = about["exclusiveMaximum"] - 1 if "exclusiveMaximum" in about else about["maximum"]
    if low == high:
        return f"`{low}`"
    if "exclusiveMinimum" in about:
        return f"{kind}, more than {low}, up to {_power(int(high))}"
    return f"{kind}, {low} to {_power(int(high))}"


def _power(value: int) -> str:
    """Return a large bound as a power of 2 or 10."""
    if value < 10_000:
        return str(value)
    if value & (value + 1) == 0:
        return f"2^{value.bit_length()} - 1"
    if value & (value - 1) == 0:
        return f"2^{value.bit_length() - 1}"
    return f"10^{len(str(value)) - 1}" if value == 10 ** (len(str(value)) - 1) else str(value)


def behaviours_part() -> str:
    """Return a table of the behaviours: their meaning, and the consequence of a difference."""
    texts: dict[str, tuple[str, str, str]] = {}
    for backend in TABLES.values():
        for row in backend.rows():
            text = (row.meaning, row.if_different, _yes_or_no(row.probed))
            assert texts.setdefault(row.key, text) == text, f"{row.key} differs between backends"
    header = ("behaviour", "meaning", "if a machine differs", "probed by doctor")
    return table(header, [(f"`{key}`", *text) for key, text in texts.items()])


def tables_part() -> str:
    """Return the values and sources of each backend."""
    parts = []
    for (name, device), backend in TABLES.items():
        rows = []
        for row in backend.rows():
            value = _shown(row.value)
            if others := backend.also.get(row.key):
                value += f"; also {', '.join(sorted(map(_shown, others)))}"
            rows.append((f"`{row.key}`", value, row.source))
        heading = f"## {backend.name}: `run: {{backend: {name}, device: {device}}}`\n\n"
        parts.append(heading + table(("behaviour", "value", "source"), rows))
    return "\n".join(parts)


def models_part() -> str:
    """Return the queues and the completions of the channel models."""
    queues = [(queue_text(queue), shared) for queue, shared in QUEUES.items()]
    completions = dict.fromkeys(model.completion_text for model in MODELS)
    return table(("one FIFO per", "shared by"), queues) + f"\nEach {', '.join(completions)}."


def launchers_part() -> str:
    """Return a table of the variables that identify a rank, with a column for each launcher."""
    columns = {
        "recognized by": lambda row: " or ".join(" and ".join(map(_code, group)) for group in row.marks),
        "rank": lambda row: _sources(row.rank),
        "number of ranks": lambda row: _sources(row.world_size),
        "rank on its host": lambda row: _sources(row.local_rank),
        "ranks on its host": lambda row: _sources(row.local_world_size),
        "host of rank 0": lambda row: _sources(row.master_host),
        "port of rank 0": lambda row: _sources(row.master_port),
        "run id": lambda row: _sources(row.run_id),
        "attempt": lambda row: _sources(row.attempt),
    }
    header = ("", *(row.name for row in LAUNCHERS))
    return table(header, [(about, *map(cell, LAUNCHERS)) for about, cell in columns.items()])


def _sources(sources: tuple[Source[Any], ...]) -> str:
    """Return the variables of a launcher for one value, or the value itself where no variable is needed."""
    return ", or ".join(" and ".join(map(_code, source.names)) or str(source.read()) for source in sources)


def _code(name: str) -> str:
    return f"`{name}`"


def _shown(value: object) -> str:
    return _yes_or_no(value) if isinstance(value, bool) else str(value)


def _yes_or_no(value: object) -> str:
    return "yes" if value else "no"


def grammar_part() -> str:
    """Return the EBNF of operations, from the docstring of the module that parses them."""
    text = inspect.getdoc(ops) or ""
    grammar = text.partition("EBNF::\n\n")[2].partition("\n\n")[0]
    return f"```ebnf\n{inspect.cleandoc(grammar)}\n```"


def digest_part() -> str:
    """Return the contents of the digest, from the docstring of the function that computes it."""
    return inspect.getdoc(graph_digest) or ""


if __name__ == "__main__":
    sys.exit(main("validation/pages/make_tables.py", pages()))
