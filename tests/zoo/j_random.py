"""Family J: recomputation and random numbers."""

from pipeproof.comm.plan_context import Mesh
from pipeproof.verify.declared_facts import RngDraw, RngFacts, RngRegion
from tests.zoo.case import Case
from tests.zoo.facts import stated

MESH = Mesh(("tp", "dp"), (2, 2))
REGIONS = (RngRegion("dropout", frozenset({"dp", "cp"})), RngRegion("experts", frozenset({"tp", "dp"})))


def draws_of(key_of, replay_key_of=None):
    """Both regions of one layer on four ranks; ``key_of`` a region and its rank's coordinates, and of the replay."""
    draws = []
    for rank in range(MESH.num_ranks):
        coords = MESH.coords(rank)
        for region in REGIONS:
            draws.append(RngDraw(rank, "layer.0", 0, region.name, key_of(region.name, coords)))
            if replay_key_of is not None:
                draws.append(RngDraw(rank, "layer.0", 0, region.name, replay_key_of(region.name, coords), replay=True))
    return stated(num_ranks=MESH.num_ranks, rng=RngFacts(MESH, REGIONS, tuple(draws)))


def right_key(region, coords):
    """Expert weights differ on every rank; weights that TP ranks hold together are equal on them."""
    return f"{region} dp {coords['dp']}" + (f" tp {coords['tp']}" if region == "experts" else "")


CASES = (
    Case(
        "J2",
        "the generator's state is not passed from the forward to the recomputation",
        lambda: draws_of(right_key, right_key),
        lambda: draws_of(right_key, lambda region, coords: "state of the backward"),
        kills=("PP119",),
    ),
    Case(
        "J3",
        "the expert generator's state is saved as if it were the same on all ranks",
        lambda: draws_of(right_key),
        lambda: draws_of(lambda region, coords: f"{region} dp {coords['dp']}"),
        kills=("PP120",),
    ),
    Case(
        "J3.loader",
        "the data loader draws on TP rank 0 alone, and its generator runs ahead of the others",
        lambda: draws_of(right_key),
        lambda: draws_of(lambda region, coords: right_key(region, coords) + " +1" * (coords["tp"] == 0)),
        kills=("PP120",),
    ),
)
