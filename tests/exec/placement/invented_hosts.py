"""Places of ranks on invented hosts, and a plan on two nodes of eight."""

from pipeproof.exec.launch.launcher_table import SLURM
from pipeproof.exec.placement.rank_placement import RankPlacement
from tests.plans import subject

NETWORK = {
    "ranks_per_node": 8,
    "node": {"latency_us": 2, "bandwidth": 300},
    "between": {"latency_us": 10, "bandwidth": 20},
    "launch_us": 5,
}
MODEL = {"num_layers": 8, "hidden_size": 1024, "num_heads": 16, "ffn_size": 4096, "vocab_size": 1024, "seq_length": 512}


def planned(topology, network=NETWORK, **sections):
    """A subject of a model that is large enough for its links to count; without a network, times have no places."""
    cost = {"forward_us": 10_000, "backward_us": 20_000} | ({"network": network} if network else {})
    return subject(model=MODEL, topology=topology, cost=cost, **sections)


def places(hosts, launcher=SLURM.name, **facts):
    """Process p on host ``hosts[p]``."""
    return [
        RankPlacement(f"n{host}", f"boot-{host}", [*hosts[:rank]].count(host), launcher, **facts)
        for rank, host in enumerate(hosts)
    ]


def blocks(size, count):
    """Host of each process, numbered host by host."""
    return [host for host in range(count) for _ in range(size)]


def cyclic(size, count):
    """Host of each process, assigned round-robin as by ``srun --distribution=cyclic``."""
    return [*range(count)] * size
