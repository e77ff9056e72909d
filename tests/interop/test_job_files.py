"""Job files of every launcher: they parse, start each rank with its environment, and stop after a failed rehearsal."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path

import jsonschema
import pytest
import yaml

from pipeproof.interop.job_files.job import job_of_plan
from pipeproof.interop.job_files.job_launchers import LAUNCHERS, write_job_file
from pipeproof.specs.load_plan import plan_from_dict
from tests.plans import plan_dict

ODD_NAME = "a plan; $(touch broken) 'é'.yaml"
"""A name of a plan file that a shell, YAML or Python would read as something else."""
PLANS = {
    "paddle on 4 CPU ranks": ({"topology": {"pp": 4}}, 4, 1),
    "torch on 16 GPUs": ({"topology": {"pp": 4, "dp": 4}, "run": {"backend": "torch", "device": "gpu"}}, 8, 2),
}
"""Plans with the ranks per host and the hosts of their jobs."""
SHELL, YAML, PYTHON = ("torchrun", "paddle", "slurm"), ("jobset", "trainjob"), ("ray", "nemo-run")


def make_job(ranks_per_host=None, script=None, name="plan.yaml", **sections):
    return job_of_plan(plan_from_dict(plan_dict(**sections)), name, ranks_per_host, script)


TORCH = {"backend": "torch", "device": "gpu"}
PADDLE_JOB = make_job(topology={"pp": 4})
TORCH_JOB = make_job(topology={"pp": 4, "dp": 4}, run=TORCH)
FILES = [
    (launcher, job)
    for launcher, row in LAUNCHERS.items()
    for job in (PADDLE_JOB, TORCH_JOB)
    if row.backend in (None, job.backend)
]
every_file = pytest.mark.parametrize(
    ("launcher", "job"), FILES, ids=[f"{launcher}-{job.backend}" for launcher, job in FILES]
)


def without_comments(text):
    return "".join(line for line in text.splitlines(keepends=True) if not re.match(r"\s*#(?!SBATCH|!)", line))


# --- every file ---


def test_every_launcher_has_a_form():
    assert sorted(LAUNCHERS) == sorted((*SHELL, *YAML, *PYTHON))


@pytest.mark.parametrize("name", PLANS)
def test_ranks_and_hosts_by_default(name):
    sections, ranks_per_host, num_hosts = PLANS[name]
    job = make_job(**sections)
    assert (job.ranks_per_host, job.num_hosts) == (ranks_per_host, num_hosts)


@every_file
def test_placeholders_are_listed_and_filled_in_at_one_place(launcher, job):
    written = write_job_file(launcher, job)
    assert set(re.findall(r"FILL_IN_\w+", written.text)) == set(written.placeholders)
    head, _, body = written.text.partition("\n\n")
    assert all(f"{placeholder}: {placeholder.meaning}" in head for placeholder in written.placeholders)
    for placeholder in written.placeholders:
        in_command = launcher == "ray"  # its address is not in the file, but in the command that submits it
        assert without_comments(body).count(placeholder) == (0 if in_command else 1)
    places = [number for number, line in enumerate(body.splitlines()) if "FILL_IN_" in line]
    assert all(number < 10 for number in places)


@every_file
def test_the_rehearsal_is_before_the_training(launcher, job):
    for written, training in ((job, "run"), (replace_script(job, "train.py"), "train.py")):
        text = without_comments(write_job_file(launcher, written).text)
        assert 0 < text.index("rehearse") < text.rindex(training)


def replace_script(job, script):
    return make_job(
        job.ranks_per_host,
        script,
        job.plan,
        topology={"pp": 4, "dp": job.num_ranks // 4},
        run={"backend": job.backend, "device": "gpu" if job.on_gpus else "cpu"},
    )


@every_file
def test_a_file_parses(launcher, job):
    text = write_job_file(launcher, job).text
    if launcher in SHELL:
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    elif launcher in YAML:
        subprocess.run(["bash", "-n"], input=container(launcher, text)["command"][2], text=True, check=True)
    else:
        tree = ast.parse(text)
        imported = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
        assert imported <= sys.stdlib_module_names
        assert not any(isinstance(node, ast.ImportFrom) for node in tree.body)


@pytest.mark.parametrize(
    ("plan", "name"),
    [("dir/Llama_3 70B.v2.yaml", "llama-3-70b-v2"), ("70b.yaml", "plan-70b"), ("é.yaml", "plan"), ("a" * 90, "a" * 40)],
)
def test_names_are_dns_labels(plan, name):
    assert make_job(name=plan).name == name


# --- refusals ---


@pytest.mark.parametrize(
    ("chosen", "remedy"), [(5, "use 4, on 3 hosts"), (8, "use 6, on 2 hosts"), (24, "use 12, on 1 host,")]
)
def test_hosts_that_do_not_divide(chosen, remedy):
    with pytest.raises(ValueError, match=rf"^{chosen} per host do not divide the plan's 12 ranks \(.*\): {remedy}"):
        make_job(chosen, topology={"pp": 4, "dp": 3})
    assert make_job(6, topology={"pp": 4, "dp": 3}).num_hosts == 2


def test_launchers_of_another_framework():
    with pytest.raises(
        ValueError, match=r"^torchrun starts torch, and run.backend is paddle \(the plan\): use paddle$"
    ):
        write_job_file("torchrun", PADDLE_JOB)
    with pytest.raises(
        ValueError, match=r"^paddle starts paddle, and run.backend is torch \(the plan\): use torchrun$"
    ):
        write_job_file("paddle", TORCH_JOB)


# --- shell scripts, with commands that record how they are called ---

RECORDER = """#!{python}
import json, os, sys
with open(os.environ["RECORD"], "a") as record:
    record.write(json.dumps([sys.argv[1:], dict(os.environ)]) + "\\n")
