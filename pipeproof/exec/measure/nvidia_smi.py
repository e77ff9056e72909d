"""GPUs of a machine and the links between them by ``nvidia-smi``; empty if it is missing."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

_TIMEOUT_S = 20.0
_FIELDS = MappingProxyType(
    {
        "index": "index",
        "name": "name",
        "driver": "driver_version",
        "memory": "memory.total",
        "clock": "clocks.sm",
        "max_clock": "clocks.max.sm",
        "power_limit": "power.limit",
    }
)
"""Queried fields by the names that the doctor uses."""
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_GPU = re.compile(r"GPU\d+")
_LINK_MEANINGS = MappingProxyType(
    {
        "NV": "NVLinks, their number follows NV",
        "PIX": "one PCIe bridge",
        "PXB": "several PCIe bridges",
        "PHB": "a PCIe host bridge",
        "NODE": "PCIe and the host bridges of one NUMA node",
        "SYS": "PCIe and the links between NUMA nodes",
    }
)


@dataclass(frozen=True, slots=True)
class GpuLink:
    """Link between two GPUs, by their numbers; ``kind`` is the name of ``nvidia-smi topo -m``."""

    first: int
    second: int
    kind: str

    @property
    def meaning(self) -> str:
        """Description of the kind, empty for an unknown one."""
        key = "NV" if re.fullmatch(r"NV\d+", self.kind) else self.kind
        return _LINK_MEANINGS.get(key, "")


def gpu_properties() -> tuple[Mapping[str, str], ...]:
    """Return the properties of each GPU, values with their units; empty without ``nvidia-smi``."""
    return parse_gpus(_queried(_FIELDS))


def gpu_links() -> tuple[GpuLink, ...]:
    """Return the links between GPUs; empty without ``nvidia-smi``."""
    return parse_links(_output("topo", "-m"))


def parse_gpus(text: str, fields: Mapping[str, str] = _FIELDS) -> tuple[Mapping[str, str], ...]:
    """Parse lines of comma-separated values of ``fields``; unavailable values are left out."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
    return tuple(
        {key: cell for key, cell in zip(fields, row, strict=True) if not cell.startswith("[")}
        for row in rows
        if len(row) == len(fields)
    )


def parse_links(text: str) -> tuple[GpuLink, ...]:
    """Parse the upper half of the matrix of GPUs."""
    links: list[GpuLink] = []
    lines = [[cell.strip() for cell in line.split("\t")] for line in _ESCAPES.sub("", text).splitlines()]
    columns = next(([cell for cell in line if _GPU.fullmatch(cell)] for line in lines if not line[0]), [])
    for line in lines:
        if _GPU.fullmatch(line[0]) and len(line) > len(columns):
            row = int(line[0][3:])
            cells = zip(columns, line[1:], strict=False)
            links += [GpuLink(row, int(name[3:]), kind) for name, kind in cells if int(name[3:]) > row]
    return tuple(links)


def _queried(fields: Mapping[str, str]) -> str:
    return _output(f"--query-gpu={','.join(fields.values())}", "--format=csv,noheader")


def _output(*arguments: str) -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
