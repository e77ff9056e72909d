"""Settings of a trainer's file: values by path, the plan keys that they set, and refusals at their places."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from pipeproof.diagnostics.finding import Location, RuleDoc
from pipeproof.diagnostics.problems import KeyPath, describe_value
from pipeproof.diagnostics.source import PlanFileError
from pipeproof.interop.importers.draft import MAX_NUMBER, Draft, misspelt
from pipeproof.interop.importers.import_codes import REFUSED, UNREADABLE
from pipeproof.interop.importers.tree import Placed, Tree, Unknown

_Default = TypeVar("_Default", int, None, int | None)


class Settings:
    """The values of a file, and the draft of a plan that they set.

    ``tool`` names the trainer in refusals.
    """

    def __init__(self, tool: str, tree: Tree, draft: Draft) -> None:
        self.tool, self.tree, self.draft = tool, tree, draft

    def placed(self, *path: str) -> Placed | None:
        """Return a value; None without one, or for null.

        Raises:
            PlanFileError: PP170, only a run determines it.
        """
        placed = self.tree.get(*path)
        if placed is None or placed.value is None:
            return None
        if isinstance(placed.value, Unknown):
            raise self.refused(f"`{'.'.join(path)}` is {placed.value.why}", *path)
        return placed

    def value(self, *path: str, default: Any = None) -> Any:
        """Return a value without its location; ``default`` without one."""
        placed = self.placed(*path)
        return default if placed is None else placed.value

    def number(self, *path: str, default: _Default, at_least: int = 1) -> int | _Default:
        """Return an integer; ``default`` without a value.

        Raises:
            PlanFileError: PP170, it is no integer from ``at_least`` to the most that a plan can have.
        """
        placed = self.placed(*path)
        if placed is None:
            return default
        if type(placed.value) is not int or not at_least <= placed.value <= MAX_NUMBER:
            found = describe_value(placed.value)
            raise self.refused(f"`{'.'.join(path)}` needs an integer of at least {at_least}, found {found}", *path)
        return placed.value

    def location(self, *path: str) -> Location:
        """Return the location of a key, else of the nearest section around it."""
        placed = self.tree.get(*path)
        return self.tree.source.locate(path, key=True) if placed is None else placed.location

    def take(self, path: tuple[str, ...], key: KeyPath, value: object) -> None:
        """Set a plan key from the value at a path, or from its default."""
        placed = self.placed(*path)
        self.draft.set(key, value, ".".join(path), None if placed is None else placed.location)

    def refused(self, message: str, *path: str, help: str | None = None, code: RuleDoc = UNREADABLE) -> PlanFileError:
        """Return the error for a value."""
        return PlanFileError(code.finding(message, self.location(*path), help), source=self.tree.source)

    def refused_by_tool(self, message: str, *path: str, help: str | None = None) -> PlanFileError:
        """Return the error for settings that the trainer itself refuses (PP171)."""
        return self.refused(f"{self.tool} refuses this: {message}", *path, help=help, code=REFUSED)

    def require_known(self, known: Mapping[str, Collection[str]]) -> None:
        """Refuse misspelt keys, and a file without any that is known; ``known`` are names by section, "" for the top.

        Raises:
            PlanFileError: PP170; with the default of a misspelt key the verdict would be about another job.
        """
        for section, names in known.items():
            for name in self.tree.names(section):
                near = None if name in names else misspelt(name, sorted(names))
                if near is not None:
                    shown = f"{section}.{name}" if section else name
                    path = (section, name) if section else (name,)
                    raise self.refused(f"`{shown}` is no key of {self.tool}", *path, help=f"did you mean `{near}`?")
        if "" in known and not {*known[""]}.intersection(self.tree.names()):
            raise self.refused(
                f"no key here is one of {self.tool} that a plan needs",
                help=f"give the configuration of {self.tool}, or the kind of file that this is: "
                "`pipeproof import plan --help` lists the kinds",
            )
