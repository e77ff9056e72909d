"""Ports for the processes of a job."""

import socket

import pytest

from pipeproof.exec import rendezvous
from pipeproof.exec.rendezvous import free_ports


@pytest.fixture
def local_ports(tmp_path, monkeypatch):
    """Lets the system say of which range it gives any port."""

    def said(text):
        file = tmp_path / "ip_local_port_range"
        file.write_text(text)
        monkeypatch.setattr(rendezvous, "_LOCAL_PORTS", file)

    return said


def test_ports_are_different_free_and_none_that_the_system_gives(local_ports):
    local_ports("20000\t60999\n")
    ports = free_ports(40)
    assert len(set(ports)) == 40
    assert all(15_000 <= port < 20_000 for port in ports)
    for port in ports:
        with socket.socket() as mine:
            mine.bind(("127.0.0.1", port))


def test_a_port_that_is_taken_is_not_given(local_ports):
    local_ports("15002\t60999\n")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 15_001))
        first, second = free_ports(2)
    assert first == 15_000
    assert second not in {15_000, 15_001}


def test_where_the_system_does_not_say_its_range(tmp_path, monkeypatch):
    monkeypatch.setattr(rendezvous, "_LOCAL_PORTS", tmp_path / "none")
    assert all(15_000 <= port < 32_768 for port in free_ports(5))
