"""Kinds of files that can be imported, and the module that reads each."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from pipeproof.diagnostics.finding import Location
from pipeproof.diagnostics.source import read_text
from pipeproof.foreign_text import NOT_READ, OF_OTHER_TRAINERS

if TYPE_CHECKING:
    from pipeproof.interop.importers.imported import Flags, Imported, Importer


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of files: its description, and ``module:function`` of its importer, loaded at first use."""

    description: str
    importer: str

    def load(self) -> Importer:
        """Import the module, and return its importer; for a table of a tool, the common reader."""
        module, _, name = self.importer.partition(":")
        attribute = getattr(importlib.import_module(f"pipeproof.interop.importers.{module}"), name)
        if module.startswith("tools."):
            from pipeproof.interop.importers.reader import import_tool

            return partial(import_tool, attribute)
        importer: Importer = attribute
        return importer


_FORMERS = Kind(
    "training arguments of PaddleFormers or PaddleNLP (YAML or JSON)", "paddle.training_arguments:import_formers"
)

KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "fleet": Kind("a Fleet DistributedStrategy saved as prototxt", "paddle.fleet_strategy:import_fleet"),
        "paddleformers": _FORMERS,
        "paddlenlp": _FORMERS,
        "ernie": Kind(
            "a configuration of ERNIEKit, or other training arguments of ERNIE (YAML or JSON)",
            "paddle.erniekit:import_ernie",
        ),
        "megatron": Kind(
            "a script with the arguments of Megatron-LM, MindSpeed, slime or Pai-Megatron-Patch, or a log with them",
            "tools.tool:MEGATRON_LM",
        ),
        "verl": Kind("a shell script that starts verl with its Megatron backend", "tools.trainers:VERL"),
        "megatron-bridge": Kind("the run_config.yaml of a training of Megatron-Bridge", "tools.trainers:BRIDGE"),
        "torchtitan": Kind("a TOML job configuration of torchtitan", "torchtitan:import_torchtitan"),
        "schedule": Kind("a schedule file, such as the CSV that PyTorch writes", "schedule_file:import_schedule"),
    }
)
"""Kinds by name on the command line; several names may mean one kind."""


_VALUES = (".yaml", ".yml", ".json")


def import_files(kind: str, files: Sequence[Path], flags: Flags) -> Imported:
    """Import files of a kind of ``KINDS``.

    Raises:
        PlanFileError: a file cannot be read, or does not form a plan; with locations.
    """
    from pipeproof.interop.importers.import_codes import PYTHON, unreadable

    for file in files:
        if file.suffix == ".py":
            fix = None
            if kind == "fleet":
                fix = 'call `strategy.save_to_prototxt("strategy.prototxt")` where the strategy is made, then run\n'
                fix += "`pipeproof check --from fleet strategy.prototxt`"
            message = PYTHON if fix is None else PYTHON.split(":")[0]
            raise unreadable(message, Location(str(file)), fix)
        text = read_text(str(file)) if file.suffix in _VALUES else ""
        foreign = OF_OTHER_TRAINERS.search(text)
        if foreign is not None:
            looks, _, fix = f"this looks like {NOT_READ}".partition(": ")
            line = text.count("\n", 0, foreign.end()) + 1
            raise unreadable(looks, Location(str(file), line), fix)
    from pipeproof.interop.importers.imported import repeatable

    return repeatable(partial(KINDS[kind].load(), files), flags)
