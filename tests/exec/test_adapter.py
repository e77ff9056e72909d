"""A rank without peers: programs of its own, sequence splits, and slots."""

import pytest

from pipeproof.comm.accumulation_order import sum_orders
from tests.exec.test_reference_bits import require_bits
from tests.plans import subject

pytestmark = [pytest.mark.needs_paddle, pytest.mark.usefixtures("paddle_started")]


SPLIT = ["0F0", "1F0", "0F1", "1I0", "1F1", "1W0", "0I0", "1B1", "0I1", "0W1", "0W0"]
"""Two stages on the rank; each kind of backward, and weight gradients of stage 0 in the other order."""


@pytest.mark.parametrize("seq_lengths", [None, [8, 5]])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_split_backward_has_the_bits_of_the_reference_and_logs_what_the_graph_says(dtype, seq_lengths):
    schedule = {"kind": "custom", "num_micro_batches": 2, "placement": [[0, 1]], "programs": [SPLIT]}
    plan = subject(
        topology={"pp": 1}, schedule={**schedule, "seq_lengths": seq_lengths}, run={"steps": 2, "dtype": dtype}
    ).plan
    assert sum_orders(plan).by_stage[0] == ((1, 0),)
    require_bits(plan)


@pytest.mark.parametrize("order", ["sbh", "bsh"])
@pytest.mark.parametrize("num_splits", [2, 4])
def test_sequence_splits_have_the_bits_of_the_reference(num_splits, order):
    plan = subject(
        topology={"pp": 1},
        model={"activation_order": order},
        schedule={"kind": "seq1f1b", "num_sequence_splits": num_splits, "seq_lengths": [8, 4, 8, 4]},
    ).plan
    require_bits(plan)


def test_slots_are_used_round_robin_and_each_step_starts_with_the_first():
    from pipeproof.exec.rank.message_buffers import Slots
    from pipeproof.exec.rank.paddle.arrays import PaddleArrays
    from pipeproof.schedule.ops import RECV_KINDS

    plan = subject(schedule={"last_micro_batch_size": 1}).plan
    slots = Slots(2, plan.graph, 1, RECV_KINDS, PaddleArrays())
    (channel,) = {channel for channel in plan.graph.channels if channel.dst == 1}
    pool, whole, smaller = (channel, True), [8, 2, 16], [8, 1, 16]

    def places(num):
        taken = [slots.take(i, pool, whole if i % 2 else smaller, "float32") for i in range(num)]
        assert [tensor.shape for tensor in taken] == [whole if i % 2 else smaller for i in range(num)]
        return [tensor.data_ptr() for tensor in taken]

    first = places(5)
    assert first[0] == first[2] == first[4] != first[1] == first[3]
    slots.begin()
    assert places(2) == first[:2]
    assert not slots.take(0, pool, whole, "float32").numpy().any()
    slots.take(0, pool, whole, "float32")[0, 0, 0] = 1.0
    slots.take(0, pool, whole, "float32")
    assert slots.take(0, pool, whole, "float32").numpy().any(), "the slot is the same memory"
