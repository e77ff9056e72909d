"""The options of every command that reads a plan: other values for its keys, and files of other tools in its place."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pipeproof.cli.console import echo, require_separate_outputs
from pipeproof.cli.option_types import DEVICE, IMPORT_KIND, set_option

if TYPE_CHECKING:
    from pipeproof.cli.file_kinds import FileKind
    from pipeproof.diagnostics.problems import KeyPath
    from pipeproof.interop.importers.imported import Flags, Imported
    from pipeproof.specs.cost import DeviceName
    from pipeproof.specs.load_plan import LoadedPlan


_Command = TypeVar("_Command", bound=Callable[..., Any])


def import_options(command: _Command) -> _Command:
    """Give a command the options for values that the files lack."""
    model_help = "For imported files: the model's config.json."
    for option in (
        click.option("--world-size", type=click.IntRange(min=1), help="For imported files: the number of processes."),
        click.option("--model-config", type=click.Path(path_type=Path), help=model_help),
        set_option,
    ):
        command = option(command)
    return command


def import_from(kind: str, files: Sequence[Path], flags: Flags) -> Imported:
    """Import the files.

    Raises:
        PlanFileError: they cannot be a plan.
    """
    from pipeproof.interop.importers.import_kinds import import_files

    return import_files(kind, files, flags)


@dataclass(frozen=True)
class PlanSource:
    """Reader of the plan of a command. ``kind`` is the kind of another tool's file; None for a plan file."""

    kind: str | None
    settings: Mapping[KeyPath, object]
    model_config: Path | None
    world_size: int | None
    device: DeviceName | None = None

    @property
    def flags(self) -> Flags:
        """Values that an importer takes in addition to files."""
        from pipeproof.interop.importers.imported import Flags

        return Flags(self.settings, self.model_config, self.world_size)

    @property
    def words(self) -> tuple[str, ...]:
        """The options as words of a command."""
        return tuple(self._words())

    @property
    def _import_options(self) -> Mapping[str, object]:
        options = {
            "--model-config": self.model_config,
            "--world-size": self.world_size,
            "--device": self.device,
        }
        return {option: value for option, value in options.items() if value is not None}

    def _words(self) -> Iterator[str]:
        from pipeproof.diagnostics.problems import dotted

        if self.kind is not None:
            yield from ("--from", self.kind)
        for option, argument in self._import_options.items():
            yield from (option, str(argument))
        for path, value in self.settings.items():
            yield from ("--set", f"{dotted(path)}={json.dumps(value)}")

    def for_file(self, file: Path) -> PlanSource:
        """Return the source for a file: without ``--from``, recognised by its content; see ``for_kind``."""
        from pipeproof.cli.file_kinds import kind_of

        return self if self.kind is not None else self.for_kind(file, kind_of(file))

    def for_kind(self, file: Path, kind: FileKind | None) -> PlanSource:
        """Return the source for a file of a recognised kind; a note on standard error names the other tool.

        Raises:
            click.UsageError: an option of importers is given for a plan, which has these values; or the tool's files
                are not read.
        """
        from pipeproof.cli.file_kinds import UNREAD

        if kind is UNREAD:
            raise click.UsageError(f"{file} looks like {kind.noun}")
        if kind is not None and kind.importer is not None:
            echo(f"note: {file} is read as {kind.noun} (`--from {kind.importer}`)", err=True)
            return replace(self, kind=kind.importer)
        self.refuse_import_options()
        return self

    def refuse_import_options(self) -> None:
        """Refuse ``--from`` and options of importers for a plan, which has these values.

        Raises:
            click.UsageError: such an option is given.
        """
        options = (*(["--from"] if self.kind is not None else []), *self._import_options)
        if options:
            verb = "goes" if len(options) == 1 else "go"
            raise click.UsageError(f"{' and '.join(options)} {verb} with a file of another tool")

    def load(self, file: Path) -> LoadedPlan:
        """Load the plan, or import the file; a note on standard error counts what was assumed.

        Raises:
            PlanFileError: it cannot be read, or is not a valid plan.
            click.UsageError: an option of importers is given for a plan.
        """
        source = self.for_file(file)
        if source.kind is None:
            from pipeproof.specs.load_plan import load_plan

            return load_plan(file, self.settings)
        from pipeproof.interop.importers.check_imported import load_imported

        return load_imported(source.imported(file))

    def imported(self, file: Path) -> Imported:
        """Import the file of another tool; a note on standard error counts what was assumed.

        Raises:
            PlanFileError: it cannot be read, or does not form a plan.
        """
        from pipeproof.interop.importers.imported import with_device

        assert self.kind is not None
        imported = import_from(self.kind, (file,), self.flags)
        if self.device is not None:
            imported = with_device(imported, self.device)
        counts = {
            "assumed": len(imported.assumptions),
            "not shown in a plan": len(imported.ignored),
            "found wrong": len(imported.findings),
        }
        texts = [f"{number} {text}" for text, number in counts.items() if number]
        if texts:
            lists = f"`pipeproof check --from {self.kind} {file}` lists them"
            echo(f"note: values of {file}: {', '.join(texts)}; {lists}", err=True)
        return imported


def plan_options(*, device: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command ``source`` (``PlanSource``) from ``--from``, ``--set`` and the options of importers.

    With ``device``, it also has ``--device``, for commands that print times.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def wrapped(
            *,
            kind: str | None,
            settings: dict[KeyPath, object],
            model_config: Path | None,
            world_size: int | None,
            imported_device: DeviceName | None = None,
            **others: Any,
        ) -> Any:
            require_separate_outputs()
            source = PlanSource(kind, settings, model_config, world_size, imported_device)
            return command(source=source, **others)

        if device:
            wrapped = click.option(
                "--device", "imported_device", type=DEVICE,
                help="For imported files: compute times for this device (`cost.analytic`).",
            )(wrapped)  # fmt: skip
        wrapped = import_options(wrapped)
        return click.option(
            "--from", "kind", metavar="KIND", type=IMPORT_KIND,
            help="Kind of another tool's file, if not recognised; `docs/importing.md` lists the kinds.",
        )(wrapped)  # fmt: skip

    return decorate
