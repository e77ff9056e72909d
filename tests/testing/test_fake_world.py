"""What a fake world says of programs, what ranks get from one another, and that it leaves nothing behind."""

import threading
from fractions import Fraction

import numpy as np
import pytest

from pipeproof.comm.channel_models import ChannelModel
from pipeproof.testing import (
    DeadlockError,
    FakeWorld,
    FakeWorldError,
    MismatchError,
    NeverComesError,
    RaceError,
    UnmatchedError,
    backend_table,
    declared_model,
)


def run(program, num_ranks=2, **world):
    return FakeWorld(num_ranks, **world).run(program)


def crossing(rank):
    """Both ranks send before they receive, the second message of rank 0 against the first of rank 1."""
    if rank.rank == 0:
        rank.send(np.ones(4, np.float32), 1, name="0SEND_F0")
        rank.send(np.ones(4, np.float32), 1, name="0SEND_F1")
        rank.recv(1, name="0RECV_B0")
    else:
        rank.recv(0, name="1RECV_F0")
        rank.send(np.ones(4, np.float32), 0, name="1SEND_B0")
        rank.recv(0, name="1RECV_F1")


def test_a_deadlock_is_told_as_its_cycle_with_the_lines_of_the_programs():
    with pytest.raises(DeadlockError) as caught:
        run(crossing)
    first = crossing.__code__.co_firstlineno
    where = [f"tests/testing/test_fake_world.py:{first + offset}" for offset in (4, 8)]
    assert str(caught.value).splitlines() == [
        "ranks 0, 1 wait for each other (one FIFO per pair at rendezvous):",
        f"  rank 0 waits at {where[0]} for 0SEND_F1 ({where[0]})",
        f"  rank 0 waits in 0SEND_F1 ({where[0]}) for rank 1, which is held at {where[1]} and has not issued 1RECV_F1",
        f"  rank 1 waits at {where[1]} for 1SEND_B0 ({where[1]})",
        f"  rank 1 waits in 1SEND_B0 ({where[1]}) for rank 0, which is held at {where[0]} and has not issued 0RECV_B0",
    ]
    assert [(op.rank, op.op) for op in caught.value.cycle] == [(0, "0SEND_F1"), (1, "1SEND_B0")]


def test_what_one_slot_hides_the_rules_find_in_the_recorded_operations():
    done = run(crossing, semantics=ChannelModel("pair", "slots", slots=1))
    report = done.check()
    assert [finding.code for finding in report.errors] == ["PP401"]
    assert report.errors[0].location.file.endswith("test_fake_world.py")
    assert [model.completes for model in FakeWorld(2).failing_models(crossing)] == ["rendezvous"] * 6


def test_a_backends_own_promises_can_be_chosen():
    model = declared_model(backend_table("paddle", "cpu"))
    with pytest.raises(DeadlockError, match="one FIFO per"):
        run(crossing, semantics=model)


@pytest.mark.parametrize(
    ("num_messages", "model", "hangs"),
    [
        (1, ChannelModel("pair", "eager", eager_bytes=8), False),
        (1, ChannelModel("pair", "eager", eager_bytes=7), True),
        (3, ChannelModel("pair", "eager", eager_bytes=24), False),
        (3, ChannelModel("pair", "eager", eager_bytes=23), True),
        (9, ChannelModel("pair", "eager"), False),
        (2, ChannelModel("pair", "slots", slots=2), False),
        (3, ChannelModel("pair", "slots", slots=2), True),
        (1, ChannelModel("pair", "slots", slots=0), True),
    ],
    ids=str,
)
def test_how_much_a_channel_holds(num_messages, model, hangs):
    def program(rank):
        for number in range(num_messages):
            rank.send(float(number), 1 - rank.rank)
        return [float(rank.recv(1 - rank.rank)) for _ in range(num_messages)]

    if hangs:
        with pytest.raises(DeadlockError):
            run(program, semantics=model)
    else:
        assert run(program, semantics=model).values == (list(range(num_messages)),) * 2


def early(rank):
    if rank.rank == 0:
        gradient = rank.irecv(1, name="0RECV_B0")
        rank.send(1.0, 1, name="0SEND_F0")
        gradient.wait()
    else:
        rank.recv(0, name="1RECV_F0")
        rank.send(1.0, 0, name="1SEND_B0")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (ChannelModel("directed_edge"), None),
        (ChannelModel("pair"), "waits in 0SEND_F0 .* for 0RECV_B0 .*, which is before it in its queue"),
        (
            ChannelModel("directed_edge", connections="lazy"),
            "rank 0 waits at .* for rank 1, which is held at .*, to open its end",
        ),
        (ChannelModel("directed_edge", host_blocks=True), "rank 0 waits in 0RECV_B0 .* has not issued 1SEND_B0"),
    ],
)
def test_a_receive_posted_early_hangs_where_something_keeps_the_send_behind_it(model, message):
    if message is None:
        assert run(early, semantics=model).check().errors == ()
    else:
        with pytest.raises(DeadlockError, match=message):
            run(early, semantics=model)


