"""Paddle's GPU path: the calls of its process groups; its posts and its barrier with real processes."""

import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from pipeproof.comm.backends import backend_table
from pipeproof.diagnostics.finding import PipeproofError
from pipeproof.exec.rank.executor_support import require_executable, require_issuable
from pipeproof.exec.rank.message_buffers import Slice, SliceChannels, SliceCollectives
from pipeproof.exec.store.rendezvous import rank_environment, reserved_ports
from pipeproof.schedule.op_table import Channel
from tests.exec.processes import REPOSITORY
from tests.exec.rehearsal_world import rehearsed
from tests.plans import plan_dict, subject

ON_GPU = {"backend": "paddle", "device": "gpu", "steps": 2}
SEQUENCE_PARALLEL = {"pp": 2, "tp": 2, "sequence_parallel": True}


class FakeGroup:
    """Recorder of the calls of Paddle's group handle: the name of each call and its arguments."""

    def __init__(self, ranks, calls):
        self.ranks, self.calls = ranks, calls
        self.process_group = self

    def get_group_rank(self, rank):
        return self.ranks.index(rank)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*arguments, **options):
            self.calls.append((name, arguments, options))
            return SimpleNamespace(wait=lambda: self.calls.append(("wait", (), {})))

        return call


@pytest.fixture
def nccl():
    pytest.importorskip("paddle")
    from pipeproof.stages.paddle.runtime import start_paddle

    start_paddle()
    from pipeproof.exec.rank.paddle import nccl

    return nccl


@pytest.mark.needs_paddle
def test_slices_are_moved_by_the_calls_of_fleets_partial_transport(nccl):
    import paddle

    calls = []
    there, back = Channel("forward", 2, 6), Channel("backward", 6, 2)
    channels = nccl.NcclChannels(2, {one: FakeGroup([2, 6], calls) for one in (there, back)})
    assert isinstance(channels, SliceChannels)
    whole = paddle.zeros([8])
    channels.post_slice(there, Slice(whole, 4, 3)).wait()
    channels.post_slice(back, Slice(whole, 4, 3))
    collectives = nccl.NcclCollectives(2, (2, 3, 4, 5), FakeGroup([2, 3, 4, 5], calls), computes=False)
    assert isinstance(collectives, SliceCollectives)
    assert collectives.gather_slices(Slice(whole, 4, 3)) is whole
    asynchronous = {"sync_op": False}
    assert calls == [
        ("send_partial", (whole, 1, 4, 3), asynchronous),
        ("wait", (), {}),
        ("recv_partial", (whole, 1, 4, 3), asynchronous),
        ("all_gather_partial_on_calc_stream", (whole, whole, 4, 3), {}),
    ]


@pytest.mark.needs_paddle
def test_whole_tensors_go_by_calls_that_do_not_hold_the_host(nccl):
    import paddle

    calls = []
    there, back = Channel("forward", 0, 3), Channel("backward", 3, 0)

    def group():
        made = paddle.distributed.collective.Group(0, 7, [0, 3], pg=FakeGroup([0, 3], calls))
        made._rank_in_group = 0  # as in the process of rank 0
        return made

    channels = nccl.NcclChannels(0, {there: group(), back: group()})
    buffer = paddle.zeros([4])
    posted = [channels.post(one, buffer) for one in (there, back)]
    posted[0].wait()
    assert [name for name, _, _ in calls] == ["send", "recv", "wait"]
    for _, arguments, _ in calls[:2]:
        assert arguments[0] is buffer
        assert arguments[1:] == (1, False)  # the peer's place in the group, and not synchronous
    assert posted[0].posted_ns == posted[0].start_ns <= posted[0].end_ns


@pytest.mark.needs_paddle
@pytest.mark.parametrize("computes", [False, True])
def test_sums_are_nccls_in_rehearsals_and_in_group_order_in_runs(nccl, computes):
    import paddle

    calls = []
    backend = FakeGroup([0, 1], calls)
    group = paddle.distributed.collective.Group(0, 9, [0, 1], pg=backend)
    collectives = nccl.NcclCollectives(0, (0, 1), group, computes=computes)
    tensor = paddle.to_tensor(np.arange(4, dtype="float32"))
    collectives.reduce(tensor, "sum")
    collectives.reduce_scatter(tensor, 0)
    collectives.all_gather(tensor, 0)
    collectives.exchange(tensor, [3, 1], [2, 2])
    gathers = "all_gather_into_tensor_on_calc_stream"
    sums = [gathers, gathers] if computes else ["all_reduce_on_calc_stream", "reduce_scatter_tensor_on_calc_stream"]
    assert [name for name, _, _ in calls] == [*sums, gathers, "all_to_all_single_on_calc_stream"]
    out, rows, received, sent = calls[-1][1]
    assert (list(out.shape), rows is tensor, received, sent) == ([4], True, [2, 2], [3, 1])
    assert tensor.numpy().tolist() == [0, 1, 2, 3]  # the input stays


