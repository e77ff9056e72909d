"""Keys of launchers for Megatron-Core, as flags of Megatron-LM: one table, and the refusal of misspelt keys.

NeMo-RL, verl and ms-swift name their keys like the attributes of Megatron-Core's configuration, or like the arguments
of Megatron-LM. A launcher adds the names that only it has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, NoReturn

from pipeproof.diagnostics.finding import Location
from pipeproof.diagnostics.source import PlanFileError, SourceMap
from pipeproof.interop.importers.draft import misspelt
from pipeproof.interop.importers.import_codes import UNREADABLE
from pipeproof.interop.importers.imported import Flags
from pipeproof.interop.importers.megatron.flag_values import Arguments, Setting
from pipeproof.interop.importers.megatron.flags import FLAGS, NOT_SHOWN, WITHOUT_BEARING
from pipeproof.interop.importers.megatron.stage_flags import CHUNKS, LAYOUT
from pipeproof.interop.importers.recipes.layered_yaml import Placed, Unknown, is_known
from pipeproof.interop.importers.recipes.megatron_settings import MODEL_FLAGS, NEGATED, plain_setting, settings_of
from pipeproof.interop.importers.recipes.public_checkpoints import depth_of, is_public

KEYS: Final[Mapping[str, str]] = MappingProxyType(
    {
        **{flag[2:].replace("-", "_"): flag for flag in (*FLAGS, *NOT_SHOWN) if not flag.startswith("--no-")},
        **MODEL_FLAGS,
    }
)
"""Arguments of Megatron-LM and attributes of Megatron-Core, and their flags."""

_WITHOUT_BEARING: Final = frozenset(flag[2:].replace("-", "_") for flag in WITHOUT_BEARING)
_ADAPTERS: Final = frozenset({"lora_rank"})
"""Keys of adapters, whose names are similar to a flag of latent attention."""
PP: Final = "--pipeline-model-parallel-size"


@dataclass
class LauncherSettings:
    """Flags of a training that a launcher's file means, by name, and the source of their lines.

    ``notes`` are assumptions about the file; ``world_size`` is the number of processes that train, if the file has it.
    """

    launcher: str
    source: SourceMap
    flags: dict[str, Setting] = field(default_factory=dict)
    notes: list[tuple[str, Location]] = field(default_factory=list)
    world_size: int | None = None

    def add(self, settings: Iterator[Setting]) -> None:
        """Add flags; a later one wins."""
        self.flags.update({setting.name: setting for setting in settings})

    def switch(self, flag: str, location: Location) -> None:
        """Set a flag without a value that the launcher always sets."""
        self.flags.setdefault(flag, Setting(flag, (), location, location))

    def default(self, flag: str, value: object, location: Location) -> None:
        """Set a flag to the launcher's own default, unless the file has it."""
        self.flags.setdefault(flag, Setting(flag, (str(value),), location, location))

    def unknown(self, flag: str, why: str, location: Location) -> None:
        """Set a flag whose value only a run determines; ``why`` completes "the value is ..."."""
        self.flags[flag] = Setting(flag, (None,), location, location, why)

    def read(self, values: Mapping[str, Placed], shown: str, own: Mapping[str, str] = MappingProxyType({}),
             elsewhere: Collection[str] = ()) -> None:  # fmt: skip
        """Add the flags of a section's keys; ``own`` are names of the launcher, ``elsewhere`` those read before.

        Keys without a flag are listed by the importer of Megatron-LM, with ``shown`` before their names.

        Raises:
            PlanFileError: PP170, a key is a misspelling of one with a flag.
        """
        keys = {**KEYS, **own}
        known = (*keys, *NEGATED)
        settled = {*known, *elsewhere, *_WITHOUT_BEARING, *_ADAPTERS}
        for name, placed in values.items():
            near = None if name in settled else misspelt(name, known)
            if near is not None:
                self.refuse(f"`{shown}{name}` is no key of {self.launcher}", placed.location, f"did you mean `{near}`?")
        read = {name: placed for name, placed in values.items() if name not in elsewhere}
        self.add(settings_of(iter(read.items()), keys, shown))
        for name, placed in read.items():
            if name not in known and name not in _WITHOUT_BEARING:
                key = f"{shown}{name}"
                self.flags[key] = Setting(key, (_text(placed.value),), placed.location, placed.location)

    def take(self, flag: str, placed: Placed | None, name: str) -> None:
        """Add one flag with the value of a key; nothing without one."""
        self.add(plain_setting(flag, placed, name))

    def public_depth(self, model: Placed | None, flags: Flags) -> None:
        """Set the number of blocks of a public checkpoint, or refuse a pipeline of an unknown number.

        The name may be that of a directory: its last part is then the name of the checkpoint.

        Raises:
            PlanFileError: PP170, neither the file nor an option has the number.
        """
        name = model.value if model is not None and isinstance(model.value, str) else ""
        depth = depth_of(name)
        if model is not None and depth is not None and "--num-layers" not in self.flags:
            setting = Setting("--num-layers", (str(depth),), model.location, model.location)
            self.flags["--num-layers"] = setting
            if not is_public(name):
                note = f"`{name}` is taken for the public checkpoint of that name: {depth} blocks"
                self.notes.append((note, model.location))
        pp = self.flags.get(PP)
        is_given = ("model", "num_layers") in flags.settings or flags.model_config is not None
        if is_given or "--num-layers" in self.flags or pp is None or pp.value == "1":
            return
        named = f"of `{name}` " if name else ""
        self.refuse(
            f"the number of blocks {named}is not in the file, and decides whether they divide over the pipeline",
            pp.location if model is None else model.location,
            "give it with `--set model.num_layers=N`, or `--model-config FILE`",
        )

    def arguments(self) -> Arguments:
        """Return the arguments of the training, for the importer of Megatron-LM."""
        if LAYOUT in self.flags:
            self.flags.pop(CHUNKS, None)
        chunks = self.flags.get(CHUNKS)
        if chunks is not None and chunks.value == "1":
            del self.flags[CHUNKS]
        return Arguments(
            self.source.file, self.source.lines, self.flags, {}, tuple(self.notes), self.world_size, has_all=True
        )

    def refuse(self, message: str, location: Location, help: str | None = None) -> NoReturn:
        """End the import.

        Raises:
            PlanFileError: always, PP170.
        """
        raise PlanFileError(UNREADABLE.finding(message, location, help), source=self.source)


def _text(value: object) -> str | None:
    if isinstance(value, Unknown) or not is_known(value):
        return None
    return str(value)