def test_a_batch_has_no_order_among_its_members():
    def exchange(rank):
        with rank.batch():
            sent = rank.isend(rank.rank, 1 - rank.rank)
            received = rank.irecv(1 - rank.rank)
        sent.wait()
        return int(received.wait())

    assert run(exchange).values == (1, 0)
    assert FakeWorld(2).failing_models(exchange) == ()
    assert FakeWorld(2).failing_models(early) != ()


@pytest.mark.parametrize(
    ("program", "error", "message"),
    [
        (lambda r: r.recv(1) if r.rank == 0 else None, NeverComesError, "rank 1, which has ended"),
        (lambda r: [r.barrier() for _ in range(1 + r.rank)], NeverComesError, "0BARRIER1:pp .* has not issued it"),
        (lambda r: r.isend(1.0, 1) if r.rank == 0 else None, UnmatchedError, "rank 0: 0SEND_F0 .*, to rank 1"),
        (
            lambda r: r.send([1.0], 1) if r.rank == 0 else r.recv(0, np.zeros(3)),
            MismatchError,
            r"sends float64 \[1\], but .* receives into float64 \[3\]",
        ),
        (
            lambda r: r.send([1.0], 1) if r.rank == 0 else r.recv(0, np.zeros(1, np.int64)),
            MismatchError,
            r"sends float64 \[1\], but .* receives into int64 \[1\]",
        ),
        (
            lambda r: r.send(1, 1, name="0SEND_F0") if r.rank == 0 else r.recv(0, name="1RECV_F1"),
            MismatchError,
            r"0SEND_F0 .* means 1RECV_F0, but meets 1RECV_F1",
        ),
        (lambda r: r.all_reduce(np.zeros(2 + r.rank)), MismatchError, r"float64 \[2\] sum on rank 0 but .* \[3\]"),
        (lambda r: r.all_reduce(0.0, "max" if r.rank else "sum"), MismatchError, "sum on rank 0 but .* max on rank 1"),
        (lambda r: r.barrier() if r.rank else r.all_reduce(0), MismatchError, "0ALL_REDUCE0:pp .* but 0BARRIER0:pp"),
        (lambda r: r.broadcast(0, r.rank), MismatchError, "from rank 0 on rank 0 but .* from rank 1"),
    ],
)
def test_what_is_wrong_is_named(program, error, message):
    with pytest.raises(error, match=message) as caught:
        run(program)
    assert isinstance(caught.value, FakeWorldError)


def test_an_array_that_is_written_while_it_is_sent_is_noticed_at_the_wait():
    def program(rank, *, late):
        if rank.rank:
            return rank.recv(0).tolist()
        array = np.zeros(2)
        handle = rank.isend(array, 1)
        if late:
            handle.wait()
        array[:] = 1
        return handle.wait()

    assert run(lambda rank: program(rank, late=True)).values == (None, [0.0, 0.0])
    with pytest.raises(RaceError, match=r"0SEND_F0 .* was written before its wait"):
        run(lambda rank: program(rank, late=False))


def test_what_collectives_give():
    def program(rank):
        here = np.arange(4.0) + rank.rank
        return [
            rank.all_reduce(here, axis="tp").tolist(),
            rank.all_reduce(here, "max").tolist(),
            rank.all_reduce(here, "avg").tolist(),
            [part.tolist() for part in rank.all_gather([rank.rank], axis="tp")],
            rank.reduce_scatter(here, axis="tp").tolist(),
            rank.broadcast(here, 3).tolist(),
            [int(part) for part in rank.all_to_all([10 * rank.rank, 10 * rank.rank + 1], axis="tp")],
        ]

    values = run(program, 4, groups={"tp": [(1, 0), (2, 3)]}).values
    assert values[0] == [
        [1.0, 3.0, 5.0, 7.0],
        [3.0, 4.0, 5.0, 6.0],
        [1.5, 2.5, 3.5, 4.5],
        [[1], [0]],  # in the order of the group
        [5.0, 7.0],
        [3.0, 4.0, 5.0, 6.0],
        [11, 1],
    ]
    assert values[3][-1] == [21, 31]


def test_receives_fill_arrays_and_return_them_apart():
    def program(rank):
        if rank.rank == 0:
            return rank.send(np.array([1, 2], np.int32), 1)
        mine = np.zeros(2, np.int32)
        got = rank.recv(0, mine)
        mine[0] = 9
        return mine.tolist(), got.tolist()

    assert run(program).values[1] == ([9, 2], [1, 2])


def test_the_clock_goes_by_the_network_and_the_work():
    network = {"ranks_per_node": 1, "node": {"bandwidth": 1}, "between": {"bandwidth": 2, "latency_us": 5}}

    def program(rank):
        if rank.rank == 0:
            rank.compute(0.1, name="0F0")
            rank.send(np.zeros(1000, np.int8), 1, name="0SEND_F0")
        else:
            rank.recv(0, name="1RECV_F0")
        return rank.now_us

    done = run(program, network=network)
    assert done.values == (Fraction("5.6"),) * 2  # 0.1 + 5 + 1000 bytes at 2000 per us
    assert done.makespan_us == Fraction("5.6")
    assert [(one.op, float(one.start_us), float(one.end_us)) for one in done.timeline] == [
        ("0F0", 0, 0.1), ("0SEND_F0", 0.1, 5.6), ("1RECV_F0", 0, 5.6),
    ]  # fmt: skip


