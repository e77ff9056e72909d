"""A rank map in the form that the launcher takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from pipeproof.diagnostics.number_ranges import ranges_text
from pipeproof.exec.launch.launcher_table import KUBERNETES, OPEN_MPI, PADDLE, SLURM, TORCHRUN
from pipeproof.exec.placement.rank_map import RankMap, is_contiguous
from pipeproof.exec.placement.rank_placement import RankPlacement

BLOCKS = {SLURM.name: "srun --distribution=block", OPEN_MPI.name: "mpirun --map-by slot"}
"""Options that number the processes of hosts of equal size host by host."""
HOSTFILES = {
    SLURM.name: "SLURM_HOSTFILE=HOSTS srun --distribution=arbitrary",
    OPEN_MPI.name: "mpirun --hostfile HOSTS --map-by seq",
}
"""Options that take the host of each rank from a file with one line per rank."""
_MOST_HOSTS = 8
"""Most hosts that the text of a map names."""
_WRITE_HOSTS = "jq -r '.placement.map.hosts[]' REPORT > HOSTS"


def can_move(placements: Sequence[RankPlacement]) -> bool:
    """Return False if the launcher numbers the processes of each host consecutively and takes no map."""
    numbers_hosts = {TORCHRUN.name, PADDLE.name} & {place.launcher for place in placements}
    return not (numbers_hosts and is_contiguous([place.host_key for place in placements]))


def hosts_of(proposal: RankMap, placements: Sequence[RankPlacement]) -> tuple[str, ...]:
    """Host of each rank by a map; another order of the plan leaves ranks where they are."""
    processes = proposal.processes if proposal.order is None else range(len(placements))
    return tuple(placements[process].host for process in processes)


def map_text(proposal: RankMap, placements: Sequence[RankPlacement]) -> str:
    """Return the map in words: ``ranks 0-7 on n0, 8-15 on n1``, or the plan's key to change."""
    if proposal.order is not None:
        return f"`topology.order: [{', '.join(proposal.order)}]`"
    ranks = defaultdict[str, list[int]](list)
    for rank, host in enumerate(hosts_of(proposal, placements)):
        ranks[host].append(rank)
    shown = [f"{ranges_text(numbers)} on {host}" for host, numbers in ranks.items()]
    if len(shown) > _MOST_HOSTS:
        shown[_MOST_HOSTS:] = [f"and {len(shown) - _MOST_HOSTS} more hosts, in `--report`"]
    return f"ranks {'; '.join(shown)}"


def how_to(proposal: RankMap, placements: Sequence[RankPlacement]) -> str:
    """Return how the launcher is given a map; empty for a change of the plan."""
    if proposal.order is not None:
        return ""
    launcher, hosts = placements[0].launcher, hosts_of(proposal, placements)
    sizes = {hosts.count(host) for host in set(hosts)}
    if launcher in BLOCKS and len(sizes) == 1 and is_contiguous(hosts):
        return f"start it with `{BLOCKS[launcher]}`"
    if launcher in HOSTFILES:
        return f"with REPORT of `--report`: `{_WRITE_HOSTS}`, then `{HOSTFILES[launcher]}`"
    if launcher == KUBERNETES.name:
        return "Kubernetes chooses the node of each pod: start one pod per node (docs/job-files.md)"
    return "number the processes by this map; `--report` has it under `placement.map`"
