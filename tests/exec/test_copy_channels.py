"""Channels by copy engines, over an emulated driver: connections, bytes, refusals, the release of streams."""

import random
import threading
from dataclasses import replace

import pytest

from pipeproof.schedule.op_table import Channel
from tests.plans import subject

pytestmark = pytest.mark.needs_torch

FORTH, BACK = Channel("pp", 0, 1), Channel("pp", 1, 0)


def connected(slots, num_ranks=2):
    """The channels of each rank, or the error of each, connected in threads."""
    import torch
    import torch.distributed as dist

    from pipeproof.exec.rank.torch.copy_channels import connect_copies

    store, found = dist.HashStore(), [None] * num_ranks

    def connect(rank):
        try:
            found[rank] = connect_copies(slots, rank, torch.device("cpu"), store, lambda _: None, 20.0)
        except RuntimeError as error:
            found[rank] = error

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("seed", range(5))
def test_messages_arrive_in_order_whatever_moves_first(monkeypatch, seed):
    import torch

    from tests.exec.emulated_gpu import emulate

    emulate(monkeypatch, seed)
    first, second = connected({FORTH: 512, BACK: 512})
    draw = random.Random(seed)
    sizes = [draw.choice((1, 8, 100, 512)) for _ in range(30)]
    sent = {channel: [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes] for channel in (FORTH, BACK)}
    received = {channel: [torch.zeros_like(each) for each in sent[channel]] for channel in sent}
    ends = {FORTH: (first, second), BACK: (second, first)}
    transfers = []
    posts = [(channel, side) for channel in sent for side in (0, 1) for _ in sizes]
    draw.shuffle(posts)
    places = dict.fromkeys(set(posts), 0)
    for channel, side in posts:  # any order of the posts of different ends
        buffers = (sent, received)[side][channel]
        transfers.append(ends[channel][side].post(channel, buffers[places[channel, side]]))
        places[channel, side] += 1
    for transfer in transfers:
        transfer.wait()
    for channel in sent:
        assert all(torch.equal(a, b) for a, b in zip(sent[channel], received[channel], strict=True))


@pytest.mark.parametrize("size", [0, 1, 512, 513, 1024, 5000])
def test_a_message_that_is_larger_than_a_slot_moves_in_pieces(monkeypatch, size):
    import torch

    from tests.exec.emulated_gpu import emulate

    emulate(monkeypatch)
    first, second = connected({FORTH: 512})
    sent, received = torch.randint(0, 256, (size,), dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    for transfer in (second.post(FORTH, received), first.post(FORTH, sent)):
        transfer.wait()
    assert torch.equal(sent, received)


def test_the_host_releases_streams_that_wait_for_a_peer(monkeypatch):
    import torch

    from tests.exec.emulated_gpu import emulate

    emulate(monkeypatch)
    first, second = connected({FORTH: 512})
    buffers = [torch.zeros(8, dtype=torch.uint8) for _ in range(5)]
    pending = [second.post(FORTH, buffer) for buffer in buffers]
    sends = [first.post(FORTH, buffer) for buffer in buffers[:1]]
    sends[0].wait()
    pending[0].wait()
    assert not pending[-1].work._event.is_set()
    second.abort()
    for transfer in pending:
        assert transfer.work._event.is_set()


@pytest.mark.parametrize(
    ("function", "text"),
    [
        ("cuIpcOpenMemHandle_v2", "cuIpcOpenMemHandle_v2 failed: CUDA_ERROR_217"),
        ("cuMemHostRegister_v2", "cuMemHostRegister_v2 failed: CUDA_ERROR_217"),
        ("cuStreamWaitValue32_v2", "cuStreamWaitValue32 failed: CUDA_ERROR_217"),
    ],
)
def test_a_driver_that_refuses_is_named_on_both_ranks(monkeypatch, function, text):
    from tests.exec.emulated_gpu import emulate

    emulate(monkeypatch).refuses[function] = 217
    for error in connected({FORTH: 512}):
        assert f"`transport.send_recv: copy_engine` is not possible on pp 0->1: {text}" in str(error)
        assert str(error).endswith("use `send_recv: backend`")


def test_wrong_bytes_and_a_lost_first_message_are_refused(monkeypatch):
    from pipeproof.exec.rank.torch import copy_channels
    from tests.exec.emulated_gpu import emulate

    driver = emulate(monkeypatch)
    driver._cuMemcpyDtoDAsync_v2 = lambda *_: None
    assert "its first messages arrive with other bytes" in str(connected({FORTH: 512})[1])
    monkeypatch.setattr(copy_channels, "_FIRST_MESSAGE_S", 0.05)
    monkeypatch.setattr(copy_channels, "_RELEASE_S", 0.05)
    driver = emulate(monkeypatch)
    driver._cuStreamWriteValue32_v2 = driver._cuMemcpyDtoDAsync_v2 = lambda *_: (
        None
    )  # a late copy would be into freed memory
    assert all("its first messages do not arrive within 0.05 s" in str(error) for error in connected({FORTH: 512}))


def test_two_hosts_are_refused(monkeypatch):
    from pipeproof.exec.rank.torch import copy_channels
    from tests.exec.emulated_gpu import emulate

    emulate(monkeypatch)
    names = iter(["here", "there"])
    lock = threading.Lock()

    def name():
        with lock:
            return next(names)

    monkeypatch.setattr(copy_channels.socket, "gethostname", name)
    monkeypatch.setattr(copy_channels, "_BOOT_ID", copy_channels.Path("no such file"))
    for error in connected({FORTH: 512}):
        assert "it is for GPUs of one host, and the ranks are on" in str(error)


def test_a_training_has_the_bits_of_the_unpartitioned_model(monkeypatch):
    from pipeproof.exec.rank.torch.copy_channels import slot_sizes
    from tests.exec.emulated_gpu import emulate
    from tests.exec.in_memory import compared_with_torch

    plan = subject(
        topology={"pp": 2},
        schedule={"num_micro_batches": 4, "kind": "zb_v", "num_chunks": 2},
        model={"num_layers": 4},
        run={"backend": "torch", "steps": 2},
    ).plan
    driver = emulate(monkeypatch)
    channels = connected(slot_sizes(plan.graph))

    def around(world):
        driver.pause = lambda: world.channels.memory.turn.wait(0.001)
        return replace(world, channels=channels[world.rank])

    for result in compared_with_torch(plan, around=around):
        assert result.loss_is_bitwise
        assert [each.name for each in result.gradients if not each.bitwise] == []


def test_slots_have_room_for_the_largest_message():
    from pipeproof.exec.rank.torch.copy_channels import slot_sizes

    graph = subject(topology={"pp": 2}, schedule={"num_micro_batches": 2}, run={"backend": "torch"}).plan.graph
    sizes = slot_sizes(graph)
    assert set(sizes) == set(graph.channels)
    largest = max(tensor.numel for tensor in graph.tensors) * 4
    assert all(size % 512 == 0 and largest <= size < largest + 512 for size in sizes.values())


def test_a_process_connects_again_and_again(monkeypatch):
    """As a script with a second pipeline does; what the first had mapped is no longer used."""
    from tests.exec.emulated_gpu import emulate

    emulate(monkeypatch)
    for _ in range(5):
        assert not [end for end in connected({FORTH: 512, BACK: 512}) if isinstance(end, RuntimeError)]
