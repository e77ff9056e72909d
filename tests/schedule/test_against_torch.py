"""Our generators beside PyTorch's own, operation by operation."""

import pytest

from pipeproof.schedule import CHUNKED_GENERATORS


@pytest.mark.needs_torch
@pytest.mark.parametrize(
    ("num_ranks", "num_chunks", "num_micro_batches"), [(2, 2, 4), (4, 2, 8), (4, 3, 12), (3, 2, 9)]
)
def test_interleaved_is_pytorchs_where_micro_batches_divide_by_ranks(num_ranks, num_chunks, num_micro_batches):
    from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

    theirs = object.__new__(ScheduleInterleaved1F1B)  # its constructor wants stages that can run
    theirs.pp_group_size, theirs.n_local_stages, theirs._n_microbatches = num_ranks, num_chunks, num_micro_batches
    theirs.number_of_rounds = num_micro_batches // num_ranks
    theirs.microbatches_per_round = num_ranks
    for rank, program in enumerate(CHUNKED_GENERATORS["interleaved"](num_ranks, num_micro_batches, num_chunks)):
        actions = [str(action) for action in theirs._calculate_single_rank_operations(rank) if action is not None]
        assert actions == [str(op) for op in program]
