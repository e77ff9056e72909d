"""What ``nvidia-smi`` says of a machine's GPUs and of what joins them; nothing where it is not there."""

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
"""By our name what is asked for."""
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_GPU = re.compile(r"GPU\d+")
_LINK_WORDS = MappingProxyType(
    {
        "NV": "NVLinks, as many as the number says",
        "PIX": "one PCIe bridge",
        "PXB": "several PCIe bridges",
        "PHB": "a PCIe host bridge",
        "NODE": "PCIe and the host bridges of one NUMA node",
        "SYS": "PCIe and the links between NUMA nodes",
    }
)


@dataclass(frozen=True, slots=True)
class GpuLink:
    """What joins two GPUs, by their numbers; ``kind`` as ``nvidia-smi topo -m`` names it."""

    first: int
    second: int
    kind: str

    @property
    def meaning(self) -> str:
        """The kind in words, empty for one that is not known here."""
        key = "NV" if re.fullmatch(r"NV\d+", self.kind) else self.kind
        return _LINK_WORDS.get(key, "")


def described_gpus() -> tuple[Mapping[str, str], ...]:
    """One mapping for each GPU, with its units in the values; empty without ``nvidia-smi``."""
    text = _asked(f"--query-gpu={','.join(_FIELDS.values())}", "--format=csv,noheader")
    return parsed_gpus(text)


def gpu_links() -> tuple[GpuLink, ...]:
    """What joins each two GPUs; empty without ``nvidia-smi``."""
    return parsed_links(_asked("topo", "-m"))


def parsed_gpus(text: str) -> tuple[Mapping[str, str], ...]:
    """Lines of values between commas; what a GPU does not tell is left out."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
    return tuple(
        {key: cell for key, cell in zip(_FIELDS, row, strict=True) if not cell.startswith("[")}
        for row in rows
        if len(row) == len(_FIELDS)
    )


def parsed_links(text: str) -> tuple[GpuLink, ...]:
    """The upper half of the matrix of GPUs."""
    found = []
    lines = [[cell.strip() for cell in line.split("\t")] for line in _ESCAPES.sub("", text).splitlines()]
    columns = next(([cell for cell in line if _GPU.fullmatch(cell)] for line in lines if not line[0]), [])
    for line in lines:
        if _GPU.fullmatch(line[0]) and len(line) > len(columns):
            row = int(line[0][3:])
            others = zip(columns, line[1:], strict=False)
            found += [GpuLink(row, int(name[3:]), kind) for name, kind in others if int(name[3:]) > row]
    return tuple(found)


def _asked(*arguments: str) -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
