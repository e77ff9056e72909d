from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from pipeproof.comm.plan_context import Mesh

AXES = ("tp", "cp", "ep", "dp", "pp")
meshes = st.builds(
    lambda order, sizes: Mesh(tuple(order), tuple(sizes)),
    st.permutations(AXES),
    st.lists(st.integers(1, 4), min_size=5, max_size=5),
)


@given(meshes)
def test_coords_and_rank_are_inverse(mesh):
    assert [mesh.rank(mesh.coords(rank)) for rank in range(mesh.num_ranks)] == list(range(mesh.num_ranks))


@given(meshes)
def test_groups_of_an_axis_are_a_partition_whose_members_differ_in_that_axis_only(mesh):
    for axis in AXES:
        groups = list(mesh.groups(axis))
        assert sorted(rank for group in groups for rank in group.ranks) == list(range(mesh.num_ranks))
        for group in groups:
            assert [mesh.coords(rank)[axis] for rank in group.ranks] == list(range(mesh.size(axis)))
            others = [{a: c for a, c in mesh.coords(rank).items() if a != axis} for rank in group.ranks]
            assert all(other == others[0] for other in others)


def test_the_first_axis_is_the_fastest():
    mesh = Mesh(("tp", "dp", "pp"), (2, 1, 4))
    assert mesh.coords(5) == {"tp": 1, "dp": 0, "pp": 2}
    assert [group.ranks for group in mesh.groups("tp")] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert [group.ranks for group in mesh.groups("pp")] == [(0, 2, 4, 6), (1, 3, 5, 7)]


def test_the_order_of_axes_decides_who_is_neighbour():
    """A permuted order gives other groups: what the digest and the executor must agree on."""
    groups = {order: tuple(g.ranks for g in Mesh(order, (2, 2)).groups("tp")) for order in permutations(("tp", "pp"))}
    assert groups[("tp", "pp")] == ((0, 1), (2, 3))
    assert groups[("pp", "tp")] == ((0, 2), (1, 3))
