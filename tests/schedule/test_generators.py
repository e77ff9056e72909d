import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeproof.schedule import GENERATORS
from pipeproof.schedule.ops import RECV_KINDS, SEND_KINDS, OpKind
from pipeproof.schedule.programs import add_transfers, add_update

GOLDENS = json.loads((Path(__file__).parent / "fleet_schedules.json").read_text())

sizes = st.tuples(st.integers(1, 8), st.integers(1, 24))
kinds = st.sampled_from(sorted(GENERATORS))


def fleet_text(program):
    return "".join(f"{op.kind.lower()}{op.micro_batch};" for op in program)


@pytest.mark.parametrize("name", GOLDENS)
def test_equal_to_what_paddle_itself_generates(name):
    case = GOLDENS[name]
    programs = GENERATORS[case["kind"]](case["pp"], case["acc"])
    assert [fleet_text(program) for program in programs] == case["programs"]


@given(kinds, sizes)
def test_each_stage_runs_each_micro_batch_once_in_index_order(kind, size):
    num_ranks, num_micro_batches = size
    programs = GENERATORS[kind](num_ranks, num_micro_batches)
    assert len(programs) == num_ranks
    for stage, program in enumerate(programs):
        assert {op.stage for op in program} == {stage}
        for wanted in (OpKind.FORWARD, OpKind.BACKWARD):
            assert [op.micro_batch for op in program if op.kind is wanted] == list(range(num_micro_batches))


@given(sizes)
def test_1f1b_never_holds_more_than_its_warm_up_and_one(size):
    num_ranks, num_micro_batches = size
    for rank, program in enumerate(GENERATORS["1f1b"](num_ranks, num_micro_batches)):
        live = peak = 0
        for op in program:
            live += 1 if op.kind is OpKind.FORWARD else -1
            peak = max(peak, live)
        assert peak == min(num_micro_batches, num_ranks - rank)


@given(kinds, sizes)
def test_every_send_has_its_receive_and_every_transfer_one_later_wait(kind, size):
    programs = add_transfers(GENERATORS[kind](*size))
    sends = [op for program in programs for op in program if op.kind in SEND_KINDS]
    receives = [op for program in programs for op in program if op.kind in RECV_KINDS]
    step = {OpKind.SEND_FORWARD: 1, OpKind.SEND_BACKWARD: -1}
    assert sorted((op.kind[-1], op.stage + step[op.kind], op.micro_batch) for op in sends) == sorted(
        (op.kind[-1], op.stage, op.micro_batch) for op in receives
    )
    for program in programs:
        for place, op in enumerate(program):
            if op.kind in SEND_KINDS | RECV_KINDS:
                waits = [i for i, other in enumerate(program) if other.kind is OpKind.WAIT and other.target == op]
                assert len(waits) == 1
                assert waits[0] > place


def test_update_comes_last_with_reductions_in_the_order_given():
    (program,) = add_update(GENERATORS["gpipe"](1, 1), ["tp", "dp"])
    assert [str(op) for op in program] == ["0F0", "0B0", "0REDUCE_GRAD:tp", "0REDUCE_GRAD:dp", "0STEP"]
