"""Long JSON values in a store of bounded values, and the frameworks' stores at one address."""

import contextlib
import json
import os
import socket
from pathlib import Path

import pytest

from pipeproof.exec.store.store import MOST_BYTES, get_json, has_json, put_json
from tests.train.fake_store import FakeStore


@pytest.mark.parametrize("length", [0, 1, MOST_BYTES - 2, MOST_BYTES - 1, MOST_BYTES, 5 * MOST_BYTES + 17])
def test_values_of_any_length_go_through_in_bounded_parts(length):
    store = FakeStore()
    assert not has_json(store, "key")
    put_json(store, "key", "x" * length)
    assert has_json(store, "key")
    assert get_json(store, "key", 0.1) == "x" * length
    parts = [store.get(key, 0) for key in sorted(store.keys())]
    assert len(parts) == -(-(length + 2) // MOST_BYTES)
    assert max(map(len, parts)) <= MOST_BYTES + len("1024\n")


def test_a_text_beyond_the_bound_is_refused():
    with pytest.raises(ValueError, match="at most 67108864 go through the store"):
        put_json(FakeStore(), "key", "x" * (MOST_BYTES * 1024))


def test_a_value_that_nobody_writes_is_not_awaited_for_ever():
    with pytest.raises(TimeoutError):
        get_json(FakeStore(), "key", 0.01)


@pytest.mark.parametrize(
    "first",
    [
        "",
        "no number\n{}",
        "0\n{}",
        "-1\n{}",
        "1025\n{}",
        "1{}",
        "1\n{",
        f"1\n{'x' * (MOST_BYTES + 6)}",
        f"1\n{'[' * MOST_BYTES}",
    ],
)
def test_foreign_content_is_refused_and_never_evaluated(first):
    store = FakeStore()
    store.set("key/0", first)
    with pytest.raises(ValueError, match=r"key in the store|Expecting"):
        get_json(store, "key", 0.01)


def test_a_content_is_json_and_nothing_else():
    store = FakeStore()
    put_json(store, "key", {"a": [1, None, "ü"]})
    assert json.loads(store.get("key/0", 0).partition("\n")[2]) == {"a": [1, None, "ü"]}


@pytest.mark.needs_torch
def test_rank_0_listens_at_the_named_address_alone(monkeypatch):
    from pipeproof.exec.store import torch_store

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0"}.items():
        monkeypatch.setitem(os.environ, name, value)
    store = torch_store.process_store.__wrapped__()
    listening = [line.split()[1] for line in _sockets() if line.split()[3] == "0A"]
    assert [address for address in listening if address.endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]
    store.set("a", "1")
    assert store.of_thread().get("a", 1.0) == "1"
    assert (store.add("n", 2), store.add("n")) == (2, 2)
    store.remove("a")
    assert not store.has("a")
    with pytest.raises(ConnectionError, match="Address already in use"):
        torch_store.process_store.__wrapped__()


def torch_store(port):
    from datetime import timedelta

    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))


def paddle_store(port):
    import paddle

    return paddle.base.core.TCPStore("127.0.0.1", port, True, 1)


@pytest.mark.parametrize("made_by", [
    pytest.param(torch_store, marks=pytest.mark.needs_torch, id="torch"),
    pytest.param(paddle_store, marks=pytest.mark.needs_paddle, id="paddle"),
])  # fmt: skip
def test_strangers_do_not_end_a_store(made_by):
    """One sends nothing and stays, one closes at once, one sends bytes that are not a request, and stays."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store = made_by(port)
    assert store.add("n", 1) == 1
    with socket.create_connection(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port)) as speaking:
        socket.create_connection(("127.0.0.1", port)).close()
        speaking.sendall(bytes(range(64, 128)))
        for number in range(2, 20):
            assert store.add("n", 1) == number


@pytest.mark.needs_torch
@pytest.mark.parametrize(
    ("host", "has_other_hosts", "address"),
    [("node-1", True, "00000000"), ("node-1", False, "0100007F"), ("127.0.0.1", True, "0100007F")],
)
def test_a_host_whose_name_is_a_loopback_address_listens_for_other_hosts(host, has_other_hosts, address, monkeypatch):
    from pipeproof.exec.store import torch_store

    known = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda _, *rest, **options: known("127.0.0.1", *rest, **options))
    with torch_store._listening(host, 0, has_other_hosts=has_other_hosts) as end:
        port = end.getsockname()[1]
        listening = [line.split()[1] for line in _sockets() if line.split()[3] == "0A"]
    assert [each for each in listening if each.endswith(f":{port:04X}")] == [f"{address}:{port:04X}"]


def _sockets():
    """Lines of the kernel's tables of sockets, of both families."""
    for name in ("tcp", "tcp6"):
        yield from Path(f"/proc/net/{name}").read_text().splitlines()[1:]


@pytest.mark.needs_paddle
def test_paddles_store_of_a_run_on_one_host_takes_no_other_host():
    import paddle

    from pipeproof.exec.store.paddle_store import _network_sockets, refuse_other_hosts
    from pipeproof.exec.store.rendezvous import reserved_ports

    def interface(of):
        return of.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16)

    with socket.socket() as plain:
        with contextlib.suppress(OSError):  # a kernel that forbids it: see SECURITY.md
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")
        expected = interface(plain)
    with reserved_ports(1) as (port,):
        server = paddle.base.core.TCPStore("127.0.0.1", port, True, 1)
    for host, bound in (("10.0.0.1", b""), ("127.0.0.1", expected)):
        refuse_other_hosts(host, port)
        listening = [
            interface(end)
            for end in _network_sockets()
            if end.getsockname()[1] == port and end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        ]
        assert listening == [bound]
        client = paddle.base.core.TCPStore("127.0.0.1", port, False, 1)
        assert client.add(f"of {host}", 1) == 1
    del server
