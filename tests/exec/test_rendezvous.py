"""Ports for the processes of a job."""

import socket
import struct

import pytest

from pipeproof.exec.store.rendezvous import (
    GLOO_INTERFACE,
    address_towards,
    interface_towards,
    is_loopback_name,
    rank_environment,
    reserved_ports,
)

IP_LOCAL_PORT_RANGE = 51
"""Linux's option, from 6.3 on, by which a socket says which ports it would take for "any"."""


def any_of(port):
    """A socket that asks for any port, as gloo's do, and would take this one alone."""
    asks = socket.socket()
    asks.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        asks.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, struct.pack("I", port << 16 | port))
    except OSError:
        pytest.skip("this kernel does not let a socket choose its range")
    with asks:
        asks.bind(("127.0.0.1", 0))


def listen_at(port):
    """Listen like rank 0's store."""
    store = socket.socket()
    store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with store:
        store.bind(("", port))
        store.listen()


def test_ports_are_different_and_let_a_store_listen():
    with reserved_ports(40) as ports:
        assert len(set(ports)) == 40
        for port in ports:
            listen_at(port)


def test_no_process_that_asks_for_any_port_gets_a_reserved_one():
    with reserved_ports(1) as (port,), pytest.raises(OSError, match="in use"):
        any_of(port)
    any_of(port)


def test_where_a_store_could_not_listen_the_ports_are_only_free(monkeypatch):
    monkeypatch.setattr("pipeproof.exec.store.rendezvous._lets_listen", lambda port: False)
    with reserved_ports(2) as ports:
        for port in ports:
            with socket.socket() as mine:
                mine.bind(("127.0.0.1", port))


def test_the_way_to_this_host_is_its_loopback_interface():
    assert address_towards("127.0.0.1", 1) == "127.0.0.1"
    assert interface_towards("127.0.0.1") == "lo"


@pytest.mark.parametrize(
    ("host", "addresses", "expected"),
    [
        ("node-1", ["127.0.1.1"], True),
        ("node-1", ["127.0.1.1", "::1"], True),
        ("node-1", ["127.0.1.1", "10.0.0.1"], False),
        ("node-1", ["10.0.0.1"], False),
        ("localhost", ["127.0.0.1", "::1"], False),
        ("127.0.0.1", ["127.0.0.1"], False),
    ],
)
def test_a_hosts_own_name_at_its_loopback_interface_is_known(host, addresses, expected, monkeypatch):
    found = [(0, 0, 0, "", (address, 0)) for address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: found)
    assert is_loopback_name(host) is expected


def test_a_name_that_nobody_knows_is_no_loopback_name():
    assert not is_loopback_name("no-such-host.invalid")


@pytest.mark.parametrize("backend", ["paddle", "torch"])
def test_a_run_on_one_host_ignores_the_store_that_a_shell_names(backend, monkeypatch):
    """Paddle prefers these variables to its own."""
    monkeypatch.setenv("MASTER_ADDR", "another.host")
    monkeypatch.setenv("MASTER_PORT", "29500")
    environment = rank_environment(backend, 0, 2, [1, 2, 3])
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("127.0.0.1", "1")


@pytest.mark.parametrize("backend", ["paddle", "torch"])
def test_gloo_of_a_run_on_one_host_listens_at_loopback(backend):
    assert interface_towards("127.0.0.1") is not None
    assert rank_environment(backend, 0, 2, [1, 2, 3])[GLOO_INTERFACE] == interface_towards("127.0.0.1")