sys.exit(7 if os.environ.get("FAILS") in sys.argv else 0)
"""
SRUN = """#!{python}
import os, subprocess, sys
split = sys.argv.index("bash")
assert sys.argv[1:split] == ["--kill-on-bad-exit=1"]
count, per_host = int(os.environ["NTASKS"]), int(os.environ["PER_HOST"])
tasks = [
    subprocess.Popen(sys.argv[split:], env={{**os.environ, "SLURM_PROCID": str(rank), "SLURM_NTASKS": str(count),
                                            "SLURM_LOCALID": str(rank % per_host)}})
    for rank in range(count)
]
sys.exit(max(task.wait() for task in tasks))
"""
SCONTROL = """#!{python}
import sys
assert sys.argv[1:] == ["show", "hostnames", "host[0-1]"]
print("host0", "host1", sep="\\n")
"""


@pytest.fixture
def shell(tmp_path):
    """Run a script with recording commands; its exit status, and the words and the environment of each call."""
    commands = tmp_path / "bin"
    commands.mkdir()
    recorded = dict.fromkeys(("torchrun", "python"), RECORDER)
    for name, text in {**recorded, "srun": SRUN, "scontrol": SCONTROL}.items():
        (commands / name).write_text(text.format(python=sys.executable))
        (commands / name).chmod(0o755)

    def run(text, *arguments, **environment):
        record = tmp_path / "record"
        record.write_text("")
        path = f"{commands}:/usr/bin:/bin"
        (tmp_path / "job.sh").write_text(text)
        done = subprocess.run(
            ["bash", tmp_path / "job.sh", *arguments],
            env={"PATH": path, "RECORD": str(record), **environment},
            cwd=tmp_path,
            check=False,
            timeout=60,
        )
        assert not (tmp_path / "broken").exists()
        return done.returncode, [json.loads(line) for line in record.read_text().splitlines()]

    return run


def torchrun_options(words):
    from torch.distributed.run import get_args_parser

    return get_args_parser().parse_args(words)


def paddle_options(monkeypatch, words):
    from paddle.distributed.launch.context.args_envs import parse_args

    assert words[:2] == ["-m", "paddle.distributed.launch"]
    monkeypatch.setattr(sys, "argv", words[1:])
    known, unknown = parse_args()
    assert not unknown
    return known


@pytest.mark.needs_torch
def test_torchrun_on_two_hosts(shell):
    job = make_job(name=ODD_NAME, topology={"pp": 4, "dp": 4}, run=TORCH)
    status, calls = shell(write_job_file("torchrun", job).text.replace("FILL_IN_HOST_0", "10.0.0.1"), "1")
    assert status == 0
    rehearsal, training = [torchrun_options(words) for words, _ in calls]
    for options in (rehearsal, training):
        assert (options.nnodes, options.nproc_per_node, options.node_rank) == ("2", "8", 1)
        assert (options.master_addr, options.module, options.rdzv_backend) == ("10.0.0.1", True, "static")
    assert [rehearsal.training_script, *rehearsal.training_script_args] == ["pipeproof", "rehearse", ODD_NAME]
    assert [training.training_script, *training.training_script_args] == ["pipeproof", "run", ODD_NAME]
    assert rehearsal.master_port != training.master_port


@pytest.mark.needs_torch
def test_torchrun_on_one_host_with_a_script(shell):
    job = make_job(4, "my train.py", topology={"pp": 4}, run=TORCH)
    written = write_job_file("torchrun", job)
    assert written.placeholders == ()
    _, calls = shell(written.text)
    options = torchrun_options(calls[1][0])
    assert (options.standalone, options.nproc_per_node, options.module) == (True, "4", False)
    assert (options.training_script, options.training_script_args) == ("my train.py", [])


@pytest.mark.needs_paddle
def test_paddle_on_two_hosts(shell, monkeypatch):
    job = make_job(2, name=ODD_NAME, topology={"pp": 4})
    _, calls = shell(write_job_file("paddle", job).text.replace("FILL_IN_HOST_0", "10.0.0.1"), "1")
    rehearsal, training = [paddle_options(monkeypatch, words) for words, _ in calls]
    for options in (rehearsal, training):
        assert (options.nnodes, options.nproc_per_node, options.rank) == ("2", 2, 1)
        assert options.training_script == "pipeproof"
    assert (rehearsal.master, training.master) == ("10.0.0.1:29500", "10.0.0.1:29501")
    assert rehearsal.training_script_args == ["rehearse", ODD_NAME]
    assert training.training_script_args == ["run", ODD_NAME]


def slurm_environment(job):
    count, per_host = str(job.num_ranks), str(job.ranks_per_host)
    return {"SLURM_JOB_NODELIST": "host[0-1]", "SLURM_JOB_ID": "41", "NTASKS": count, "PER_HOST": per_host}


def by_rank(calls, word, name):
    """Environments of the calls with a word, by rank."""
    chosen = [(int(environment[name]), environment) for words, environment in calls if word in words]
    assert sorted(rank for rank, _ in chosen) == list(range(len(chosen)))
    return dict(chosen)


def test_slurm_sets_the_variables_of_torchrun(shell):
    job = make_job(name=ODD_NAME, topology={"pp": 4, "dp": 4}, run=TORCH)
    text = write_job_file("slurm", job).text
    assert {"#SBATCH --nodes=2", "#SBATCH --ntasks=16", "#SBATCH --ntasks-per-node=8"} <= set(text.splitlines())
    assert {"#SBATCH --gpus-per-node=8", "#SBATCH --distribution=block"} <= set(text.splitlines())
    status, calls = shell(text, **slurm_environment(job))
    assert (status, len(calls)) == (0, 32)
    assert [words for words, _ in calls[:16]] == [["-m", "pipeproof", "rehearse", ODD_NAME]] * 16
    rehearsal, training = by_rank(calls, "rehearse", "RANK"), by_rank(calls, "run", "RANK")
    for rank, environment in (*rehearsal.items(), *training.items()):
        assert environment["LOCAL_RANK"] == str(rank % 8)
        assert (environment["WORLD_SIZE"], environment["LOCAL_WORLD_SIZE"]) == ("16", "8")
        assert environment["MASTER_ADDR"] == "host0"
    assert {environment["MASTER_PORT"] for environment in rehearsal.values()} == {"20738"}
    assert {environment["MASTER_PORT"] for environment in training.values()} == {"20747"}


def test_slurm_sets_the_variables_of_paddles_launcher(shell):
    job = make_job(2, topology={"pp": 4})
    text = write_job_file("slurm", job).text
    assert "gpus" not in text
    _, calls = shell(text, **slurm_environment(job))
    endpoints = {}
    for step, port in (("rehearse", 20246), ("run", 20249)):
        for rank, environment in by_rank(calls, step, "PADDLE_TRAINER_ID").items():
            assert environment["PADDLE_TRAINERS_NUM"] == "4"
            assert environment["PADDLE_LOCAL_RANK"] == str(rank % 2)
            assert environment["PADDLE_LOCAL_SIZE"] == "2"
            assert environment["PADDLE_MASTER"] == f"host0:{port}"
            assert environment["PADDLE_DISTRI_BACKEND"] == "gloo"
            endpoints.setdefault(step, environment["PADDLE_TRAINER_ENDPOINTS"].split(","))
            assert environment["PADDLE_CURRENT_ENDPOINT"] == endpoints[step][rank]
    assert endpoints["rehearse"] == ["host0:20247", "host0:20248", "host1:20247", "host1:20248"]
    assert not {*endpoints["rehearse"], "host0:20246"} & {*endpoints["run"], "host0:20249"}


@pytest.mark.parametrize("ranks_per_host", [1, 8])
def test_ports_of_successive_slurm_jobs_differ(ranks_per_host, shell):
    """Both steps of a job have ports below those of the system, and the next job has others."""
    job = make_job(ranks_per_host, topology={"dp": 8})
    (line,) = [line for line in write_job_file("slurm", job).text.splitlines() if line.startswith("export MASTER_PORT")]
    ports = []
    for number in (12_000_000, 12_000_001):
        script = f'SLURM_JOB_ID={number}; {line.partition("#")[0]}; python "$MASTER_PORT"'
        ports.append(int(shell(script)[1][0][0][0]))
    assert all(20000 <= port <= 32000 - 2 * (ranks_per_host + 1) for port in ports)
    assert abs(ports[0] - ports[1]) >= 2 * (ranks_per_host + 1)


@pytest.mark.parametrize("launcher", ["torchrun", "paddle", "slurm", "jobset", "trainjob"])
def test_a_failed_rehearsal_ends_the_job(launcher, shell):
    job = PADDLE_JOB if launcher == "paddle" else TORCH_JOB
    text = write_job_file(launcher, job).text
    script = container(launcher, text)["command"][2] if launcher in YAML else text
    variables = {**slurm_environment(job), **POD, "FAILS": "rehearse"}
    status, calls = shell(script, "0", **variables)
    assert status == 7
    assert calls
    assert all("rehearse" in words for words, _ in calls)


# --- Kubernetes ---

POD = {
    "WORK_DIR": ".",
    "JOB_COMPLETION_INDEX": "1",
    "HOST_0": "127.0.0.1",
    "HOST_0_PORT": "29500",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "127.0.0.1",
    "PET_MASTER_PORT": "29500",
}


def closed(required, optional=None):
    """An object with these keys only."""
    return {
        "type": "object",
        "required": list(required),
        "properties": {**required, **(optional or {})},
        "additionalProperties": False,
    }


LABEL = {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
TEXT = {"type": "string", "minLength": 1}
ENVIRONMENT = {
    "type": "array",
    "items": {
        "anyOf": [
            closed({"name": TEXT, "value": TEXT}),
            closed(
                {"name": TEXT, "valueFrom": closed({"fieldRef": closed({"fieldPath": {"const": "spec.nodeName"}})})}
            ),
        ]
    },
}

METADATA = closed({"name": LABEL}, {"annotations": {"type": "object", "additionalProperties": TEXT}})
RESOURCES = closed({"limits": {"type": "object", "additionalProperties": {"type": "integer", "minimum": 1}}})
WORDS = {"type": "array", "items": TEXT, "minItems": 1}
COUNT = {"type": "integer", "minimum": 1}
CONTAINER = closed(
    {"name": LABEL, "image": TEXT, "command": WORDS},
    {"env": ENVIRONMENT, "resources": RESOURCES, "volumeMounts": {"type": "array"}},
)
POD_SPEC = closed(
    {"restartPolicy": {"const": "Never"}, "containers": {"type": "array", "items": CONTAINER, "minItems": 1}},
    {"volumes": {"type": "array"}},
)
JOB_SPEC = closed(
    {
        "completionMode": {"const": "Indexed"},
        "parallelism": COUNT,
        "completions": COUNT,
        "backoffLimit": {"const": 0},
        "template": closed({"spec": POD_SPEC}),
    }
)
SCHEMAS = {
    "jobset": closed(
        {
            "apiVersion": {"const": "jobset.x-k8s.io/v1alpha2"},
            "kind": {"const": "JobSet"},
            "metadata": METADATA,
            "spec": closed(
                {
                    "network": closed({"enableDNSHostnames": {"const": True}, "subdomain": LABEL}),
                    "failurePolicy": closed({"maxRestarts": {"const": 0}}),
                    "replicatedJobs": {
                        "type": "array",
                        "minItems": 1,
                        "maxItems": 1,
                        "items": closed({"name": LABEL, "replicas": COUNT, "template": closed({"spec": JOB_SPEC})}),
                    },
                }
            ),
        }
    ),
    "trainjob": closed(
        {
            "apiVersion": {"const": "trainer.kubeflow.org/v1alpha1"},
            "kind": {"const": "TrainJob"},
            "metadata": METADATA,
            "spec": closed(
                {
                    "runtimeRef": closed({"name": TEXT}),
                    "trainer": closed(
                        {"image": TEXT, "command": WORDS, "numNodes": COUNT, "numProcPerNode": COUNT},
                        {"env": ENVIRONMENT, "resourcesPerNode": RESOURCES},
                    ),
                }
            ),
        }
    ),
}
"""The fields that the templates use, required and typed as in the definitions of both resources."""


def container(launcher, text):
    spec = yaml.safe_load(text)["spec"]
    if launcher == "trainjob":
        return spec["trainer"]
    return spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]


@pytest.mark.parametrize("job", [PADDLE_JOB, TORCH_JOB], ids=["paddle", "torch"])
@pytest.mark.parametrize("launcher", YAML)
def test_manifests_have_the_fields_of_their_resource(launcher, job):
    text = write_job_file(launcher, job).text
    manifest = yaml.safe_load(text)
    jsonschema.validate(manifest, SCHEMAS[launcher])
    annotations = manifest["metadata"]["annotations"]
    pod = container(launcher, text)
    assert pod["image"] == annotations["fill-in-image"] == "FILL_IN_IMAGE"
    assert {"name": "WORK_DIR", "value": annotations["fill-in-work-dir"]} in pod["env"]
    resources = pod.get("resources") or pod.get("resourcesPerNode")
    assert resources == ({"limits": {"nvidia.com/gpu": 8}} if job.on_gpus else None)


def test_a_jobset_has_one_pod_per_host_and_the_address_of_the_first():
    text = write_job_file("jobset", TORCH_JOB).text
    manifest = yaml.safe_load(text)
    (replicated,) = manifest["spec"]["replicatedJobs"]
    assert replicated["template"]["spec"]["parallelism"] == replicated["template"]["spec"]["completions"] == 2
    name, subdomain = manifest["metadata"]["name"], manifest["spec"]["network"]["subdomain"]
    address = f"{name}-{replicated['name']}-0-0.{subdomain}"
    assert {"name": "HOST_0", "value": address} in container("jobset", text)["env"]


@pytest.mark.parametrize("launcher", YAML)
def test_pods_of_several_hosts_know_the_name_of_their_node(launcher):
    field = {"name": "PIPEPROOF_NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    assert field in container(launcher, write_job_file(launcher, TORCH_JOB).text)["env"]
    assert field not in container(launcher, write_job_file(launcher, PADDLE_JOB).text)["env"]


def test_a_trainjob_has_a_node_per_host():
    trainer = container("trainjob", write_job_file("trainjob", TORCH_JOB).text)
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 8)
    assert not any(variable["name"].startswith("PET_") for variable in trainer["env"])  # reserved


@pytest.mark.needs_torch
@pytest.mark.parametrize("launcher", YAML)
def test_a_pod_starts_torchrun(launcher, shell):
    job = make_job(name=ODD_NAME, topology={"pp": 4, "dp": 4}, run=TORCH)
    status, calls = shell(container(launcher, write_job_file(launcher, job).text)["command"][2], **POD)
    assert status == 0
    options = [torchrun_options(words) for words, _ in calls]
    assert [(o.nnodes, o.nproc_per_node, o.node_rank, o.master_addr) for o in options] == [
        ("2", "8", 1, "127.0.0.1")
    ] * 2
    assert [o.master_port for o in options] == [29500, 29501]
    assert [o.training_script_args for o in options] == [["rehearse", ODD_NAME], ["run", ODD_NAME]]


@pytest.mark.parametrize("launcher", YAML)
def test_a_pod_starts_paddles_launcher_with_an_address(launcher, shell):
    """Paddle's launcher compares the master with the address of its host: a name would match no host."""
    job = make_job(2, topology={"pp": 4})
    named = {**POD, "HOST_0": "localhost", "PET_MASTER_ADDR": "localhost"}
    _, calls = shell(container(launcher, write_job_file(launcher, job).text)["command"][2], **named)
    masters = [words[words.index("--master") + 1] for words, _ in calls]
    assert masters == ["127.0.0.1:29500", "127.0.0.1:29501"]
    assert [words[words.index("--rank") + 1] for words, _ in calls] == ["1", "1"]


