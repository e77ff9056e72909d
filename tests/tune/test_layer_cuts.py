"""The fastest cut of each schedule, against all cuts tried one by one."""

import random
from dataclasses import replace

import pytest

from pipeproof.analysis.tune import layer_cuts
from pipeproof.analysis.tune.layer_cuts import (
    Lacking,
    LayerCost,
    Layers,
    Problem,
    Way,
    begin_search,
    search_cuts,
    step_of,
    tried_kinds,
)
from pipeproof.schedule.kinds import SCHEDULE_KINDS, Placement, Request


def best_cut(layers, way, kind, num_ranks, num_chunks, num_micro_batches, limit=None):
    """The fastest cut of one kind, with all cuts compared."""
    search = begin_search(Problem(layers, way, num_ranks, num_micro_batches), kind, num_chunks, limit)
    if search is None:
        return None
    search.compare_all()
    return search.result(kind.name, num_chunks)


def all_cuts(num_layers, least):
    if len(least) == 1:
        return [(num_layers,)] if num_layers >= least[0] else []
    return [
        (size, *rest)
        for size in range(least[0], num_layers - sum(least[1:]) + 1)
        for rest in all_cuts(num_layers - size, least[1:])
    ]


def random_model(rng, num_layers, *, splits):
    def cost():
        return LayerCost(
            rng.randint(1, 50), rng.randint(1, 50), rng.randint(0, 50) if splits else 0, rng.randint(0, 30),
            rng.randint(0, 10) if splits else 0, rng.randint(0, 50), rng.randint(0, 50), host,
        )  # fmt: skip

    host = rng.choice([0, 0, rng.randint(1, 200)])

    costs = tuple(cost() for _ in range(num_layers))
    recomputed = tuple(
        rng.choice([None, LayerCost(c.forward, 2 * c.backward_input, c.backward_weight, c.kept // 4)]) for c in costs
    )
    each_stage = LayerCost(rng.randint(0, 5), rng.randint(0, 5))
    reductions = tuple(rng.randint(0, 60) for _ in costs) if rng.random() < 0.4 else ()
    static, latency = tuple(rng.randint(0, 100) for _ in costs), rng.choice([0, 3, 20])
    layers = Layers(static, rng.random() < 0.5, latency, reductions, rng.randint(0, 9))
    return layers, Way("any", splits, costs, recomputed if rng.random() < 0.5 else (), each_stage)


def by_brute_force(layers, way, kind, num_ranks, num_chunks, num_micro_batches, limit):
    """The shortest step of all cuts; None where none fits."""
    schedule = kind.generate(Request(num_ranks, num_micro_batches, num_chunks))
    search = layer_cuts._Search(Problem(layers, way, num_ranks, num_micro_batches), schedule, limit)
    least = [search._least(stage) for stage in range(num_ranks * num_chunks)]
    steps = [timed.step for cut in all_cuts(layers.num_layers, least) if (timed := search._time(cut)) is not None]
    return min(steps, default=None)


@pytest.mark.parametrize("seed", range(8))
def test_the_cut_is_the_best_of_all_cuts_for_every_kind_of_placement(seed):
    rng = random.Random(seed)
    compared = set()
    for _ in range(25):
        splits = rng.random() < 0.6
        layers, way = random_model(rng, rng.randint(2, 7), splits=splits)
        num_ranks, num = rng.randint(1, 3), rng.randint(1, 5)
        limit = rng.choice([None, 400, 600])
        kinds = [each for each in tried_kinds(Problem(layers, way, num_ranks, num)) if num_ranks * each[1] <= 6]
        for kind, chunks in rng.sample(kinds, min(3, len(kinds))):
            found = best_cut(layers, way, kind, num_ranks, chunks, num, limit)
            if found is None:
                continue
            expected = by_brute_force(layers, way, kind, num_ranks, chunks, num, limit)
            assert expected is None if isinstance(found, Lacking) else found.step == expected
            assert isinstance(found, Lacking) or found.is_exhaustive
            compared.add(kind.placement)
    assert compared == {*Placement} - {Placement.BOTH_WAYS}


def test_a_head_of_many_blocks_leaves_fewer_blocks_to_its_stage():
    block, head = LayerCost(10, 10, 10), LayerCost(50, 50, 50)
    layers = Layers((0,) * 14, has_ends=True)
    way = Way("any", splits=False, layers=(LayerCost(1), *(block,) * 12, head))
    best = best_cut(layers, way, SCHEDULE_KINDS["1f1b"], 2, 1, 8)
    assert best.sizes == (10, 4)  # 8.5 blocks are half of the work, and the second rank begins a forward later


def test_a_host_that_is_slower_than_the_device_makes_the_step_longer_and_a_replay_has_none():
    """Two layers of 100 on the device; the host needs 90 for each, and 60 for each stage."""
    layer, stage = LayerCost(30, 40, 30, host=90), LayerCost(host=60)
    layers = Layers((0,) * 4, has_ends=False)
    way = Way("any", splits=True, layers=(layer,) * 4, each_stage=stage)
    replayed = Way("replayed", splits=True, layers=(replace(layer, host=0),) * 4)
    kind = SCHEDULE_KINDS["gpipe"]
    best = best_cut(layers, replayed, kind, 2, 1, 8)
    assert best.sizes == (2, 2)
    step, slowdowns = step_of(best, way)
    assert step == pytest.approx(best.step * (60 + 2 * 90) / 200, rel=0.01)
    assert slowdowns == [(60 + 2 * 90) / 200] * 2
    assert step_of(best, replayed) == (best.step, [1.0, 1.0])


def test_layers_are_recomputed_only_where_the_memory_needs_it():
    cost, again = LayerCost(10, 10, 0, 100, 0, 100, 100), LayerCost(10, 20, 0, 10, 0, 10, 10)
    layers, way = Layers((0,) * 4, has_ends=False), Way("any", False, (cost,) * 4, (again,) * 4)
    kind = SCHEDULE_KINDS["1f1b"]
    free = best_cut(layers, way, kind, 2, 1, 4)
    tight = best_cut(layers, way, kind, 2, 1, 4, limit=350)
    assert (free.recomputed, max(free.peaks)) == ((0, 0), 400)
    assert tight.recomputed == (1, 0)  # the first rank holds two micro-batches, the last one
    assert max(tight.peaks) <= 350
    assert tight.step > free.step


def test_what_fits_nowhere_says_what_it_needs():
    layers, way = Layers((500, 500), has_ends=False), Way("any", False, (LayerCost(1, 1, 0, 70, 0, 70, 70),) * 2)
    found, lacking = search_cuts([Problem(layers, way, 2, 2)], limit=550)
    assert not found
    least = min(lacking, key=lambda each: each.needed)
    assert (least.needed, least.static) == (640, 500)  # the first rank holds two micro-batches
