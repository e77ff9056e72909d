"""Values of flags with their types; what cannot be read is refused at its place."""

from __future__ import annotations

import re
from typing import NoReturn

from pipeproof.interop.counts import count
from pipeproof.interop.draft import Draft
from pipeproof.interop.megatron.arguments import Arguments, Setting
from pipeproof.specs.finding import Finding, Location, Severity
from pipeproof.specs.load import PlanFileError
from pipeproof.specs.problems import KeyPath, dotted
from pipeproof.specs.source import SourceMap

_INT = re.compile(r"[+-]?\d{1,18}", re.ASCII)


MAX_RANKS = 2**16
"""Most ranks of an axis, and most stages of a rank, as in plans."""


class Given:
    """The flags of a script, and the plan that is made of them."""

    def __init__(self, arguments: Arguments, draft: Draft) -> None:
        self.arguments = arguments
        self.draft = draft

    def has(self, flag: str) -> bool:
        """Whether a flag without a value stands there."""
        return flag in self.arguments.flags

    def setting(self, flag: str) -> Setting | None:
        """The flag, or None."""
        return self.arguments.flags.get(flag)

    def place(self, flag: str) -> Location | None:
        """Where a flag stands."""
        setting = self.setting(flag)
        return None if setting is None else setting.location

    def shown(self, flag: str) -> str:
        """The flag as messages show it."""
        setting = self.setting(flag)
        return flag if setting is None or setting.value is None else f"{flag} {setting.value}"

    def text(self, flag: str) -> str | None:
        """The value of a flag; None without it, and where only a run can tell it.

        Raises:
            PlanFileError: PP170, the flag has no value.
        """
        setting = self.setting(flag)
        if setting is None:
            return None
        if not setting.values:
            self.refuse(f"{flag} has no value", setting.location)
        return setting.value

    def number(self, flag: str, *, at_least: int = 1) -> int | None:
        """The value as an integer.

        Raises:
            PlanFileError: PP170, it is none.
        """
        text = self.text(flag)
        if text is None:
            return None
        if not _INT.fullmatch(text) or int(text) < at_least:
            setting = self.arguments.flags[flag]
            self.refuse(f"{flag} needs an integer of at least {at_least}, found `{text}`", setting.value_location)
        return int(text)

    def real(self, flag: str) -> float | None:
        """The value as a number that is not negative.

        Raises:
            PlanFileError: PP170, it is none.
        """
        text = self.text(flag)
        if text is None:
            return None
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value < float("inf"):
            self.refuse(f"{flag} needs a number, found `{text}`", self.arguments.flags[flag].value_location)
        return value

    def degree(self, flag: str, key: KeyPath, *, otherwise: int = 1) -> int:
        """An integer that the verdict hangs on: from ``--set``, else from the flag, else its default.

        Raises:
            PlanFileError: PP170, it is no integer, or only a run can tell it.
        """
        if key in self.draft:
            return count(self.draft, *map(str, key))
        setting = self.setting(flag)
        if setting is not None and setting.values and setting.value is None:
            self.refuse(
                f"the value of {flag} is {setting.why}",
                setting.location,
                f"say it with `--set {dotted(key)}=N`",
            )
        number = self.number(flag)
        if number is None:
            return otherwise
        if number > MAX_RANKS and setting is not None:
            self.refuse(f"{flag} is more than {MAX_RANKS}, which a plan does not have", setting.value_location)
        assert setting is not None, "a number has a flag"
        self.draft.set(key, number, self.shown(flag), setting.location)
        return number

    def take(self, flag: str, key: KeyPath, value: object) -> None:
        """Set a plan value that the flag gives."""
        self.draft.set(key, value, self.shown(flag), self.place(flag))

    def refuse(self, message: str, location: Location, help: str | None = None, code: str = "PP170") -> NoReturn:
        """End the import.

        Raises:
            PlanFileError: always.
        """
        source = SourceMap(self.arguments.file, self.arguments.lines)
        raise PlanFileError(Finding(code, Severity.ERROR, message, location, help), source=source)

    def megatron_refuses(self, message: str, flag: str, help: str | None = None) -> NoReturn:
        """End the import with what Megatron-LM itself would not start with.

        Raises:
            PlanFileError: always, PP171.
        """
        place = self.place(flag) or Location(self.arguments.file, 1, 1)
        self.refuse(f"Megatron-LM refuses this: {message}", place, help, code="PP171")