# --- Python files, with modules in the place of Ray and NeMo-Run ---


class _Remote:
    """A method, an actor class or an actor whose calls run at once."""

    def __init__(self, target, bundles):
        self._target, self._bundles = target, bundles

    def options(self, scheduling_strategy):
        self._bundles.append(scheduling_strategy["placement_group_bundle_index"])
        return self

    def remote(self, *arguments):
        made = self._target(*arguments)
        return _Remote(made, self._bundles) if type(made).__name__ == "Rank" else made

    def __getattr__(self, name):
        return _Remote(getattr(self._target, name), self._bundles)


@pytest.fixture
def fake_ray(monkeypatch):
    """Ray in this process, with one GPU per actor; the record of what was reserved."""
    record = types.SimpleNamespace(bundles=None, strategy=None, actors=[], resources=None)
    ray = types.ModuleType("ray")
    gpus = iter(range(1000))
    context = types.SimpleNamespace(get_accelerator_ids=lambda: {"GPU": [str(next(gpus))]})
    ray.init = lambda: None
    ray.get = lambda value: value
    ray.get_runtime_context = lambda: context

    def remote(**resources):
        record.resources = resources
        return lambda target: _Remote(target, record.actors)

    def placement_group(bundles, strategy):
        record.bundles, record.strategy = bundles, strategy
        return types.SimpleNamespace(ready=lambda: None)

    ray.remote = remote
    ray.util = types.ModuleType("ray.util")
    ray.util.get_node_ip_address = lambda: "127.0.0.1"
    groups = types.ModuleType("ray.util.placement_group")
    groups.placement_group = placement_group
    strategies = types.ModuleType("ray.util.scheduling_strategies")
    strategies.PlacementGroupSchedulingStrategy = dict
    for module in (ray, ray.util, groups, strategies):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return record


