"""Comparison of the hosts of all ranks with the order of ranks that a plan assumes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeproof.cost.analytic_links import groups_of
from pipeproof.diagnostics.finding import Finding
from pipeproof.exec.launch.hosts import Host
from pipeproof.exec.run_codes import SPLIT_NODE
from pipeproof.verify.subject import Subject


def split_groups(subject: Subject, hosts: Sequence[Host]) -> tuple[Finding, ...]:
    """Return a warning for each axis with groups on several hosts that consecutive ranks would keep on one.

    The plan assumes that ranks are numbered host by host, as many on each host as the launcher started there.
    """
    host_of_rank = np.empty(subject.plan.spec.topology.num_ranks, dtype=np.int64)
    for number, host in enumerate(hosts):
        host_of_rank[list(host.ranks)] = number
    in_order = np.repeat(np.arange(len(hosts)), [len(host.ranks) for host in hosts])
    findings = []
    for axis in subject.plan.spec.topology.order:
        groups = groups_of(subject.plan.spec.topology, axis)
        pairs = np.stack([groups[:, :-1], groups[:, 1:]], axis=2).reshape(-1, 2)
        split = (np.diff(host_of_rank[pairs])[:, 0] != 0) & (np.diff(in_order[pairs])[:, 0] == 0)
        if split.any():
            first, second = pairs[int(np.argmax(split))].tolist()
            names = " and ".join(hosts[host_of_rank[rank]].name for rank in (first, second))
            findings.append(
                SPLIT_NODE.finding(
                    f"ranks {first} and {second} of one {axis} group are on {names}; with ranks numbered host by host "
                    f"both would be on one host ({int(split.sum())} such pairs)",
                    location=subject.locate("topology", "order"),
                    help="number ranks host by host (Slurm: `--distribution=block`, Open MPI: `--map-by slot`), or put "
                    "the axes with the most communication first in `topology.order`",
                )
            )
    return tuple(findings)
