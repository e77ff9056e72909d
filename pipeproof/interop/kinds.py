"""The kinds of files that can be imported, and which module reads each."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeproof.interop.imported import Flags, Imported, Importer


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of files: what they are, and ``module:function`` of its importer, loaded when it is used."""

    what: str
    home: str

    def load(self) -> Importer:
        """The importer."""
        module, _, name = self.home.partition(":")
        found: Importer = getattr(importlib.import_module(f"pipeproof.interop.{module}"), name)
        return found


_FORMERS = Kind(
    "training arguments of PaddleFormers, PaddleNLP or ERNIE (YAML or JSON)", "paddle.formers:import_formers"
)

KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "fleet": Kind("a Fleet DistributedStrategy saved as prototxt", "paddle.fleet:import_fleet"),
        "paddleformers": _FORMERS,
        "paddlenlp": _FORMERS,
        "ernie": _FORMERS,
        "megatron": Kind(
            "a shell script or a file with the arguments of Megatron-LM", "megatron.importer:import_megatron"
        ),
        "torchtitan": Kind("a TOML job configuration of torchtitan", "torchtitan:import_torchtitan"),
        "deepspeed": Kind("a JSON configuration for DeepSpeed's pipeline engine", "deepspeed:import_deepspeed"),
        "torch-csv": Kind("a schedule that PyTorch wrote as CSV", "torch_csv:import_torch_csv"),
    }
)
"""By name on the command line; several names may mean one kind."""


def import_files(kind: str, files: Sequence[Path], flags: Flags) -> Imported:
    """Import files of a kind of ``KINDS``.

    Raises:
        PlanFileError: a file cannot be read, or can be no plan; with its places.
    """
    return KINDS[kind].load()(files, flags)
