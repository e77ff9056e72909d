"""Rehearsals and trainings on two hosts: separate temporary directories and, where the kernel permits, networks."""

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.exec.hosts import REPOSITORY, Hosts, can_separate_networks
from tests.plans import plan_dict

pytestmark = [pytest.mark.slow, pytest.mark.needs_torch]
PATIENCE_S = 300.0
PORT = 29_511
AGENT = REPOSITORY / "tests" / "exec" / "hosts.py"


@pytest.fixture
def hosts(tmp_path):
    with Hosts(tmp_path, 2, separate=can_separate_networks()) as made:
        made.port = PORT if made.separate else 20_000 + os.getpid() % 10_000
        yield made


def plan_of(hosts, backend="torch", steps=2, **sections):
    file = hosts.directory / "plan.json"
    file.write_text(json.dumps(plan_dict(run={"backend": backend, "steps": steps}, **sections)))
    return file


def started(hosts, host, *arguments, launcher="open_mpi", per_host=2, program=("-m", "pipeproof")):
    address = hosts.address(0)
    if launcher == "torchrun":
        command = (
            "-m", "torch.distributed.run", "--nnodes", 2, "--node-rank", host, "--nproc-per-node", per_host,
            "--master-addr", address, "--master-port", hosts.port,
        )  # fmt: skip
        return hosts.start(host, *command, *program, *arguments)
    if launcher == "paddle":  # it starts files alone
        wrapper = hosts.home(host) / "wrapper.py"
        wrapper.write_text("from pipeproof.cli.main import main\nmain()\n")
        command = (
            "-m", "paddle.distributed.launch", "--nnodes", 2, "--nproc_per_node", per_host, "--rank", host,
            "--master", f"{address}:{hosts.port}", "--host", hosts.address(host), "--log_dir", "log", wrapper,
        )  # fmt: skip
        return hosts.start(host, *command, *arguments)
    return hosts.start(host, AGENT, launcher, host, 2, per_host, address, hosts.port, *program, *arguments)


def ended(hosts, processes):
    """Exit statuses of the agents; nothing of the run may be left."""
    statuses = [process.wait(PATIENCE_S) for process in processes]
    ends = time.monotonic() + 20.0
    while any(hosts.left()) and time.monotonic() < ends:
        time.sleep(0.2)
    assert hosts.left() == ([], [])
    return statuses


def ranks_on(hosts, host):
    """Process ids of the ranks of a host."""
    mark, found = f"TMPDIR={hosts.home(host) / 'tmp'}", {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = dict(
                each.partition("=")[::2] for each in (folder / "environ").read_text(errors="replace").split("\0")
            )
            command = (folder / "cmdline").read_text().split("\0")
            if mark == f"TMPDIR={variables.get('TMPDIR')}" and command[1].endswith("long.py"):
                found[int(variables["OMPI_COMM_WORLD_RANK"])] = int(folder.name)
    return found


@pytest.mark.parametrize(("launcher", "backend"), [
    ("torchrun", "torch"), ("open_mpi", "torch"), ("slurm", "torch"), ("slurm", "paddle"), ("paddle", "paddle"),
])  # fmt: skip
def test_a_rehearsal_on_two_hosts_has_one_report(hosts, launcher, backend):
    plan = plan_of(hosts, backend, topology={"pp": 2, "dp": 2})
    processes = [
        started(hosts, host, "rehearse", plan, "--report", "report.json", launcher=launcher) for host in range(2)
    ]
    assert ended(hosts, processes) == [0, 0], hosts.output(0) + hosts.output(1)
    report = json.loads((hosts.home(0) / "report.json").read_text())
    assert report["passed"]
    assert report["log_matches_graph"]
    assert len(report["seconds_by_host"]) == 2
    assert report["messages"] > 0
    assert "correct: every element arrived" in hosts.output(0)
    assert "correct" not in hosts.output(1)


def test_a_cyclic_order_of_ranks_that_separates_a_tensor_parallel_group_is_reported(hosts):
    plan = plan_of(hosts, topology={"pp": 2, "tp": 2, "dp": 2})
    processes = [
        hosts.start(
            host, AGENT, "cyclic", host, 2, 4, hosts.address(0), hosts.port, "-m", "pipeproof", "rehearse", plan,
            "--report", "report.json",
        )
        for host in range(2)
    ]  # fmt: skip
    assert ended(hosts, processes) == [0, 0], hosts.output(0) + hosts.output(1)
    report = json.loads((hosts.home(0) / "report.json").read_text())
    assert report["passed"]
    assert "PP950" in [finding["code"] for finding in report["findings"]]
    assert "warning[PP950]: ranks 0 and 1 of one tp group are on " in hosts.output(0)


def test_a_late_host_is_awaited_and_named(hosts):
    plan = plan_of(hosts, topology={"pp": 4}, model={"num_layers": 4})
    first = started(hosts, 0, "rehearse", plan)
    hosts.await_output(0, "waiting for ranks 2, 3")
    assert ended(hosts, [first, started(hosts, 1, "rehearse", plan)]) == [0, 0]


def test_a_host_with_another_plan_is_refused_on_both_sides(hosts):
    plan = plan_of(hosts, topology={"pp": 4}, model={"num_layers": 4})
    other = hosts.directory / "other.json"
    other.write_text(json.dumps(plan_dict(topology={"pp": 4}, model={"num_layers": 8}, run={"backend": "torch"})))
    processes = [started(hosts, host, "rehearse", file) for host, file in enumerate((plan, other))]
    assert ended(hosts, processes) == [3, 3]
    for host in range(2):
        assert "error[PP947]: rank 0: rank 2 on" in hosts.output(host)
        assert "the plan's graph" in hosts.output(host)


SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from pipeproof.diagnostics.finding import PipeproofError
from pipeproof.torch import Pipeline, save_dcp, stages_of_sequential

torch.manual_seed(0)
dist.init_process_group("gloo")
model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(8)))
x, y = torch.randn(8, 16), torch.randn(8, 16)
pipe = Pipeline(stages_of_sequential(model, 4), schedule="1f1b", num_micro_batches=4,
                loss_fn=nn.functional.mse_loss, example=(x[:2],))