def test_runs_are_alike_and_programs_may_differ_by_rank():
    log = []

    def sender(rank):
        for step in range(3):
            rank.isend(step, 1)
            log.append(("sent", step))

    def receiver(rank):
        log.extend(("got", int(rank.recv(0))) for _ in range(3))

    for _ in range(2):
        run([sender, receiver])
    assert log[:6] == log[6:]
    assert [entry for entry in log[:6] if entry[0] == "got"] == [("got", 0), ("got", 1), ("got", 2)]


def test_what_a_program_raises_comes_out_with_its_rank_and_no_thread_stays():
    cleaned = []

    def program(rank):
        try:
            rank.compute(2)
            if rank.rank == 1:
                raise KeyError("mine")
            rank.recv(1)
        finally:
            cleaned.append(rank.rank)

    before = threading.active_count()
    with pytest.raises(KeyError, match="mine") as caught:
        run(program, 3)
    assert caught.value.__notes__ == ["raised on rank 1 of a fake world at 2 us"]
    assert sorted(cleaned) == [0, 1, 2]
    with pytest.raises(DeadlockError):
        run(crossing)
    assert threading.active_count() == before


def test_a_long_cycle_is_found_in_time_and_told_in_part():
    def program(rank):
        for number in range(2000):
            rank.isend(number, 1 - rank.rank)
        rank.recv(1 - rank.rank)

    with pytest.raises(DeadlockError, match="and 3982 more waits") as caught:
        run(program)
    assert len(caught.value.cycle) == 4002
    assert len(str(caught.value).splitlines()) == 22


def test_a_program_that_goes_on_after_the_end_of_its_world_is_ended():
    def stubborn(rank):
        while True:
            try:
                rank.recv(1 - rank.rank)
            finally:
                rank.barrier()

    before = threading.active_count()
    with pytest.raises(DeadlockError):
        run(stubborn)
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: FakeWorld(0), "at least one rank"),
        (lambda: FakeWorld(2, groups={"mp": [[0, 1]]}), "axis 'mp' is none of pp, dp"),
        (lambda: FakeWorld(2, groups={"tp": [[0, 1], [1]]}), "each rank 0..1 is in at most one"),
        (lambda: FakeWorld(2, groups={"tp": [[0, 2]]}), "each rank 0..1 is in at most one"),
        (lambda: FakeWorld(2, network={"ranks_per_node": 2}), "needs ranks_per_node and node"),
        (lambda: FakeWorld(2, network={"nodes": 2}), "nodes"),
        (
            lambda: FakeWorld(2, network={"ranks_per_node": 2, "node": {"bandwidth": 1}, "contention": True}),
            "contention: true is for",
        ),
        (lambda: FakeWorld(2).run([lambda rank: None]), "1 programs for 2 ranks"),
        (lambda: run(lambda rank: rank.send(1, 2)), "rank 2 is not one of the 2 ranks"),
        (lambda: run(lambda rank: rank.send(object(), 1)), "object is no array of numbers"),
        (lambda: run(lambda rank: rank.isend(1, 1, name="0RECV_F0")), "0RECV_F0 cannot name this call"),
        (lambda: run(lambda rank: rank.isend(1, 1, name="send it")), "is not an operation"),
        (lambda: run(lambda rank: rank.compute(1, name="0SEND_F0")), "0SEND_F0 cannot name this call"),
        (lambda: run(lambda rank: rank.compute(-1)), "at least 0 us"),
        (lambda: run(lambda rank: rank.recv(0, [0.0])), "must be an array of numpy, not list"),
        (lambda: run(lambda rank: rank.barrier("tp")), "rank 0 is in no tp group"),
        (lambda: run(lambda rank: rank.all_reduce(1, "product")), "none of sum, max, avg"),
        (lambda: run(lambda rank: rank.reduce_scatter(np.zeros(3))), "cuts the first dim"),
        (lambda: run(lambda rank: rank.all_to_all([1])), "takes 2 values, not 1"),
        (lambda: run(lambda rank: rank.broadcast(1, 5)), "root 5 is not in the pp group"),
    ],
)
def test_wrong_arguments_are_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong()


@pytest.mark.parametrize("call", ["send", "recv", "barrier", "compute", "batch", "wait"])
def test_only_posts_may_be_in_a_batch(call):
    def program(rank):
        with rank.batch():
            handle = rank.isend(0, 0)
            if call == "wait":
                handle.wait()
            elif call == "batch":
                with rank.batch():
                    pass
            else:
                getattr(rank, call)(*{"send": (0, 0), "recv": (0,), "compute": (1,)}.get(call, ()))

    with pytest.raises(ValueError, match=f"only isend and irecv may be in a batch; {call} comes after it"):
        run(program, 1)
