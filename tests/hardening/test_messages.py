"""Messages where the machine is the problem, and outputs that another program must not execute."""

import errno
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from pipeproof.__main__ import LEAST_ADDRESS_SPACE, start
from pipeproof.cli.main import main
from pipeproof.exec.launch import supervisor
from pipeproof.exec.store.rendezvous import reserved_ports
from pipeproof.exec.store.run_codes import DIED


def test_names_of_files_do_not_control_the_terminal(tmp_path):
    for arguments in (("state", "align", tmp_path / "a\x1b[31mb", tmp_path / "c"), ("check", tmp_path / "a\x1b[31mb")):
        result = CliRunner().invoke(main, [str(argument) for argument in arguments], color=True)
        assert result.exit_code == 2
        assert "\x1b[31mb" not in result.stderr


def test_names_in_files_do_not_control_the_terminal(tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps({"pipeproof": 1, "model\x1b[31m\x9b2J": {}}))
    result = CliRunner().invoke(main, ["check", str(tmp_path / "plan.json")], color=True)
    assert "model\N{REPLACEMENT CHARACTER}[31m" in result.output
    assert "\x1b[31m\x9b" not in result.output
    assert "\x9b" not in result.output


def test_a_process_that_ended_on_a_full_disk(tmp_path, monkeypatch):
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
    process.wait()
    launcher = supervisor.Launcher(SimpleNamespace(directory=tmp_path / "job"), None, 1.0)
    worker = supervisor._Worker("reference", None, process, 0, tmp_path / "reference.out")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 100))
    finding = launcher._death(worker)
    assert f"ended with status 1: the disk of {tmp_path} is full" in finding.message
    assert "TMPDIR" in finding.help


def run_with(limit, value, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "pipeproof", *arguments],
        capture_output=True, text=True, check=False, preexec_fn=lambda: resource.setrlimit(limit, (value, value)),
    )  # fmt: skip


def test_too_little_address_space_for_any_command():
    ended = run_with(resource.RLIMIT_AS, LEAST_ADDRESS_SPACE - 1, "schedule", "list")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "an address space of 268 MB (`ulimit -v`)" in ended.stderr
    assert run_with(resource.RLIMIT_AS, LEAST_ADDRESS_SPACE, "schedule", "list").returncode == 0


@pytest.mark.parametrize("raised", [MemoryError, KeyboardInterrupt])
def test_errors_outside_of_any_command(monkeypatch, capsys, raised):
    def ends(**_):
        raise raised

    monkeypatch.setattr("pipeproof.cli.main.main", ends)
    with pytest.raises(SystemExit) as ended:
        start()
    assert (ended.value.code, capsys.readouterr().err) == {
        MemoryError: (2, "error: out of memory\n"),
        KeyboardInterrupt: (130, "interrupted\n"),
    }[raised]


def test_the_limits_of_processes_are_named_where_one_ended(monkeypatch):
    finding = DIED.finding("rank 0 ended", help="look")
    monkeypatch.setattr(supervisor, "address_space_limit", lambda: None)
    monkeypatch.setattr(supervisor, "open_files_limit", lambda: 1024)
    assert supervisor._with_limits(finding) == finding
    monkeypatch.setattr(supervisor, "address_space_limit", lambda: 700_000_000)
    monkeypatch.setattr(supervisor, "open_files_limit", lambda: 32)
    text = "an address space of 668 MiB (`ulimit -v`) and 32 open files (`ulimit -n`), which may be too little"
    assert supervisor._with_limits(finding).help == f"look; each process may have only {text}"


def test_no_free_port_and_no_loopback(monkeypatch):
    class Socket(socket.socket):
        error = (errno.EADDRINUSE, "bind")

        def bind(self, address):
            self.refuse("bind")
            super().bind(address)

        def connect(self, address):
            self.refuse("connect")
            super().connect(address)

        def refuse(self, call):
            number, at = self.error
            if at == call:
                raise OSError(number, os.strerror(number))

    monkeypatch.setattr("pipeproof.exec.store.rendezvous.socket.socket", Socket)
    with pytest.raises(OSError, match=r"no port of 127\.0\.0\.1 is free") as refused, reserved_ports(1):
        pass
    assert refused.value.errno == errno.EADDRINUSE
    Socket.error = (errno.ENETUNREACH, "connect")
    with pytest.raises(OSError, match="is the loopback interface up") as refused, reserved_ports(1):
        pass
    assert refused.value.errno == errno.ENETUNREACH
