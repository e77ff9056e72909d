"""The key ``cost.network``: what messages and collectives take on links inside nodes and between them."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from pipeproof.specs.problems import Problem, listed
from pipeproof.specs.times import Time

if TYPE_CHECKING:
    from pipeproof.specs.cost import CostSpec
    from pipeproof.specs.plan import PlanSpec

Algorithm = Literal["ring", "tree", "auto"]
"""How all-reduces go; everything else has one way."""

_OF_A_DATA_SHEET = {
    "ranks_per_node": "set cost.analytic.ranks_per_node",
    "node": "set cost.analytic.link_efficiency and cost.analytic.node_step_us",
    "between": "set cost.analytic.link_efficiency and cost.analytic.network_step_us",
    "launch_us": "set cost.analytic.launch_us",
}
"""What ``cost.analytic`` says of links, and where."""


class LinkSpec(BaseModel):
    """One sort of link."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    bandwidth: float = Field(
        gt=0, le=10**6, description="GB/s (10^9 bytes) in one direction, as reached; both directions at once have it."
    )
    latency_us: Time = Field(
        default=Fraction(0),
        description="Latency of a message, or of a step of a collective.",
        json_schema_extra={"default": 0},
    )


class EdgeSpec(BaseModel):
    """What messages from one rank to another take, as measured; `pipeproof rehearse PLAN -o FILE` writes these."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    source: int = Field(ge=0, description="Global rank that sends.")
    destination: int = Field(ge=0, description="Global rank that receives.")
    bandwidth: float = Field(gt=0, le=10**6, description="GB/s (10^9 bytes), as reached.")
    latency_us: Time = Field(
        default=Fraction(0),
        description="What a message takes without its bytes, all in all: `launch_us` does not come on top.",
        json_schema_extra={"default": 0},
    )


class NetworkSpec(BaseModel):
    """The links between ranks, from which messages and collectives have their times.

    Beside ``cost.analytic``, whose data sheet has the links, only
    ``ranks_per_nic``, ``algorithm``, ``contention`` and ``edges`` may be given.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    ranks_per_node: int | None = Field(
        default=None, ge=1, le=2**16, description="Neighbouring global ranks that fast links join."
    )
    node: LinkSpec | None = Field(default=None, description="What a rank has to the others of its node.")
    between: LinkSpec | None = Field(default=None, description="What a network card has to other nodes.")
    ranks_per_nic: int = Field(
        default=1, ge=1, le=2**16, description="Neighbouring ranks of a node that share a network card."
    )
    launch_us: Time | None = Field(
        default=None,
        description="What a message or a collective takes before its first byte moves; 0 without it.",
    )
    algorithm: Algorithm = Field(
        default="ring", description="Of all-reduces: ring, tree, or auto for the faster of the two at each size."
    )
    contention: bool = Field(
        default=False, description="Whether what uses a link at the same time shares it, or each has it to itself."
    )
    edges: tuple[EdgeSpec, ...] = Field(
        default=(),
        strict=False,
        description="Pairs of ranks whose messages take what was measured of them, each pair and direction once; "
        "those of all others, and all collectives, go by the rest.",
        json_schema_extra={"default": []},
    )


def check_network(plan: PlanSpec) -> list[Problem]:
    """No time is described twice (PP106), what the mesh needs is there (PP104), and cards fill nodes (PP106)."""
    cost, network = plan.cost, plan.cost.network
    if network is None:
        return []
    if cost.profile is not None:
        return [
            Problem(
                "PP106",
                ("cost", "network"),
                "`cost.network` is given together with `cost.profile`, which measured messages and collectives",
                help="remove one of them",
                at_key=True,
            )
        ]
    if cost.analytic is not None:
        return [
            Problem(
                "PP106",
                ("cost", "network", key),
                f"`cost.network.{key}` is given together with `cost.analytic`, which has it",
                help=f"remove it; to change it, {mend}",
                at_key=True,
            )
            for key, mend in _OF_A_DATA_SHEET.items()
            if getattr(network, key) is not None
        ] + _odd_edges(plan, network)
    return [*_latency(cost), *_missing(plan, network), *_odd_cards(network), *_odd_edges(plan, network)]


def _latency(cost: CostSpec) -> list[Problem]:
    if "p2p_latency_us" not in cost.model_fields_set:
        return []
    message = "`cost.p2p_latency_us` is given together with `cost.network`, from which messages have their times"
    mend = "remove p2p_latency_us, or remove network to give every message the same time"
    return [Problem("PP106", ("cost", "p2p_latency_us"), message, help=mend, at_key=True)]


def _missing(plan: PlanSpec, network: NetworkSpec) -> list[Problem]:
    needed = ["ranks_per_node", "node"]
    num_ranks = plan.topology.num_ranks
    if network.ranks_per_node is not None and num_ranks > network.ranks_per_node:
        needed.append("between")
    missing = [key for key in needed if getattr(network, key) is None]
    if not missing:
        return []
    names = listed([f"`cost.network.{key}`" for key in missing], "and")
    return [
        Problem(
            "PP104",
            ("cost", "network"),
            f"the links of {num_ranks} ranks need {names}",
            help="such as ranks_per_node: 8, node: {latency_us: 2, bandwidth: 300}, "
            "between: {latency_us: 5, bandwidth: 40}; or name a device with cost.analytic",
            at_key=True,
        )
    ]


def _odd_cards(network: NetworkSpec) -> list[Problem]:
    if network.ranks_per_node is None or network.ranks_per_node % network.ranks_per_nic == 0:
        return []
    message = (
        f"cost.network.ranks_per_node {network.ranks_per_node} does not divide by ranks_per_nic {network.ranks_per_nic}"
    )
    mend = "a network card belongs to one node: choose a divisor"
    return [Problem("PP106", ("cost", "network", "ranks_per_nic"), message, help=mend)]


def _odd_edges(plan: PlanSpec, network: NetworkSpec) -> list[Problem]:
    """Each is between two ranks of the plan and stands once, and none has to share its link."""
    here = ("cost", "network", "edges")
    if network.edges and network.contention:
        message = "`cost.network.edges` gives messages times of their own, and with `contention` they share links"
        mend = "remove one of them: what was measured had its link to itself"
        return [Problem("PP106", here, message, help=mend, at_key=True)]
    problems, found = [], set()
    last = plan.topology.num_ranks - 1
    for index, edge in enumerate(network.edges):
        pair = edge.source, edge.destination
        name = f"cost.network.edges[{index}] {edge.source}->{edge.destination}"
        if max(pair) > last:
            mend = "measure the plan that is simulated, or remove the edge"
            problems.append(Problem("PP106", (*here, index), f"{name}: the plan has ranks 0 to {last}", help=mend))
        elif edge.source == edge.destination:
            mend = "an edge joins two ranks"
            problems.append(Problem("PP106", (*here, index), f"{name} leads nowhere", help=mend))
        elif pair in found:
            mend = "remove one of the two"
            problems.append(Problem("PP106", (*here, index), f"{name} is given twice", help=mend))
        found.add(pair)
    return problems
