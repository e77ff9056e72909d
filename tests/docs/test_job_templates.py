"""Templates of ``docs/many-hosts.md``: their words are options of the launchers; real ranks start by two of them."""

import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import yaml

from tests.plans import plan_dict

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "many-hosts.md").read_text(encoding="utf-8")
TEMPLATES = dict(re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```$', PAGE, re.MULTILINE | re.DOTALL))
REHEARSE, TRAIN = ["-m", "pipeproof", "rehearse", "plan.yaml"], ["train.py"]

RECORDER = """#!{python}
import json, os, sys
with open(os.environ["RECORD"], "a") as record:
    record.write(json.dumps(sys.argv[1:]) + "\\n")
sys.exit(7 if os.environ.get("FAILS") in sys.argv else 0)
"""
SRUN = """#!{python}
import os, subprocess, sys
assert sys.argv[1] == "--kill-on-bad-exit=1"
step = "0" if "rehearse" in sys.argv else "1"
task = {{"SLURM_STEP_ID": step, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}}
ranks = [
    subprocess.Popen(sys.argv[2:], env={{**os.environ, **task, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}})
    for rank in range(2)
]
sys.exit(max(rank.wait() for rank in ranks))
"""


def pod():
    (replicated,) = yaml.safe_load(TEMPLATES["jobset.yaml"])["spec"]["replicatedJobs"]
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    return container


@pytest.fixture
def recorded(tmp_path):
    """Run a script with commands that record their words; returns its exit status and the words of each call."""

    def run(text, *arguments, **environment):
        for name in ("torchrun", "python", "srun"):
            (tmp_path / name).write_text(RECORDER.format(python=sys.executable))
            (tmp_path / name).chmod(0o755)
        (tmp_path / "scontrol").write_text("#!/bin/sh\necho node-1\n")
        (tmp_path / "scontrol").chmod(0o755)
        record = tmp_path / "record"
        record.write_text("")
        variables = {
            "PATH": f"{tmp_path}:/usr/bin:/bin",
            "RECORD": str(record),
            "SLURM_JOB_NODELIST": "node-[1-2]",
            **environment,
        }
        done = subprocess.run(["bash", "-c", text, "job.sh", *arguments], env=variables, check=False, timeout=60)
        return done.returncode, [json.loads(line) for line in record.read_text().splitlines()]

    return run


def torchrun(words):
    from torch.distributed.run import get_args_parser

    options = get_args_parser().parse_args(words)
    module = ["-m"] if options.module else []
    return options, [*module, options.training_script, *options.training_script_args]


@pytest.mark.needs_torch
@pytest.mark.parametrize("name", ["torchrun.sh", "jobset.yaml"])
def test_each_host_starts_its_ranks_by_torchrun(name, recorded):
    text = TEMPLATES[name] if name == "torchrun.sh" else pod()["command"][2]
    status, calls = recorded(text, "1", JOB_COMPLETION_INDEX="1")
    (rehearsal, first), (training, second) = map(torchrun, calls)
    assert (status, first, second) == (0, REHEARSE, TRAIN)
    for options in (rehearsal, training):
        assert (options.nnodes, options.nproc_per_node, options.node_rank) == ("2", "8", 1)
        assert options.rdzv_backend == "static"
    assert (rehearsal.master_port, training.master_port) == (29500, 29501)


def test_slurm_starts_a_task_per_rank(recorded):
    lines = TEMPLATES["slurm.sh"].splitlines()
    assert {"#SBATCH --nodes=2", "#SBATCH --ntasks=16", "#SBATCH --ntasks-per-node=8"} <= set(lines)
    status, calls = recorded(TEMPLATES["slurm.sh"])
    assert (status, calls) == (0, [["--kill-on-bad-exit=1", "python", *words] for words in (REHEARSE, TRAIN)])


@pytest.mark.parametrize("name", ["torchrun.sh", "slurm.sh", "jobset.yaml"])
def test_a_failed_rehearsal_ends_the_job(name, recorded):
    text = pod()["command"][2] if name == "jobset.yaml" else TEMPLATES[name]
    status, calls = recorded(text, "0", JOB_COMPLETION_INDEX="0", FAILS="rehearse")
    assert status == 7
    assert len(calls) == 1


def test_a_jobset_has_a_pod_per_host_and_the_address_of_the_first():
    manifest = yaml.safe_load(TEMPLATES["jobset.yaml"])
    (replicated,) = manifest["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert (job["completionMode"], job["parallelism"], job["completions"]) == ("Indexed", 2, 2)
    subdomain = manifest["spec"]["network"]["subdomain"]
    assert f"{manifest['metadata']['name']}-{replicated['name']}-0-0.{subdomain}" in pod()["command"][2]


class _Remote:
    """A task of Ray that runs at once; its options are recorded."""

    def __init__(self, function, record):
        self._function, self._record = function, record

    def options(self, scheduling_strategy):
        self._record.append(scheduling_strategy)
        return self

    def remote(self, *arguments):
        return self._function(*arguments)


@pytest.mark.needs_torch
@pytest.mark.parametrize("fails", ["", "rehearse"])
def test_ray_starts_torchrun_on_each_host(fails, monkeypatch):
    hosts, calls = [], []
    ray = types.ModuleType("ray")
    ray.init, ray.get = lambda: None, lambda value: value
    ray.remote = lambda **resources: lambda function: _Remote(function, hosts)
    ray.util = types.ModuleType("ray.util")
    ray.util.get_node_ip_address = lambda: "127.0.0.1"
    groups = types.ModuleType("ray.util.placement_group")
    groups.placement_group = lambda bundles, strategy: types.SimpleNamespace(ready=lambda: len(bundles))
    strategies = types.ModuleType("ray.util.scheduling_strategies")
    strategies.PlacementGroupSchedulingStrategy = lambda group, placement_group_bundle_index: (
        placement_group_bundle_index
    )
    for module in (ray, ray.util, groups, strategies):
        monkeypatch.setitem(sys.modules, module.__name__, module)

    def run(command, check):
        calls.append(command)
        if fails and fails in command:
            raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(subprocess, "run", run)
    job = {"__name__": "job"}
    exec(TEMPLATES["ray_job.py"], job)
    if fails:
        with pytest.raises(subprocess.CalledProcessError):
            job["main"]()
        assert len(calls) == 1
        return
    job["main"]()
    assert hosts == [0, 0, 1, 0, 0, 1]  # the address of host 0, then a task per host, for each step
    parsed = [torchrun(words[1:]) for words in calls]
    assert [options.node_rank for options, _ in parsed] == [0, 1, 0, 1]
    assert [words for _, words in parsed] == [REHEARSE, REHEARSE, TRAIN, TRAIN]


def test_nemo_run_trains_after_the_rehearsal(monkeypatch):
    added = []

    class Executor(types.SimpleNamespace):
        def clone(self):
            return Executor(**vars(self))

    class Experiment:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def add(self, script, **options):
            added.append((script, options))
            return f"job {len(added)}"

        def run(self, *, detach):
            assert detach

    module = types.ModuleType("nemo_run")
    module.SlurmExecutor, module.Experiment = Executor, Experiment
    module.Script, module.Packager = types.SimpleNamespace, types.SimpleNamespace
    monkeypatch.setitem(sys.modules, "nemo_run", module)
    job = {"__name__": "job"}
    exec(TEMPLATES["nemo_job.py"], job)
    job["main"]()
    (rehearse, first), (train, second) = added
    assert "dependencies" not in first
    assert (second["dependencies"], second["executor"].dependency_type) == (["job 1"], "afterok")
    assert rehearse.inline.split()[-2:] == REHEARSE[2:]
    assert train.inline.split()[-1:] == TRAIN


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param("torchrun.sh", "torch", marks=pytest.mark.needs_torch),
        pytest.param("slurm.sh", "torch", marks=pytest.mark.needs_torch),
        pytest.param("slurm.sh", "paddle", marks=pytest.mark.needs_paddle),
    ],
)
def test_real_ranks_rehearse_and_train(name, backend, tmp_path):
    (tmp_path / "plan.yaml").write_text(json.dumps(plan_dict(run={"backend": backend})))
    (tmp_path / "train.py").write_text("print('trains')")
    commands = {
        "python": '#!/bin/sh\nexec {python} "$@"\n',
        "torchrun": '#!/bin/sh\nexec {python} -m torch.distributed.run "$@"\n',
        "srun": SRUN,
        "scontrol": "#!/bin/sh\necho localhost\n",
    }
    for command, text in commands.items():
        (tmp_path / command).write_text(text.format(python=sys.executable))
        (tmp_path / command).chmod(0o755)
    one_host = TEMPLATES[name].replace("--nnodes 2 --nproc-per-node 8", "--nnodes 1 --nproc-per-node 2")
    one_host = one_host.replace("HOST_0=10.0.0.1", "HOST_0=127.0.0.1")
    one_host = one_host.replace("MASTER_PORT=29500", f"MASTER_PORT={20_000 + os.getpid() % 10_000}")
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "localhost"} if name == "slurm.sh" else {}
    done = subprocess.run(
        ["bash", "-c", one_host, "job.sh", "0"],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), **slurm},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("every element arrived where the plan needs it") == 1
    assert done.stdout.count("trains") == 2
