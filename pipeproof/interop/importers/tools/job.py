"""The flags of Megatron-LM that a job of a tool means, while they are collected."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, NoReturn

from pipeproof.diagnostics.finding import Location
from pipeproof.interop.importers.import_codes import unreadable
from pipeproof.interop.importers.imported import Flags, IgnoredSetting
from pipeproof.interop.importers.megatron.flag_values import Arguments, Setting, is_off
from pipeproof.interop.importers.megatron.flags import FLAGS_BY_NAME, NEGATED
from pipeproof.interop.importers.megatron.stage_flags import CHUNKS, LAYOUT
from pipeproof.interop.importers.names import depth_of, is_public, other_parts
from pipeproof.interop.importers.plan_builder import misspelt
from pipeproof.interop.importers.tools.tool import Tool
from pipeproof.interop.importers.tree import Placed, Tree, Unknown, is_known

PP: Final = "--pipeline-model-parallel-size"
LAYERS: Final = "--num-layers"
BATCH: Final = "--global-batch-size"
_DEFAULTS: Final = frozenset({("moe_layer_freq", "1")})
"""Values that change nothing, as tools write them."""
_LETTERS: Final = MappingProxyType({"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"})


@dataclass
class Job:
    """Flags by name, which the table of a tool sets from a tree of values.

    ``notes`` are assumptions about the file; ``world_size`` is the number of training processes, if the file has it;
    ``checkpoint`` is a checkpoint with an unknown number of blocks; ``open`` are settings that leave the verdict open.
    """

    tool: Tool
    tree: Tree
    options: Flags
    flags: dict[str, Setting] = field(default_factory=dict)
    notes: list[tuple[str, Location]] = field(default_factory=list)
    world_size: int | None = None
    checkpoint: tuple[str, Location] | None = None
    open: list[IgnoredSetting] = field(default_factory=list)

    @property
    def top(self) -> Location:
        """The location of the tool's own settings: the first flag, or the file."""
        first = next(iter(self.flags.values()), None)
        return Location(self.tree.source.file) if first is None else first.location

    def place(self, *paths: str) -> Location:
        """Return the location of the first of these values in the file, else the top."""
        candidates = (self.tree.get(path) for path in paths)
        return next((placed.location for placed in candidates if placed is not None), self.top)

    def switch(self, *flags: str) -> None:
        """Set flags without a value that the tool always sets."""
        for flag in flags:
            self.flags.setdefault(flag, Setting(flag, (), self.top, self.top))

    def default(self, flag: str, value: object, location: Location | None = None) -> None:
        """Set a flag to the tool's own default, unless the file has it."""
        origin = location or self.top
        self.flags.setdefault(flag, Setting(flag, (str(value),), origin, origin))

    def unknown(self, flag: str, why: str, location: Location) -> None:
        """Set a flag whose value only a run determines; ``why`` completes "the value is ..."."""
        self.flags[flag] = Setting(flag, (None,), location, location, why)

    def take(self, flag: str, path: str) -> None:
        """Set a flag to the value at a path; nothing without one."""
        placed = self.tree.get(path)
        if placed is not None:
            self._add(_flag_with(flag, path, placed))

    def product(self, *factors: tuple[str, int | None]) -> int | None:
        """Return the product of values with their defaults; None where one is not known."""
        result = 1
        for path, default in factors:
            number = self.tree.number(path, default=default)
            if not number:
                return None
            result *= number
        return result

    def read(self, section: str, elsewhere: Collection[str] = ()) -> None:
        """Add the flags of a section's keys; ``elsewhere`` are keys that were read before.

        Keys without a flag are left to the importer of Megatron-LM, with the section before their names.

        Raises:
            PlanFileError: PP170, a key is a misspelling of a key with a flag, and in no list of the tool.
        """
        shown = f"{section}." if section else ""
        for name in self.tree.names(section):
            if self.tool.decides.fullmatch(name) and self.tree.names(section, name):
                origin = self.tree.source.locate((*section.split("."), name), key=True)
                self._add([Setting(f"{shown}{name}", (None,), origin, origin, "a section")])
        for name, placed in self.tree.section(section).items():
            if name in elsewhere:
                continue
            flag = FLAGS_BY_NAME.get(name)
            near = None if flag or name in NEGATED or self.tool.knows(name) else misspelt(name, FLAGS_BY_NAME)
            if near is not None:
                message = f"`{shown}{name}` is not a key of {self.tool.name}"
                self.refuse(message, placed.location, f"did you mean `{near}`?")
            if name in NEGATED and placed.value is False:
                self._add([Setting(NEGATED[name], (), placed.location, placed.location)])
            elif flag is not None and (name, str(placed.value)) not in _DEFAULTS:
                self._add(_flag_with(flag, f"{shown}{name}", placed))
            elif flag is None and name not in NEGATED and not is_off(placed.value):
                text = str(placed.value) if is_known(placed.value) else None
                self._add([Setting(f"{shown}{name}", (text,), placed.location, placed.location)])

    def _add(self, settings: Sequence[Setting] | Iterator[Setting]) -> None:
        self.flags.update({setting.name: setting for setting in settings})

    def public_depth(self, *paths: str) -> None:
        """Set the number of blocks of the public checkpoint that the value at one of these paths names.

        The value may be a directory, whose last part is the name of the checkpoint.
        """
        for path in paths:
            placed = self.tree.get(path)
            name = placed.value if placed is not None and isinstance(placed.value, str) else ""
            depth, other = depth_of(name), other_parts(name)
            if placed is not None and other is not None:
                self.open.append(IgnoredSetting(name, other, placed.location))
            if placed is not None and name and depth is None:
                self.checkpoint = self.checkpoint or (name, placed.location)
            if placed is not None and depth is not None and LAYERS not in self.flags:
                self.flags[LAYERS] = Setting(LAYERS, (str(depth),), placed.location, placed.location)
                if not is_public(name):
                    note = f"`{name}` is taken for the public checkpoint of that name: {depth} blocks"
                    self.notes.append((note, placed.location))

    def arguments(self, command_args: Arguments | None = None) -> Arguments:
        """Return the arguments of the training, for Megatron-LM's importer; ``command_args`` are from a command."""
        source = self.tree.source
        if command_args is None:
            chunks = self.flags.get(CHUNKS)
            if chunks is not None and (LAYOUT in self.flags or chunks.value == "1"):
                del self.flags[CHUNKS]
            command_args = Arguments(source.file, source.lines, {}, {}, has_all=True)
        return replace(
            command_args, flags=self.flags, notes=tuple(self.notes), checkpoint=self.checkpoint,
            world_size=self.world_size or command_args.world_size, open=(*command_args.open, *self.open),
        )  # fmt: skip

    def refuse(self, message: str, location: Location, help: str | None = None) -> NoReturn:
        """End the import.

        Raises:
            PlanFileError: always, PP170.
        """
        raise unreadable(message, location, help, self.tree.source)


def _flag_with(flag: str, name: str, placed: Placed) -> Iterator[Setting]:
    """Yield a flag with the value of an attribute or a key."""
    value, location = placed.value, placed.location
    if flag == LAYOUT:
        value = layout_text(value)
    if not is_known(value):
        why = value.why if isinstance(value, Unknown) else "no plain value"
        yield Setting(flag, (None,), location, location, f"{why} (`{name}`)")
    elif value is None or value is False or value == []:
        return
    elif value is True:
        yield Setting(flag, (), location, location)
    else:
        yield Setting(flag, (str(value),), location, location)
        if flag == "--num-query-groups":
            yield Setting("--group-query-attention", (), location, location)


def layout_text(value: Any) -> Any:
    """Return a layout as the string of Megatron-LM; lists of layers for each stage are joined."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not is_known(value):
        return value
    stages = [stage if isinstance(stage, list | tuple) else [stage] for stage in value]
    return "|".join("".join(_LETTERS.get(str(layer), str(layer)) for layer in stage) for stage in stages)
