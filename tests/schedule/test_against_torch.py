"""Our generators next to PyTorch's own, operation by operation, over grids of sizes."""

import pytest

from pipeproof.schedule.generators.interleaved import interleaved
from pipeproof.schedule.generators.looped_bfs import looped_bfs
from pipeproof.schedule.programs import UnfitSizesError
from tests.schedule.make_torch_files import theirs

pytestmark = pytest.mark.needs_torch


def actions(schedule, num_ranks):
    """The actions of each rank in text, without PyTorch's idle slots."""
    ranks = map(schedule._calculate_single_rank_operations, range(num_ranks))
    return [[str(action) for action in ops if action is not None] for ops in ranks]


def unmade(class_name, p, v, m):
    """A schedule of PyTorch's with what its generation reads; its constructor also adds and checks transfers."""
    from torch.distributed.pipelining import schedules

    made = object.__new__(getattr(schedules, class_name))
    made.pp_group_size, made.n_local_stages, made._n_microbatches, made._stages = p, v, m, [None] * v
    made.number_of_rounds = max(1, m // p)
    made.microbatches_per_round = m // made.number_of_rounds
    return made


def texts(schedule):
    return [[str(op) for op in program] for program in schedule.programs]


@pytest.mark.parametrize("v", [1, 2, 3, 4])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 8])
def test_interleaved_is_pytorchs_wherever_that_exists(p, v):
    for m in range(1, 4 * p + 2):
        if m % max(1, m // p) == 0:
            assert texts(interleaved(p, m, v)) == actions(unmade("ScheduleInterleaved1F1B", p, v, m), p), m
        else:
            with pytest.raises(UnfitSizesError):
                interleaved(p, m, v)


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 3), (4, 2, 10), (3, 3, 7), (4, 2, 9), (4, 2, 13), (2, 2, 2)])
def test_its_constructor_takes_and_refuses_the_same_sizes(p, v, m):
    try:
        ours = texts(interleaved(p, m, v))
    except UnfitSizesError:
        with pytest.raises(ValueError, match="multiple of the number of rounds"):
            theirs("ScheduleInterleaved1F1B", p, v, m)
    else:
        assert ours == actions(theirs("ScheduleInterleaved1F1B", p, v, m), p)


@pytest.mark.parametrize("v", [1, 2, 3, 4])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 8])
def test_looped_breadth_first_is_pytorchs(p, v):
    for m in range(1, 2 * p + 3):
        assert texts(looped_bfs(p, m, v)) == actions(unmade("ScheduleLoopedBFS", p, v, m), p), m