optimizer = torch.optim.AdamW(nn.ModuleList(pipe.stages.values()).parameters(), lr=1e-3)
for step in range(3):
    loss = pipe.step(x, target=y)
    optimizer.step()
    optimizer.zero_grad()
found = pipe.compare(model, x, target=y)
if dist.get_rank() == 0:
    print("differences", len(found.differences), "loss", found.loss == found.reference_loss, flush=True)
try:
    save_dcp("checkpoint", pipe.stages, optimizer)
except PipeproofError as error:
    print(f"rank {dist.get_rank()} has: {error}", flush=True)
save_dcp(sys.argv[1], pipe.stages, optimizer)
dist.destroy_process_group()
"""


def test_a_users_script_trains_compares_and_saves_on_two_hosts(hosts):
    script = hosts.directory / "train.py"
    script.write_text(SCRIPT)
    interfaces = [f"host{host + 1}" if hosts.separate else "lo" for host in range(2)]
    processes = [
        hosts.start(
            host, "-m", "torch.distributed.run", "--nnodes", 2, "--node-rank", host, "--nproc-per-node", 2,
            "--master-addr", hosts.address(0), "--master-port", hosts.port, script, hosts.directory / "shared",
            GLOO_SOCKET_IFNAME=interfaces[host],
        )
        for host in range(2)
    ]  # fmt: skip
    assert ended(hosts, processes) == [0, 0], hosts.output(0) + hosts.output(1)
    assert "differences 0 loss True" in hosts.output(0)
    for rank in range(4):
        assert f"rank {rank} has: PP936: rank {max(rank, 2)} on" in hosts.output(rank // 2)
    assert "sees another directory" in hosts.output(0)
    assert not [path for host in range(2) for path in hosts.home(host).glob("*checkpoint*")]
    assert (hosts.directory / "shared" / ".metadata").exists()


def test_the_ranks_of_a_users_script_end_with_an_agent_that_is_killed(hosts):
    script = hosts.directory / "train.py"
    script.write_text(SCRIPT.replace("range(3)", "range(100_000)").replace(
        "    optimizer.zero_grad()\n", "    optimizer.zero_grad()\n    if step == 3: print('trains', flush=True)\n"
    ))  # fmt: skip
    agents = [
        hosts.start(
            host, "-m", "torch.distributed.run", "--nnodes", 2, "--node-rank", host, "--nproc-per-node", 2,
            "--master-addr", hosts.address(0), "--master-port", hosts.port, script, "none",
            GLOO_SOCKET_IFNAME=f"host{host + 1}" if hosts.separate else "lo",
        )
        for host in range(2)
    ]  # fmt: skip
    for host in range(2):
        hosts.await_output(host, "trains\ntrains", PATIENCE_S)
    agents[1].kill()
    assert [agent.wait(PATIENCE_S) for agent in agents] == [1, -9]
    ends = time.monotonic() + 60.0
    while (left := hosts.processes("train.py")) and time.monotonic() < ends:
        time.sleep(0.2)
    assert left == []
    for host in range(2):
        assert "has ended before it" in hosts.output(host)


# --- failures ---


def long(hosts):
    """A program that is ``pipeproof``, but rehearses 100,000 steps, and prints a line when its steps begin."""
    program = hosts.directory / "long.py"
    program.write_text(
        "from pipeproof.cli.main import main\n"
        "from pipeproof.exec.rank.adapter import RankAdapter\n"
        "begin = RankAdapter.begin\n"
        "RankAdapter.begin = lambda self, step: (step == 3 and print('steps', flush=True), begin(self, step))[1]\n"
        "from pipeproof.exec.rehearse import rehearsal_console\n"
        "rehearsal_console.NUM_STEPS = 100_000\n"
        "main()\n"
    )
    return (program,)


@pytest.fixture
def running(hosts):
    """A long rehearsal on two hosts that has begun, with the processes of its ranks."""
    plan = plan_of(hosts, topology={"pp": 4}, model={"num_layers": 4})
    processes = [started(hosts, host, "rehearse", plan, "--timeout", "10", program=long(hosts)) for host in range(2)]
    for host in range(2):
        hosts.await_output(host, "steps\nsteps\n", PATIENCE_S)
    return processes, {**ranks_on(hosts, 0), **ranks_on(hosts, 1)}


def ended_ranks(hosts, *but):
    """Wait until the ranks of both hosts have ended; stopped ones are killed."""
    ends = time.monotonic() + PATIENCE_S
    while {**ranks_on(hosts, 0), **ranks_on(hosts, 1)}.keys() - {*but}:
        assert time.monotonic() < ends
        time.sleep(0.2)
    for rank, pid in (*ranks_on(hosts, 0).items(), *ranks_on(hosts, 1).items()):
        assert rank in but
        os.kill(pid, signal.SIGKILL)


def test_a_killed_rank_is_named_on_both_hosts(hosts, running):
    processes, ranks = running
    os.kill(ranks[3], signal.SIGKILL)
    assert [process.wait(PATIENCE_S) for process in processes] == [3, 137]
    for host in range(2):
        assert "error[PP902]: rank 2: its communication ended while it waits in step" in hosts.output(host)
        assert "for rank 3: " in hosts.output(host)


def test_a_stopped_rank_is_named_on_both_hosts(hosts, running):
    processes, ranks = running
    os.kill(ranks[2], signal.SIGSTOP)
    ended_ranks(hosts, 2)
    assert [process.wait(PATIENCE_S) for process in processes] == [3, 137]
    for host in range(2):
        assert "the pipeline made no progress for 10 s" in hosts.output(host)
        assert "rank 2 does not answer" in hosts.output(host)
        assert "the waits end at rank 2" in hosts.output(host)


@pytest.mark.parametrize(("lost", "statuses", "rank"), [(0, [-9, 3], 1), (1, [3, -9], 2)])
def test_a_host_that_is_lost_is_named_by_the_other(hosts, running, lost, statuses, rank):
    """The first has the store."""
    processes, _ = running
    os.killpg(processes[lost].pid, signal.SIGKILL)
    assert [process.wait(PATIENCE_S) for process in processes] == statuses
    assert f"for rank {rank}: " in hosts.output(1 - lost)


def test_a_network_that_is_cut_ends_both_hosts(hosts, running):
    if not hosts.separate:
        pytest.skip("the hosts have no networks of their own")
    processes, _ = running
    hosts.cut(0)
    assert [process.wait(PATIENCE_S) for process in processes] == [3, 3]
    assert "rank 2 does not answer" in hosts.output(0)
    assert "the store of the process group does not answer" in hosts.output(1)
