"""Assignment of GPUs to processes, and requirements for sharing one."""

import json
import os
import socket

import pytest
from click.testing import CliRunner

from pipeproof.cli.main import main
from pipeproof.exec.rank import gpu_assignment as gpus
from pipeproof.exec.rank.job_files import Job, RunOptions
from pipeproof.exec.store.rendezvous import rank_environment
from pipeproof.specs.plan_sections import RunSpec
from pipeproof.verify.certificate import Certificate, Verdict
from tests.plans import plan_dict, subject

TORCH = RunSpec(backend="torch", device="gpu")
PADDLE = RunSpec(backend="paddle", device="gpu")
LAUNCHERS = (
    "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PADDLE_LOCAL_RANK", "PADDLE_RANK_IN_NODE", "PADDLE_LOCAL_SIZE",
    "PADDLE_TRAINER_ID", "FLAGS_selected_gpus",
)  # fmt: skip


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Without variables of launchers and NCCL; variables set during a test are removed again."""
    for name in (*LAUNCHERS, "NCCL_HOSTID", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def sees(monkeypatch, count):
    monkeypatch.setattr(gpus, "num_gpus", lambda backend: count)


@pytest.mark.parametrize(
    ("environment", "run", "gpu"),
    [
        ({}, TORCH, 0),
        ({"LOCAL_RANK": "3", "RANK": "11"}, TORCH, 3),
        ({"PADDLE_TRAINER_ID": "2"}, PADDLE, 2),
        ({"PADDLE_TRAINER_ID": "10", "PADDLE_LOCAL_RANK": "2"}, PADDLE, 2),
        ({"PADDLE_TRAINER_ID": "1", "PADDLE_LOCAL_RANK": "1", "FLAGS_selected_gpus": "5"}, PADDLE, 5),
    ],
)
def test_each_process_takes_the_gpu_of_its_local_rank(monkeypatch, environment, run, gpu):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert gpus.choose_gpu(run, share_gpus=False) == gpu
    assert "NCCL_HOSTID" not in os.environ


@pytest.mark.parametrize("run", [TORCH, PADDLE])
def test_those_that_share_are_dealt_out_and_each_is_a_machine_to_nccl(monkeypatch, run):
    sees(monkeypatch, 3)
    taken, machines = [], set()
    for place in range(8):
        environment = rank_environment(run.backend, place, 8, [*range(9)], "gpu")
        for name in LAUNCHERS:
            if name in environment:
                monkeypatch.setenv(name, environment[name])
        taken.append(gpus.choose_gpu(run, share_gpus=True))
        machines.add(os.environ["NCCL_HOSTID"])
        assert socket.gethostname() in os.environ["NCCL_HOSTID"]
        assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"
    assert taken == [0, 1, 2, 0, 1, 2, 0, 1]
    assert len(machines) == 8


def test_the_interface_that_somebody_chose_stays(monkeypatch):
    sees(monkeypatch, 1)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    gpus.choose_gpu(TORCH, share_gpus=True)
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth0"


def test_there_is_nothing_to_share_without_a_gpu(monkeypatch):
    sees(monkeypatch, 0)
    with pytest.raises(RuntimeError, match="PyTorch sees no GPU here"):
        gpus.choose_gpu(TORCH, share_gpus=True)


@pytest.mark.parametrize("backend", ["paddle", "torch"])
def test_fewer_gpus_than_ranks_are_named_with_the_option_that_shares_them(monkeypatch, backend):
    plan = subject(topology={"pp": 4}, run={"backend": backend, "device": "gpu"})
    name = {"paddle": "Paddle", "torch": "PyTorch"}[backend]
    sees(monkeypatch, 1)
    missing = gpus.missing_gpus(plan, share_gpus=False)
    assert missing.code == "PP913"
    assert missing.message == f"run.device is gpu, and {name} sees 1 GPU here for 4 ranks"
    assert "--share-gpus" in missing.help
    assert gpus.missing_gpus(plan, share_gpus=True) is None
    assert gpus.shared_gpus_text(plan).startswith("4 ranks share 1 GPU, and NCCL connects them by sockets: times mean")
    sees(monkeypatch, 4)
    assert gpus.missing_gpus(plan, share_gpus=False) is None
    sees(monkeypatch, 0)
    missing = gpus.missing_gpus(plan, share_gpus=True)
    assert "sees 0 GPUs here for 4 ranks" in missing.message
    assert "--share-gpus" not in missing.help


@pytest.mark.parametrize(("backend", "variable"), [("torch", "LOCAL_WORLD_SIZE"), ("paddle", "PADDLE_LOCAL_SIZE")])
def test_a_launcher_of_several_machines_states_the_number_of_local_processes(monkeypatch, backend, variable):
    plan = subject(topology={"pp": 4}, run={"backend": backend, "device": "gpu"})
    sees(monkeypatch, 2)
    assert gpus.missing_gpus(plan, share_gpus=False) is not None
    monkeypatch.setenv(variable, "2")
    assert gpus.missing_gpus(plan, share_gpus=False) is None


@pytest.mark.parametrize(
    ("verb", "options", "text"),
    [
        ("run", ["--share-gpus"], "error[PP106]: --share-gpus: run.device is cpu"),
        ("rehearse", ["--share-gpus"], "error[PP106]: --share-gpus: run.device is cpu"),
        ("run", ["--share-gpus", "--profile", "edges.json"], "--profile: "),
        ("rehearse", ["--share-gpus", "-o", "edges.json"], "--output: "),
    ],
)
def test_sharing_of_cpus_and_missing_measurements_are_reported(tmp_path, monkeypatch, verb, options, text):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.json").write_text(json.dumps(plan_dict()))
    result = CliRunner().invoke(main, [verb, "plan.json", *options])
    assert result.exit_code == 2, result.output
    assert text in result.output


def test_workers_know_that_they_share_gpus(tmp_path):
    for share in (False, True):
        certificate = Certificate("0" * 64, 1, "0" * 64, Verdict.PROVED)
        Job(tmp_path, plan_dict(), certificate, RunOptions(share_gpus=share)).save()
        assert Job.load(tmp_path).options.share_gpus is share


def test_paddle_meets_over_the_backend_of_its_device():
    backends = [
        rank_environment("paddle", 0, 2, [1, 2, 3], device)["PADDLE_DISTRI_BACKEND"] for device in ("cpu", "gpu")
    ]
    assert backends == ["gloo", "nccl"]


@pytest.mark.needs_paddle
def test_kernels_that_do_nothing_are_refused_for_runs(monkeypatch):
    import paddle

    from pipeproof.stages.paddle.runtime import require_kernels, start_paddle

    start_paddle()
    require_kernels()
    with pytest.raises(RuntimeError, match=r"Paddle sees no GPU here: run\.device gpu needs a build with CUDA"):
        start_paddle(0)
    monkeypatch.setattr(paddle, "matmul", lambda a, b: a)  # the memory of its result, as it was
    with pytest.raises(RuntimeError, match=r"kernels on cpu do not compute: .*`pipeproof rehearse`"):
        require_kernels()
