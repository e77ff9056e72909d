"""Errors inside of a stage's graphs: the operation, its module, and the line of the script."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import fx

from pipeproof.foreign_text import read_foreign

_ASSIGNED = re.compile(r"\s*(\w+)(?:\s*:[^=]*)?\s*=")
"""The name of an operation in the code of a graph: ``view = torch.ops.aten.view.default(x, [2])``."""
_FUSED = re.compile(r"# Topologically Sorted Source Nodes: \[(.*?)\], Original ATen: \[(.*?)\]")
"""Inductor's comment on the operations of the kernel that it calls next."""


class GraphOperationError(Exception):
    """An operation of a graph raised. The text names it, its module and the line of the script."""


def named_errors(run: Callable[[list[Any]], Sequence[Any]], graph: fx.GraphModule, what: str) -> Callable[..., Any]:
    """The call of a graph whose errors name the operation; ``what`` names the graph."""
    sources = {node.name: _Source.of(node) for node in graph.graph.nodes if node.op == "call_function"}

    def call(inputs: list[Any]) -> Sequence[Any]:
        try:
            return run(inputs)
        except Exception as error:
            raise GraphOperationError(_text(error, sources, what)) from error

    return call


@dataclass(frozen=True, slots=True)
class _Source:
    """Origin of an operation. ``names`` are its names in Inductor's comments."""

    operation: str
    module: str
    line: str
    names: frozenset[str]

    @classmethod
    def of(cls, node: fx.Node) -> _Source:
        meta = node.meta
        modules = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack") or {}
        paths = [entry[0] for entry in modules.values()]
        functions = meta.get("source_fn_stack") or meta.get("fwd_source_fn_stack") or ()
        lines = re.findall(r'File "(.*?)", line (\d+)', meta.get("stack_trace") or "")
        script = [line for line in lines if "/torch/" not in line[0]]
        return cls(
            str(node.target).removesuffix(".default"),
            _module_path(paths[-1]) if paths else "",
            ":".join(script[-1]) if script else "",
            frozenset([node.name, *(str(entry[0]) for entry in functions)]),
        )


def _module_path(path: str) -> str:
    """``0.up`` of Dynamo's ``L['self'].0.up``."""
    return re.sub(r"^\w+\[(?:'\w+'|\"\w+\")\](?:\.__closure__\[\d+\]\.cell_contents)?\.?", "", path)


def _text(error: Exception, sources: dict[str, _Source], what: str) -> str:
    operation, origins = _place(error, sources)
    module = next((source.module for source in reversed(origins) if source.module), "")
    line = next((source.line for source in reversed(origins) if source.line), "")
    where = f"{operation or 'an operation'}{f' of module `{module}`' if module else ''} in the graph of the {what}"
    message = str(error).strip()
    return f"{where} raised {type(error).__name__}: {message}{f' ({line})' if line else ''}"


def _place(error: Exception, sources: dict[str, _Source]) -> tuple[str, list[_Source]]:
    """The operation, or the operations of a kernel, and their origins."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        name = _ASSIGNED.match(frame.line or "")
        if "eval_with_key" in frame.filename and name and name[1] in sources:
            source = sources[name[1]]
            return f"`{source.operation}`", [source]
        comment = _comment_above(frame.filename, frame.lineno or 0)
        if comment:
            names = {part.strip() for part in comment[1].split(",")}
            return f"`{comment[2]}`", [source for source in sources.values() if source.names & names]
    return "", []


def _comment_above(file: str, line: int) -> re.Match[str] | None:
    """Inductor's comment on the kernel that a line of its code calls."""
    try:
        code = read_foreign(Path(file)).decode(errors="replace")
    except OSError:
        return None
    for text in reversed(code.splitlines()[:line]):
        comment = _FUSED.search(text)
        if comment or text.strip().startswith("def "):
            return comment
    return None
