"""The table of a tool that starts Megatron-Core."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pipeproof.interop.importers.names import MEGATRON, VERSIONS, names_of, plain

_NOTHING: Final = re.compile(r"(?!)")


def nothing(_: object) -> None:
    """For a tool with Megatron-LM's own arguments."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Tool:
    """A table: how to recognise the files of a tool, the sections with Megatron's arguments, and the tool's names."""

    name: str
    """The tool in messages; ``kind`` is its name for ``--from``."""
    kind: str = "megatron"
    entry: re.Pattern[str] = _NOTHING
    """Finds the words of the command that starts a training."""
    marks: tuple[str, ...] = ()
    """Every file of the tool has one of these paths."""
    sections: tuple[str, ...] = ("",)
    """Paths of the sections that have arguments of Megatron-LM, or attributes of Megatron-Core."""
    elsewhere: frozenset[str] = frozenset()
    """Keys of these sections that are not arguments."""
    values: Mapping[str, str] = field(default_factory=dict)
    """Paths of other values, and their flags."""
    switches: tuple[str, ...] = ()
    """Flags that the tool sets."""
    models: tuple[str, ...] = ()
    """Paths that may name a public checkpoint."""
    names: str | None = None
    """The list of names that the tool has and Megatron-LM does not."""
    decides: re.Pattern[str] = _NOTHING
    """Finds unread names on which order, cut or layouts depend: they leave the verdict open."""
    without: re.Pattern[str] = _NOTHING
    """Finds similar names that change nothing; others with a term of parallelism leave the verdict open."""
    blocks: re.Pattern[str] = _NOTHING
    """Matches specifications of layers (``--spec``) that are attention and an MLP or experts."""
    unnormed_modules: str | None = None
    """Why MTP modules are assumed to read the hidden states before the last norm, not after it."""
    adapt: Callable[[Any], None] = nothing
    """Sets the flags of a ``Job`` from the tool's own names."""

    def owns(self, name: str) -> bool:
        """Return True for a name that the tool has and Megatron-LM does not."""
        key = plain(name)
        return self.names is not None and key in names_of(self.names) and key not in names_of(MEGATRON)

    def knows(self, name: str) -> bool:
        """Return True for a name in the list of the tool, or of Megatron-LM."""
        key = plain(name)
        return key in names_of(MEGATRON) or self.owns(name) or bool(self.without.fullmatch(key))

    @property
    def lists(self) -> str:
        """The lists without a name, for messages."""
        own = f" or of {self.name}" if self.names is not None else ""
        return f"no list of the arguments of Megatron-LM ({VERSIONS}){own}"


MEGATRON_LM: Final = Tool(name="Megatron-LM", entry=re.compile(r"(^|/)pretrain_gpt\.py$"))
"""Megatron-LM itself, in scripts, printed blocks and its process; its list has the names of all its versions."""


def fork_of(tools: Iterable[Tool], flags: Iterable[str], program: str, default: Tool) -> Tool:
    """Return the tool with the most own names in a command, or with its entry script; ``default`` without any."""
    named = [*flags]
    counted = [(sum(map(tool.owns, named)) + bool(tool.entry.search(program)), tool) for tool in tools]
    number, tool = max(counted, key=lambda item: item[0], default=(0, default))
    return tool if number else default
