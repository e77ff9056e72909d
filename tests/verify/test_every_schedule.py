"""Every kind of schedule over a grid of sizes: no rule finds an error, and it finishes with any stage costs.

1 to 4 ranks with 1 to 4p micro-batches and 1 to 4 chunks, 5 to 8 ranks with
micro-batches around p and 2p (and 1, 2, 4p) and up to 3 chunks, every variant.
`optimal`, which tries many orders for each size, is always given the latter;
so is everything in `make test`, on some ranks.
"""

import gc

import pytest

from pipeproof.diagnostics.finding import BadPlanError
from pipeproof.schedule.kinds import SCHEDULE_KINDS, Placement, Request
from pipeproof.schedule.programs import StageCosts, asap
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.verify.check_plan import check

pytestmark = pytest.mark.usefixtures("known_notes")

MOST_IN_DENSE_GRID = 4
"""Up to this number of ranks every size is taken."""


def micro_batches(name, num_ranks, *, dense):
    """All up to 4p, or those around p and 2p; always these of the kind that tries many orders for each size."""
    every = range(1, 4 * num_ranks + 1)
    near = {around + by for around in (num_ranks, 2 * num_ranks) for by in (-1, 0, 1)}
    few = [m for m in every if m in near | {1, 2, 4 * num_ranks}]
    return every if dense and name != "optimal" else few


def requests(kind, num_ranks, *, dense):
    """Every size of the grid with this many ranks that the table row allows."""
    max_chunks = 4 if dense else 3
    most = max_chunks if kind.max_chunks is None else min(max_chunks, kind.max_chunks)
    for num_micro_batches in micro_batches(kind.name, num_ranks, dense=dense):
        for num_chunks in range(kind.min_chunks, most + 1):
            for variant in kind.variants or (None,):
                for num_splits in (1, 2, 3) if kind.splits_sequences else (1,):
                    yield Request(num_ranks, num_micro_batches, num_chunks, num_splits, variant)


def plan_of(kind, request):
    num_stages = request.num_ranks * request.num_chunks
    variant = {} if request.variant is None else {"variant": request.variant}
    return {
        "pipeproof": 1,
        "model": {"kind": "gpt", "num_layers": num_stages, "hidden_size": 4, "num_heads": 2, "ffn_size": 4,
                  "vocab_size": 8, "seq_length": 6},
        "topology": {"pp": request.num_ranks},
        "schedule": {"kind": kind.name, "num_micro_batches": request.num_micro_batches, "micro_batch_size": 1,
                     "num_chunks": request.num_chunks, "num_sequence_splits": request.num_sequence_splits, **variant},
        "cost": {"forward_us": [1 + stage % 3 for stage in range(num_stages)]},
    }  # fmt: skip


def uneven(num_stages):
    """Times in which every stage differs from its neighbours, in all three parts, and messages take a while."""
    return StageCosts(
        [1 + stage % 3 for stage in range(num_stages)],
        [2 + stage % 2 for stage in range(num_stages)],
        [1 + (stage + 1) % 4 for stage in range(num_stages)],
        2,
    )


def checked(kind, request):
    """The report on a plan; None where the schedule does not exist for these sizes."""
    try:
        return check(plan_from_dict(plan_of(kind, request)))
    except BadPlanError as refusal:
        if {finding.code for finding in refusal.findings} != {"PP140"}:
            raise
        return None


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("name", SCHEDULE_KINDS)
def test_no_rule_finds_an_error_and_it_finishes(name, num_ranks):
    no_rule_finds_an_error(SCHEDULE_KINDS[name], num_ranks, dense=False)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_ranks", range(1, 9))
@pytest.mark.parametrize("name", SCHEDULE_KINDS)
def test_nor_with_sizes_in_between(name, num_ranks):
    no_rule_finds_an_error(SCHEDULE_KINDS[name], num_ranks, dense=num_ranks <= MOST_IN_DENSE_GRID)


def no_rule_finds_an_error(kind, num_ranks, *, dense):
    num_checked = 0
    gc.disable()  # as the command does
    try:
        for request in requests(kind, num_ranks, dense=dense):
            report = checked(kind, request)
            if report is None:
                continue
            assert {finding.code for finding in report.findings} <= {"PP411"}, request
            assert asap(report.subject.plan.schedule, uneven(num_ranks * request.num_chunks)).makespan > 0
            num_checked += 1
    finally:
        gc.enable()
    assert num_checked > 0 or (kind.placement is Placement.BOTH_WAYS and num_ranks % 2)
