"""The function of a Python file that is the recipe: those that can be called without arguments, and the one named."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Final

from pipeproof.diagnostics.finding import Location
from pipeproof.diagnostics.problems import nearest_name
from pipeproof.diagnostics.source import PlanFileError, SourceMap
from pipeproof.interop.importers.import_codes import UNREADABLE
from pipeproof.interop.importers.imported import Flags
from pipeproof.interop.importers.recipes.modules import Module

_MOST_NAMED: Final = 8


def factories_of(module: Module, fits: Callable[[ast.FunctionDef], bool]) -> tuple[str, ...]:
    """Return the names of the public functions of a module that fit and can be called without arguments."""
    return tuple(
        name
        for name, node in module.definitions.items()
        if isinstance(node, ast.FunctionDef)
        and not name.startswith("_")
        and len(node.args.args) <= len(node.args.defaults)
        and fits(node)
    )


def chosen_recipe(module: Module, names: Sequence[str], flags: Flags) -> str:
    """Return the recipe that ``flags.recipe`` names, or the only one.

    Raises:
        PlanFileError: PP170, there is none, or no choice between several.
    """
    if flags.recipe is None and len(names) == 1:
        return names[0]
    location = Location(module.file)
    if flags.recipe in names:
        return str(flags.recipe)
    if not names:
        message, fix = "no function here returns a configuration and can be called without arguments", None
    elif flags.recipe is None:
        shown = ", ".join(names[:_MOST_NAMED]) + (", .." if names[_MOST_NAMED:] else "")
        message, fix = f"this file has {len(names)} recipes: {shown}", f"choose one: `--recipe {names[0]}`"
    else:
        near = nearest_name(flags.recipe, names)
        message = f"`{flags.recipe}` is no recipe of this file"
        fix = f"did you mean `{near}`?" if near else f"the first recipe is `{names[0]}`"
    raise PlanFileError(UNREADABLE.finding(message, location, fix), source=SourceMap(module.file, module.lines))