def load(text, **constants):
    """Execute a Python file as a module, with other values of some constants."""
    namespace = {"__name__": "job"}
    exec(compile(text, "job.py", "exec"), namespace)
    assert namespace.keys() >= constants.keys()
    namespace.update(constants)
    return namespace


PRINT_ENVIRONMENT = """
import json, os, sys
rank = os.environ.get("RANK") or os.environ["PADDLE_TRAINER_ID"]
with open(f"{sys.argv[1]}/{sys.argv[2]}-{rank}", "w") as file:
    json.dump(dict(os.environ), file)
sys.exit(int(sys.argv[3]) if rank == "1" else 0)
"""


def ray_steps(tmp_path, *statuses):
    """Steps that write the environment of each rank; rank 1 has the exit status of the step."""
    (tmp_path / "rank.py").write_text(PRINT_ENVIRONMENT)
    return tuple(
        [str(tmp_path / "rank.py"), str(tmp_path), str(number), str(status)] for number, status in enumerate(statuses)
    )


def test_ray_starts_one_actor_per_rank(fake_ray, tmp_path):
    job = make_job(2, name=ODD_NAME, topology={"pp": 4}, run=TORCH)
    namespace = load(write_job_file("ray", job).text)
    assert namespace["STEPS"] == (["-m", "pipeproof", "rehearse", ODD_NAME], ["-m", "pipeproof", "run", ODD_NAME])
    namespace["STEPS"] = ray_steps(tmp_path, 0, 0)
    assert namespace["main"]() == 0
    assert (fake_ray.bundles, fake_ray.strategy) == ([{"CPU": 2, "GPU": 2}] * 2, "STRICT_SPREAD")
    assert fake_ray.actors == [0, 0, 1, 1]
    assert fake_ray.resources == {"num_cpus": 1, "num_gpus": 1}
    ports = []
    for step, gpus in ((0, ("0,1", "2,3")), (1, ("4,5", "6,7"))):
        ranks = [json.loads((tmp_path / f"{step}-{rank}").read_text()) for rank in range(4)]
        assert [variables["LOCAL_RANK"] for variables in ranks] == ["0", "1", "0", "1"]
        assert {(variables["WORLD_SIZE"], variables["LOCAL_WORLD_SIZE"]) for variables in ranks} == {("4", "2")}
        assert [variables["CUDA_VISIBLE_DEVICES"] for variables in ranks] == [gpus[0]] * 2 + [gpus[1]] * 2
        ((address, port),) = {(variables["MASTER_ADDR"], variables["MASTER_PORT"]) for variables in ranks}
        assert address == "127.0.0.1"
        ports.append(port)
    assert len(set(ports)) == 2


