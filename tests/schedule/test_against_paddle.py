"""Our generators next to Paddle's own: recorded outputs, and the installed Paddle over grids of sizes."""

import json
import re
from pathlib import Path

import pytest

from pipeproof.schedule.generators.interleaved import interleaved
from pipeproof.schedule.kinds import SCHEDULE_KINDS, Request
from pipeproof.schedule.ops import Op, OpKind
from pipeproof.schedule.programs import Schedule, UnfitSizesError, asap, even_costs
from tests.schedule import paddle_own

RECORDED = json.loads((Path(__file__).parent / "paddle_schedules.json").read_text())
FLEET = RECORDED["1F1B and VPP of Fleet (get_static_scheduler)"]
SEMI_AUTO = RECORDED["semi-auto VPP (rank tables)"]
UNFLAGGED, FLAGGED = "PipelineParallelWithInterleaveFthenB", "VPPFhenBInBalancedMemory"


def numbers(name):
    return [int(number) for number in re.findall(r"=(\d+)", name)]


def fleet_texts(schedule, *, chunks=True):
    p = len(schedule.programs)
    return [
        "".join(f"{op.kind.lower()}{op.micro_batch}{f'_vp{op.stage // p}' if chunks else ''};" for op in program)
        for program in schedule.programs
    ]


def texts(schedule):
    return [[str(op) for op in program] for program in schedule.programs]


def generated(kind, p, m):
    return SCHEDULE_KINDS[kind].generate(Request(p, m))


@pytest.mark.parametrize("name", [name for name in FLEET if name.startswith("1F1B")])
def test_1f1b_is_fleets(name):
    assert fleet_texts(generated("1f1b", *numbers(name)), chunks=False) == FLEET[name]


@pytest.mark.parametrize("name", [name for name in FLEET if name.startswith("VPP")])
def test_interleaved_is_fleets(name):
    p, v, m = numbers(name)
    variant = "fleet_balanced" if "unbalanced" in name else "fleet"
    assert fleet_texts(interleaved(p, m, v, variant)) == FLEET[name]


@pytest.mark.parametrize("name", SEMI_AUTO)
def test_the_semi_automatic_frameworks_is_pytorchs(name):
    p, v, m = numbers(name)
    assert texts(interleaved(p, m, v, "torch")) == [[op for op in rank if op != "-"] for rank in SEMI_AUTO[name]]


@pytest.mark.needs_paddle
@pytest.mark.parametrize("best_unbalanced", [False, True])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 6])
def test_fleets_interleaved_class_over_a_grid(p, best_unbalanced):
    variant = "fleet_balanced" if best_unbalanced else "fleet"
    for v in (2, 3, 4):
        for m in range(2 * p, 4 * p + 1):
            theirs = paddle_own.fleet(paddle_own.STATIC, p, m, v, best_unbalanced=best_unbalanced)
            assert fleet_texts(interleaved(p, m, v, variant)) == theirs, (v, m)


@pytest.mark.needs_paddle
@pytest.mark.parametrize("p", [1, 2, 3, 4, 6])
def test_its_rule_with_as_many_micro_batches_as_ranks(p):
    for v in (2, 3, 4):
        assert fleet_texts(interleaved(p, p, v, "fleet")) == paddle_own.fleet(paddle_own.STATIC, p, p, v)


@pytest.mark.needs_paddle
@pytest.mark.parametrize("p", [3, 4, 6])
def test_fleets_other_classes_over_the_sizes_for_which_it_chooses_them(p):
    for v in (2, 3, 4):
        for m in range(p, 2 * p):
            assert fleet_texts(interleaved(p, m, v, "fleet_balanced")) == paddle_own.fleet(FLAGGED, p, m, v)
            if m == p:
                assert fleet_texts(interleaved(p, m, v, "fleet_fthenb")) == paddle_own.fleet(UNFLAGGED, p, m, v)
                continue
            with pytest.raises(AssertionError, match="multiple"):
                paddle_own.fleet(UNFLAGGED, p, m, v)
            for variant in ("fleet", "fleet_fthenb"):
                with pytest.raises(UnfitSizesError, match="only"):
                    interleaved(p, m, v, variant)


@pytest.mark.needs_paddle
@pytest.mark.parametrize("p", [1, 2, 3, 5])
def test_the_semi_automatic_frameworks_over_a_grid(p):
    for v in (1, 2, 3):
        for m in range(1, 3 * p + 1):
            if m % max(1, m // p) == 0:
                assert texts(interleaved(p, m, v, "torch")) == paddle_own.semi_auto(p, m, v), (v, m)


def computed(jobs, rank, p):
    """The computations of a job list of a pass; the number behind a job's name is its chunk."""
    kinds = {"forward": OpKind.FORWARD, "backward": OpKind.BACKWARD}
    names = [(re.fullmatch(r"(forward|backward)(\d*)", job), batch) for job, batch in jobs]
    return tuple(Op(kinds[name[1]], int(name[2] or 0) * p + rank, batch) for name, batch in names if name)


def static_pass(name, p, m, v=1):
    return Schedule(tuple(computed(jobs, rank, p) for rank, jobs in enumerate(paddle_own.static_pass(name, p, m, v))))


@pytest.mark.needs_paddle
@pytest.mark.parametrize(("kind", "name"), [("gpipe", "FThenB"), ("1f1b", "1F1B"), ("eager_1f1b", "Eager1F1B")])
def test_the_passes_for_static_graphs(kind, name):
    for p in range(1, 6):
        for m in range(2 * p - 1, 3 * p + 1):
            assert static_pass(name, p, m) == generated(kind, p, m), (p, m)


@pytest.mark.needs_paddle
@pytest.mark.parametrize(("p", "v"), [(2, 2), (3, 2), (4, 3)])
def test_the_static_vpp_pass_where_micro_batches_divide_by_ranks(p, v):
    assert static_pass("VPP", p, p, v) == interleaved(p, p, v, "fleet_fthenb")
    for m in (2 * p, 3 * p):
        assert static_pass("VPP", p, m, v) == interleaved(p, m, v, "fleet")


@pytest.mark.needs_paddle
def test_the_static_vpp_pass_is_slower_or_deadlocks_where_they_do_not():
    slower = asap(static_pass("VPP", 4, 10, 2), even_costs(8)).makespan
    assert (slower, asap(interleaved(4, 10, 2, "fleet"), even_costs(8)).makespan) == (79, 69)
    with pytest.raises(ValueError, match="cannot finish: rank 0 at 8F8"):
        asap(static_pass("VPP", 4, 9, 3), even_costs(12))
