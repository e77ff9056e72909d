"""What ``benchmarks/gpu/prediction.py`` makes of times, and the page of its results: all on times that are made up."""

import importlib
from itertools import pairwise
from pathlib import Path

import pytest

from pipeproof.comm.lower import lower
from pipeproof.exec.rank.op_log import LogEntry
from pipeproof.specs.load_plan import plan_from_dict
from tests.plans import plan_dict

ROOT = Path(__file__).parents[2]
STAGE = {"F": 100.0, "I": 110.0, "W": 90.0}


@pytest.fixture
def predicting(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "gpu"))
    return importlib.import_module("predicting")


def plan_of(kind, num_chunks=1):
    chunks = {"num_chunks": num_chunks} if num_chunks > 1 else {}
    model = plan_dict()["model"] | {"num_layers": 4}
    return plan_dict(model=model, schedule={"kind": kind, "num_micro_batches": 4, **chunks})


def lowered(data):
    return lower(plan_from_dict(data).spec)


def measured(predicting, **changes):
    chunk = {part: time / 2 for part, time in STAGE.items()}
    first, last = ({part: time + 20 for part, time in chunk.items()} for _ in range(2))
    values = {
        "stages": [STAGE, STAGE], "chunks": [[first, chunk, last]] * 2, "message_us": 7.0, "between_us": 0.0,
        "excess_bytes": [0, 0], "power": predicting.Power(0.8, 1.1),
    }  # fmt: skip
    return predicting.Measured(**values | changes)


@pytest.mark.parametrize(("kind", "owners"), [("interleaved", [0, 1, 0, 1]), ("zb_v", [0, 1, 1, 0])], ids=["loop", "v"])
def test_chunks_have_what_they_took_alone_times_what_their_rank_was_slower_in_the_step(predicting, kind, owners):
    twice = {part: 2 * time for part, time in STAGE.items()}  # rank 1 is half as fast in the step
    plan = lowered(plan_of(kind, num_chunks=2))
    assert [int(plan.owner[stage, 0]) for stage in range(4)] == owners
    forward = predicting.cost_of(plan, measured(predicting, stages=[STAGE, twice]))["forward_us"]
    alone = [70, 50, 50, 70]  # half a stage of blocks takes 50, and each end 20
    slower = [100 / 120, 200 / 120]
    assert forward == pytest.approx([time * slower[rank] for time, rank in zip(alone, owners, strict=True)], abs=1e-3)


@pytest.mark.parametrize(("kind", "num_chunks"), [("gpipe", 1), ("1f1b", 1), ("zb_v", 2), ("dualpipe_v", 2)])
def test_a_step_that_goes_as_predicted_is_measured_without_error(predicting, kind, num_chunks):
    data = plan_of(kind, num_chunks)
    cost = predicting.cost_of(lowered(data), measured(predicting))
    step, starts, lengths = predicting.predicted_starts(predicting.simulated(data, cost), cost)
    logs = {
        rank: [
            LogEntry(0, "compute", op, int(10**6 + 1e3 * start), int(10**6 + 1e3 * (start + lengths[at, op])))
            for (at, op), start in starts.items()
            if at == rank
        ]
        for rank in range(2)
    }
    own_step, own_starts, _ = predicting.measured_starts([logs])
    assert own_step == pytest.approx(step, abs=0.01)
    assert predicting.start_errors(starts, own_starts) == pytest.approx((0, 0), abs=0.01)
    for rank in range(2):  # one after the other, pairs too
        spans = sorted((start, start + lengths[at, op]) for (at, op), start in starts.items() if at == rank)
        assert all(after[0] >= before[1] - 1e-6 for before, after in pairwise(spans))


def test_errors_of_starts_are_the_largest_and_what_nineteen_of_twenty_are_below(predicting):
    predicted = {(0, f"0F{number}"): 0.0 for number in range(20)}
    apart = {key: float(number) for number, key in enumerate(predicted)}
    assert predicting.start_errors(predicted, apart) == (19, 18)


def test_backwards_captured_whole_are_halved_only_where_a_stage_has_no_parts(predicting):
    ops = [("0F0", [1000]), ("0B0", [4000]), ("1B0", [9000]), ("1I1", [3000, 3200]), ("1W1", [2000])]
    assert predicting.graph_times(ops) == {0: {"F": 1, "I": 2, "W": 2}, 1: {"I": 3.1, "W": 2}}
