"""Several hosts on one machine: each has its own temporary directory and, where the kernel permits, its own network.

As a program it is the agent of one host: ``python hosts.py LAUNCHER HOST NUM_HOSTS RANKS_PER_HOST ADDRESS PORT PROGRAM
ARGUMENT...`` starts the ranks of that host with the variables that a launcher sets, and ends with the largest status.
"""

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]

_NETWORK = """
set -e
ip link set lo up
ip link add name hosts type bridge
ip link set hosts up
pids=
for i in $(seq 1 "$1"); do
  unshare --net --kill-child sleep infinity & pid=$!
  until [ "$(readlink /proc/$pid/ns/net)" != "$(readlink /proc/$$/ns/net)" ]; do sleep 0.02; done
  ip link add name here$i type veth peer name host$i
  ip link set host$i netns $pid
  ip link set here$i master hosts up
  nsenter --target $pid --net sh -c \
    "ip addr add 10.77.$((i / 250)).$((i % 250))/16 dev host$i; ip link set host$i up; ip link set lo up"
  pids="$pids $pid"
done
echo $pids
read -r _ || kill $pids
"""


@functools.cache
def can_separate_networks():
    """Return True if this user may make network namespaces and join them by a bridge."""
    with contextlib.suppress(OSError, subprocess.SubprocessError), Hosts(None, 1) as hosts:
        return bool(hosts.namespaces)
    return False


class Hosts:
    """``num`` hosts below ``directory``; with ``separate`` each has a network of its own."""

    def __init__(self, directory, num, *, separate=True):
        self.directory, self.num, self.separate = directory, num, separate
        self.namespaces = []
        self.started = []

    def __enter__(self):
        if self.separate:
            self._holder = subprocess.Popen(
                ["unshare", "--user", "--map-root-user", "--net", "--kill-child", "bash", "-c", _NETWORK, "-",
                 str(self.num)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            )  # fmt: skip
            self.namespaces = [int(pid) for pid in self._holder.stdout.readline().split()]
        return self

    def __exit__(self, *_):
        for process in self.started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if self.separate:
            self._holder.kill()
            self._holder.wait()

    def address(self, host):
        """Address at which other hosts reach one."""
        return f"10.77.0.{host + 1}" if self.separate else "127.0.0.1"

    def home(self, host):
        """Working directory of a host; ``tmp`` in it has its temporary files."""
        home = self.directory / f"host{host}"
        (home / "tmp").mkdir(parents=True, exist_ok=True)
        return home

    def cut(self, host):
        """Let no packet of a host with a network of its own come or go; connections are not closed."""
        subprocess.run([*self._enter(host), "ip", "link", "set", f"host{host + 1}", "down"], check=True)

    def _enter(self, host):
        return ["nsenter", "--target", str(self.namespaces[host]), "--user", "--preserve-credentials", "--net"]

    def start(self, host, *command, **variables):
        """Start a Python program on a host, as the leader of a session; its output goes to ``output`` in its home."""
        home = self.home(host)
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(home / "tmp"),
            **variables,
        }  # fmt: skip
        with (home / "output").open("ab") as output:
            process = subprocess.Popen(
                [*(self._enter(host) if self.separate else []), sys.executable, *map(str, command)],
                cwd=home, env=environment, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        self.started.append(process)
        return process

    def output(self, host):
        """Output of the programs of a host so far."""
        return (self.home(host) / "output").read_text(errors="replace")

    def await_output(self, host, text, timeout_s=120.0):
        """Wait until a host has printed a text."""
        ends = time.monotonic() + timeout_s
        while text not in self.output(host):
            assert time.monotonic() < ends, f"host {host} printed no {text!r}:\n{self.output(host)}"
            time.sleep(0.05)

    def left(self):
        """Files of pipeproof in the hosts' temporary directories, and processes with such a directory."""
        files = [path for host in range(self.num) for path in (self.home(host) / "tmp").glob("pipeproof*")]
        return files, self.processes("pipeproof")

    def processes(self, text):
        """Commands of the hosts' processes that have a text in them."""
        marks = [f"TMPDIR={self.home(host) / 'tmp'}".encode() for host in range(self.num)]
        processes = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                variables, command = (folder / "environ").read_bytes(), (folder / "cmdline").read_bytes()
                if any(mark in variables for mark in marks) and text.encode() in command:
                    processes.append(command.replace(b"\0", b" ").decode())
        return processes


def variables(launcher, host, num_hosts, per_host, local, address, port):
    """Variables that a launcher sets for one rank."""
    rank, size = host * per_host + local, num_hosts * per_host
    if launcher == "cyclic":  # as srun --distribution=cyclic: rank 0 on the first host, rank 1 on the second
        rank, launcher = local * num_hosts + host, "open_mpi"
    if launcher == "open_mpi":
        return {
            "OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": size, "OMPI_COMM_WORLD_LOCAL_RANK": local,
            "OMPI_COMM_WORLD_LOCAL_SIZE": per_host, "MASTER_ADDR": address, "MASTER_PORT": port,
        }  # fmt: skip
    assert launcher == "slurm"
    return {
        "SLURM_PROCID": rank, "SLURM_NTASKS": size, "SLURM_STEP_NUM_TASKS": size, "SLURM_LOCALID": local,
        "SLURM_NODEID": host, "SLURM_STEP_TASKS_PER_NODE": f"{per_host}(x{num_hosts})",
        "SLURM_JOB_ID": 7, "SLURM_STEP_ID": 0, "MASTER_ADDR": address, "MASTER_PORT": port,
    }  # fmt: skip


def main():
    """Start the ranks of one host and wait for them."""
    launcher, host, num_hosts, per_host, address, port, *program = sys.argv[1:]
    host, num_hosts, per_host = int(host), int(num_hosts), int(per_host)
    ranks = []
    for local in range(per_host):
        own = variables(launcher, host, num_hosts, per_host, local, address, port)
        environment = {**os.environ, **{key: str(value) for key, value in own.items()}}
        ranks.append(subprocess.Popen([sys.executable, *program], env=environment))
    statuses = [rank.wait() for rank in ranks]
    sys.stdout.write(f"statuses {statuses}\n")
    sys.exit(max(status if status >= 0 else 128 - status for status in statuses))


if __name__ == "__main__":
    main()
