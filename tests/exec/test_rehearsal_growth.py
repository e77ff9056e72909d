"""Work of one rank of a rehearsal: it does not grow with the number of ranks."""

import pytest

from pipeproof.exec.rank.idle_messages import ping_edges, ping_sizes
from tests.exec.rehearsal_world import rehearsed
from tests.plans import subject

NUM_MICRO_BATCHES = 4
NUM_STEPS = 2
ELEMENTS = 8 * 2 * 16
"""Shape of a boundary tensor: sequence, micro-batch, hidden."""


def pipeline(num_ranks):
    return subject(model={"num_layers": 16}, topology={"pp": num_ranks}).unfolded()


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16])
def test_what_a_rank_receives_and_compares_does_not_depend_on_how_many_there_are(num_ranks):
    checked = rehearsed(pipeline(num_ranks))
    each_way = NUM_MICRO_BATCHES * NUM_STEPS
    received = [each_way, *[2 * each_way] * (num_ranks - 2), each_way]
    assert [one.messages for one in checked] == received
    assert [one.elements for one in checked] == [count * ELEMENTS for count in received]
    assert sum(one.messages for one in checked) == 2 * each_way * (num_ranks - 1)


class CountingWorld:
    """A rank's world that counts its calls; messages take no time."""

    def __init__(self, rank):
        self.rank, self.channels, self.posts, self.barriers = rank, self, [], 0

    def barrier(self):
        self.barriers += 1

    def empty(self, shape, dtype):
        return shape

    def post(self, channel, buffer):
        assert self.rank in (channel.src, channel.dst)
        self.posts.append(channel)
        return self

    def wait(self):
        pass

    def hold(self):
        pass

    def mark(self):
        return 0

    def between_us(self, first, second):
        return 1.0


@pytest.mark.parametrize("num_ranks", [4, 16, 32])
def test_a_rank_times_its_own_edges_and_waits_once_for_every_other(num_ranks):
    graph = subject(model={"num_layers": 32}, topology={"pp": num_ranks}).unfolded().graph
    worlds = [CountingWorld(rank) for rank in range(num_ranks)]
    times = [ping_edges(world, world, world, graph, "cpu", lambda _: None) for world in worlds]
    assert {world.barriers for world in worlds} == {len(graph.channels)} == {2 * (num_ranks - 1)}
    inner = {len(world.posts) for world in worlds[1:-1]}
    assert inner == {2 * len(worlds[0].posts)} == {2 * len(worlds[-1].posts)}
    assert sorted(name for one in times for name in one) == sorted(map(str, graph.channels))
    assert all(tuple(by_size) == ping_sizes(graph, "cpu") for one in times for by_size in one.values())
