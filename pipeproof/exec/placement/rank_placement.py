"""Facts about the place of one process: host, GPU, NVLink domain, switches. Each is read without starting CUDA.

A fact that is not known is empty. It is never derived from another one, such as a rack from the name of a host.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Field, StringConstraints, TypeAdapter, ValidationError

from pipeproof.exec.launch.launched_rank import LaunchedRank
from pipeproof.exec.launch.launcher_table import PADDLE, TORCHRUN, value_of
from pipeproof.exec.launch.process_state import boot_id
from pipeproof.exec.measure.nvidia_smi import gpu_identities, gpu_links

_Environment = Mapping[str, str]

MOST_BYTES = 16_384
"""Bound of one rank's facts as JSON; a store's value may have four times as many bytes."""

NODE, RACK, ZONE = "PIPEPROOF_NODE", "PIPEPROOF_RACK", "PIPEPROOF_ZONE"
"""Labels that a job file may set. Kubernetes knows the node's name in a pod; labels of nodes come from elsewhere."""

_NO_CLUSTER = "00000000-0000-0000-0000-000000000000"
"""Cluster of a GPU whose fabric does not leave its host."""

Text = Annotated[str, StringConstraints(max_length=256, pattern=r"^[\x20-\x7e]*$")]
"""A printable text; empty if unknown."""
_Uuids = Annotated[tuple[Text, ...], Field(max_length=64)]
_Label = Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=r"^[\x21-\x7e]+$")]


@dataclass(frozen=True, slots=True)
class GpuPlace:
    """The GPU of a process.

    ``domain`` is the NVLink domain beyond its host: cluster and clique of the fabric. ``nvlinks`` and ``pcie`` are the
    UUIDs of the GPUs of its host that it reaches by NVLink, or only by PCIe. A container may not see them all.
    """

    name: Text = ""
    uuid: Text = ""
    bus: Text = ""
    domain: Text = ""
    nvlinks: _Uuids = ()
    pcie: _Uuids = ()


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """The place of one process.

    ``host`` is the name by which the launcher knows the host. ``boot_id`` identifies its kernel, which containers of
    one host share; it is empty where a label names the host, which then identifies it. ``switches`` lead from the top
    of the network to the host. ``launcher`` is a name of the table of launchers, empty if pipeproof started the
    process.
    """

    host: _Label
    boot_id: Text = ""
    local_rank: Annotated[int, Field(ge=0)] | None = None
    launcher: Text = ""
    switches: Annotated[tuple[_Label, ...], Field(max_length=16)] = ()
    gpu: GpuPlace | None = None

    @property
    def host_key(self) -> str:
        """Identity of the host: its kernel's, else its name."""
        return f"boot {self.boot_id}" if self.boot_id else f"name {self.host}"

    @property
    def node_key(self) -> str:
        """Identity of what a plan calls a node: the NVLink domain, else the host."""
        return f"domain {self.gpu.domain}" if self.gpu is not None and self.gpu.domain else self.host_key

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object for ``placement_from_json``."""
        content: dict[str, Any] = _FORM.dump_python(self, mode="json")
        return content


_FORM = TypeAdapter(RankPlacement)


def placement_from_json(content: object) -> RankPlacement:
    """Read what ``RankPlacement.to_json`` returned on another rank.

    Raises:
        ValueError: this is not the facts of a process, or there are too many.
    """
    text = json.dumps(content)
    if len(text) > MOST_BYTES:
        raise ValueError(f"the facts of a rank have {len(text)} bytes; at most {MOST_BYTES} are read")
    try:
        return _FORM.validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def own_placement(
    environment: _Environment, launched: LaunchedRank | None = None, *, on_gpu: bool = False
) -> RankPlacement:
    """Return the facts of this process, ``launched`` by a launcher or not; with ``on_gpu`` also those of its GPU.

    A text that is too long or not printable counts as unknown.
    """
    local_rank = _local_rank(environment) if launched is None else launched.local_rank
    node = environment.get(NODE, "")
    names = (node, environment.get("SLURMD_NODENAME", ""), socket.gethostname())
    place = RankPlacement(
        host=next(filter(_fits, names), "unknown"),
        boot_id="" if _fits(node) else boot_id(),
        local_rank=local_rank,
        launcher="" if launched is None else launched.launcher.name,
        switches=switches_of(environment),
        gpu=_gpu(environment, local_rank or 0) if on_gpu else None,
    )
    if len(json.dumps(place.to_json())) > MOST_BYTES:
        return replace(place, gpu=None, switches=())
    return place


def switches_of(environment: _Environment) -> tuple[str, ...]:
    """Names of the network's levels from its top to the host: Slurm's switches, else zone and rack; () if unknown.

    Slurm's address has one component for each word of its pattern, the last one the node.
    """
    address, pattern = (environment.get(f"SLURM_TOPOLOGY_ADDR{end}", "") for end in ("", "_PATTERN"))
    words = pattern.split(".")
    names = address.split(".", len(words) - 1)  # the name of a node may have dots
    if address and words[-1] == "node" and len(names) == len(words):
        labels = names[:-1]
    else:
        labels = [environment[name] for name in (ZONE, RACK) if environment.get(name)]
    return tuple(labels) if len(labels) <= 16 and all(map(_fits, labels)) else ()


def _local_rank(environment: _Environment) -> int | None:
    """Rank on this host by the variables that frameworks read, None without or with wrong ones."""
    try:
        return value_of(TORCHRUN.local_rank + PADDLE.local_rank, environment)
    except ValueError:
        return None


def _fits(label: str) -> bool:
    return 0 < len(label) <= 256 and label.isascii() and label.isprintable() and " " not in label


def _gpu(environment: _Environment, local_rank: int) -> GpuPlace | None:
    """Return the GPU that CUDA will give this process, None if that is unknown."""
    gpus = gpu_identities()
    index = _gpu_index(environment.get("CUDA_VISIBLE_DEVICES"), gpus, local_rank)
    by_index = {gpu.get("index", ""): gpu for gpu in gpus}
    row = by_index.get(index)
    if row is None or (
        len({gpu.get("name") for gpu in gpus}) > 1 and environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"
    ):
        return None  # CUDA numbers different GPUs by their speed, nvidia-smi by their bus
    nvlinks, pcie = set[str](), set[str]()
    for link in gpu_links():
        ends = {str(link.first), str(link.second)}
        if index in ends and link.meaning:  # the meaning of an unknown kind is empty
            peers = {by_index.get(peer, {}).get("uuid", "") for peer in ends - {index}} - {""}
            (nvlinks if link.kind.startswith("NV") else pcie).update(peers)
    domain = ""
    if row.get("state") == "Completed" and row.get("cluster", _NO_CLUSTER) != _NO_CLUSTER and "clique" in row:
        domain = f"{row['cluster']}.{row['clique']}"
    name, uuid, bus = (row.get(key, "") for key in ("name", "uuid", "bus"))
    return GpuPlace(name, uuid, bus, domain, tuple(sorted(nvlinks)), tuple(sorted(pcie)))


def _gpu_index(visible: str | None, gpus: tuple[Mapping[str, str], ...], local_rank: int) -> str:
    """Index by ``nvidia-smi`` of the ``local_rank``-th visible GPU, empty if unknown."""
    indices = [gpu.get("index", "") for gpu in gpus]
    if visible is not None:
        by_uuid = {gpu.get("uuid", ""): gpu.get("index", "") for gpu in gpus}
        indices = [by_uuid.get(entry.strip(), entry.strip()) for entry in visible.split(",")]
    return indices[local_rank] if local_rank < len(indices) else ""