@pytest.mark.slow
@pytest.mark.needs_paddle
def test_two_processes_rehearse_a_pipeline_with_these_posts(tmp_path):
    """gloo's calls hold the host, so the order is one in which that does no harm."""
    plan = json.dumps(plan_dict(schedule={"kind": "gpipe"}))
    with reserved_ports(3) as ports:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.exec.gloo_posts", plan],
                cwd=REPOSITORY,
                env=rank_environment("paddle", rank, 2, ports),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            ended = [process.communicate(timeout=60) for process in processes]
        finally:
            for process in processes:
                process.kill()
    for out, error in ended:
        assert out, error
        messages, elements, faults = json.loads(out.splitlines()[-1])
        assert (messages, faults) == (2 * 4, 0)
        assert elements > 0


class _Slicing:
    """A rank's channels, or collectives over a group, in memory, that move slices as process groups on NCCL do.

    ``range_of(part)`` is a slice as a tensor, and ``put(part, values)`` writes one.
    """

    def __init__(self, ends, posted, range_of, put):
        self.ends, self.posted, self.range_of, self.put = ends, posted, range_of, put

    def __getattr__(self, name):
        return getattr(self.ends, name)

    def post_slice(self, channel, part, after=()):
        buffer = self.range_of(part)
        self.posted.append((part.num_slices, part.index))
        transfer = self.ends.post(channel, buffer, after)
        wait = transfer.wait

        def finish():
            wait()
            if channel.dst == self.ends.rank:
                self.put(part, buffer)

        transfer.buffer, transfer.wait = part, finish
        return transfer

    def gather_slices(self, part):
        joined = self.ends.all_gather(self.range_of(part), 0)
        self.put(Slice(part.whole, 1, 0), joined)
        return part.whole


def with_slices(posted, range_of, put):
    """Make of a rank's world one that moves slices; ``posted`` gets the number and index of each."""

    def world(made):
        made.channels = _Slicing(made.channels, posted, range_of, put)
        made.collectives = {n: _Slicing(one, posted, range_of, put) for n, one in made.collectives.items()}
        return made

    return world


def place_of(part, length):
    size = length // part.num_slices
    return slice(part.index * size, (part.index + 1) * size)


def with_slices_of_bytes(posted):
    def range_of(part):
        whole = part.whole
        return type(whole)(whole.content[place_of(part, len(whole.content))], whole.dtype)

    def put(part, values):
        part.whole.content[place_of(part, len(part.whole.content))] = values.content

    return with_slices(posted, range_of, put)


def test_a_backend_that_moves_slices_is_given_whole_tensors_and_the_same_is_found():
    proved = subject(topology={"pp": 2, "tp": 2}, transport="partial")
    wrong = subject(topology=SEQUENCE_PARALLEL, transport="partial")
    for one, num_faults in ((proved, 0), (wrong, 32)):
        posted = []
        slices = rehearsed(one, around=with_slices_of_bytes(posted))
        cut = rehearsed(one)
        assert list(slices) == list(cut)
        assert sum(checked.num_faults for checked in slices) == num_faults
        assert set(posted) == {(2, 0), (2, 1)}


@pytest.mark.needs_paddle
def test_a_run_has_the_same_gradients_with_slices_of_the_backend_and_of_the_host():
    from tests.exec.in_memory import require_logged, run_all

    plan = subject(topology={"pp": 2, "tp": 2}, transport="partial", run={"steps": 1}).unfolded().plan
    posted = []

    def range_of(part):
        return part.whole.flatten()[place_of(part, part.whole.size)].clone()

    def put(part, values):
        flat = part.whole.flatten().clone()
        flat[place_of(part, part.whole.size)] = values
        part.whole.set_value(flat.reshape(part.whole.shape))

    (by_backend,), adapters = run_all(plan, around=with_slices(posted, range_of, put))
    require_logged(plan, adapters)
    (cut,), _ = run_all(plan)
    assert set(posted) == {(2, 0), (2, 1)}
    for one, other in zip(by_backend, cut, strict=True):
        assert one.loss == other.loss
        assert one.gradients.keys() == other.gradients.keys()
        assert all(np.array_equal(one.gradients[name], other.gradients[name]) for name in one.gradients)


@pytest.mark.parametrize(
    "buffers",
    [{"receive_slots": 4}, {"free_output": "after_send_done"}],
    ids=["a slot has room for a slice", "what is given back early"],
)
def test_where_whole_tensors_do_not_stay_slices_are_cut(buffers):
    posted = []
    checked = rehearsed(
        subject(topology={"pp": 2, "tp": 2}, transport="partial", buffers=buffers), around=with_slices_of_bytes(posted)
    )
    assert not posted
    assert sum(one.num_faults for one in checked) == 0


@pytest.mark.needs_paddle
def test_what_paddle_does_not_do_on_gpus_is_refused():
    with pytest.raises(PipeproofError, match=r"the plan has buffers\.receive_slots .* Paddle on a GPU"):
        require_issuable(subject(run=ON_GPU, buffers={"receive_slots": 4}))
    with pytest.raises(PipeproofError, match="Paddle's transfers on GPUs only wait for transfers of their edge"):
        require_executable(subject(run=ON_GPU, transport={"queue": "rank"}))
    require_executable(subject(run=ON_GPU))
    require_issuable(subject(run=ON_GPU))


def test_the_table_of_the_backend_is_that_of_nccl():
    assert backend_table("paddle", "gpu").values() == backend_table("torch", "gpu").values()