def test_ray_gives_paddle_its_endpoints(fake_ray, tmp_path):
    namespace = load(write_job_file("ray", PADDLE_JOB).text, STEPS=ray_steps(tmp_path, 0))
    assert namespace["main"]() == 0
    assert fake_ray.bundles == [{"CPU": 4}]
    ranks = [json.loads((tmp_path / f"0-{rank}").read_text()) for rank in range(4)]
    endpoints = ranks[0]["PADDLE_TRAINER_ENDPOINTS"].split(",")
    assert [variables["PADDLE_CURRENT_ENDPOINT"] for variables in ranks] == endpoints
    assert len({*endpoints, ranks[0]["PADDLE_MASTER"]}) == 5
    assert {variables["PADDLE_DISTRI_BACKEND"] for variables in ranks} == {"gloo"}


def test_ray_ends_the_job_after_a_failed_rehearsal(fake_ray, tmp_path):
    namespace = load(write_job_file("ray", PADDLE_JOB).text, STEPS=ray_steps(tmp_path, 3, 0))
    assert namespace["main"]() == 3
    assert not list(tmp_path.glob("1-*"))


def test_nemo_run_trains_after_the_rehearsal(monkeypatch):
    added = []

    class Executor(types.SimpleNamespace):
        def clone(self):
            return Executor(**vars(self))

    class Experiment:
        def __init__(self, name):
            assert name == "plan"

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
    load(write_job_file("nemo-run", TORCH_JOB).text, WORK_DIR="/a b")["main"]()
    (rehearsal, first), (training, second) = added
    assert "dependencies" not in first
    assert second["dependencies"] == ["job 1"]
    for executor in (first["executor"], second["executor"]):
        assert (executor.nodes, executor.ntasks_per_node, executor.gpus_per_node) == (2, 8, 8)
        assert (executor.account, executor.env_vars) == ("FILL_IN_ACCOUNT", {"WORK_DIR": "'/a b'"})
    assert second["executor"].dependency_type == "afterok"
    for script, words in ((rehearsal.inline, "pipeproof rehearse"), (training.inline, "pipeproof run")):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
        assert shlex.split(script.splitlines()[-1]) == ["exec", "python", "-m", *words.split(), "plan.yaml"]
        assert 'export RANK="$SLURM_PROCID"' in script


