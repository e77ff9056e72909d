"""GPUs of the doctor's two processes, and NCCL's environment when they share one."""

import os

import pytest

from pipeproof.exec.rank.gpu_assignment import shared_gpu

NAMES = ("NCCL_HOSTID", "NCCL_SOCKET_IFNAME")


@pytest.fixture(autouse=True)
def untold(monkeypatch):
    """Nothing is said to NCCL, and what is said here is forgotten."""
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_two_processes_take_a_gpu_each():
    assert [shared_gpu(place, 8) for place in (0, 1)] == [0, 1]
    assert not any(name in os.environ for name in NAMES)


def test_on_one_gpu_each_process_is_a_machine():
    hosts = set()
    for place in (0, 1):
        assert shared_gpu(place, 1) == 0
        hosts.add(os.environ["NCCL_HOSTID"])
    assert len(hosts) == 2
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"


def test_four_processes_share_two_gpus():
    assert [shared_gpu(place, 2, 4) for place in range(4)] == [0, 1, 0, 1]
    assert NAMES[0] in os.environ


def test_an_interface_that_was_chosen_stays(monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    shared_gpu(0, 1)
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth7"


def test_a_missing_gpu_is_reported():
    with pytest.raises(RuntimeError, match="no GPU is visible"):
        shared_gpu(0, 0)