# --- real ranks ---

ROOT = Path(__file__).parents[2]


def real_commands(tmp_path):
    """Directory with commands of this environment, and with an ``srun`` and a ``scontrol`` for one host."""
    commands = tmp_path / "bin"
    commands.mkdir()
    texts = {
        "python": '#!/bin/sh\nexec {python} "$@"\n',
        "torchrun": '#!/bin/sh\nexec {python} -m torch.distributed.run "$@"\n',
        "pipeproof": '#!/bin/sh\nexec {python} -m pipeproof "$@"\n',
        "srun": SRUN,
        "scontrol": "#!/bin/sh\necho 127.0.0.1\n",
    }
    for name, text in texts.items():
        (commands / name).write_text(text.format(python=sys.executable))
        (commands / name).chmod(0o755)
    return commands


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "backend"),
    [
        pytest.param("torchrun", "torch", marks=pytest.mark.needs_torch),
        pytest.param("slurm", "torch", marks=pytest.mark.needs_torch),
        pytest.param("paddle", "paddle", marks=pytest.mark.needs_paddle),
        pytest.param("slurm", "paddle", marks=pytest.mark.needs_paddle),
    ],
)
def test_real_ranks_rehearse_and_train(launcher, backend, tmp_path):
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(plan_dict(run={"backend": backend})))
    job = make_job(name="plan.json", run={"backend": backend})
    (tmp_path / "job.sh").write_text(write_job_file(launcher, job).text)
    path = f"{real_commands(tmp_path)}:{os.environ['PATH']}"
    one_host = {"SLURM_JOB_NODELIST": "host", "SLURM_JOB_ID": str(os.getpid()), "NTASKS": "2", "PER_HOST": "2"}
    done = subprocess.run(
        ["bash", "job.sh"],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), **one_host},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    logs = "".join(log.read_text() for log in sorted(tmp_path.glob("log/*/workerlog.*")))
    output = logs or done.stdout  # Paddle's launcher repeats the log of rank 0
    assert done.returncode == 0, output + done.stderr
    assert output.count("every element arrived where the plan needs it") == 1
    assert output.count("matches: every loss and every gradient") == 1
