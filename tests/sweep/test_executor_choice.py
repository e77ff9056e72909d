"""Executors are chosen by name; a wrong name, key or value, or a missing package, is refused before any work."""

from contextlib import contextmanager

import pytest

from pipeproof.analysis.sweep import executor_choice
from pipeproof.analysis.sweep.cluster import Cluster
from pipeproof.analysis.sweep.executor_choice import PACKAGES, parse_executor
from pipeproof.analysis.sweep.slurm_arrays import SlurmOptions
from pipeproof.diagnostics.install_command import install_extra
from tests.cli.commands import invoke
from tests.sweep.files import write_sweep


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("pbs", "no executor 'pbs'; known are dask, ray, slurm"),
        ("slrum", "no executor 'slrum'; did you mean 'slurm'?"),
        ("tcp://host:8786", "no executor 'tcp'"),
        ("dask", "dask:tcp://HOST:8786"),
        ("dask:", "dask:tcp://HOST:8786"),
        ("slurm:partiton=a", "slurm has no key 'partiton'; did you mean 'partition'?"),
        ("slurm:nodes=2", "slurm has no key 'nodes'; known are partition, account, qos, constraint, time, cpus,"),
        ("slurm:partition", "key partition needs a value"),
        ("slurm:partition=", "key partition needs a value"),
        ("slurm:time=1,time=2", "key time is given twice"),
        ("slurm:time=1:00", "key time is a positive integer, found '1:00'"),
        ("slurm:cpus=0", "key cpus is a positive integer, found '0'"),
        ("slurm:chunk=-1", "key chunk is a positive integer, found '-1'"),
        ("slurm:parallel=²", "key parallel is a positive integer, found '²'"),
        ("slurm:,", "slurm has no key ''"),
    ],
)
def test_what_is_refused_by_name(text, part, tmp_path):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the part is compared below
        parse_executor(text)
    assert part in str(caught.value)
    result = invoke("sweep", write_sweep(tmp_path, {"grid": {"topology.pp": [2]}}), "--executor", text)
    assert result.exit_code == 2
    assert "--executor" in result.stderr


def opened(name, calls):
    @contextmanager
    def replaced(*arguments):
        calls.append((name, *arguments))
        yield Cluster(None, 1)

    return replaced


def test_options_reach_the_executors(tmp_path, monkeypatch):
    calls = []
    for name, where in (
        ("dask", "pipeproof.analysis.sweep.dask_cluster.open_dask"),
        ("ray", "pipeproof.analysis.sweep.ray_cluster.open_ray"),
    ):
        monkeypatch.setattr(where, opened(name, calls))
    monkeypatch.setattr(executor_choice, "open_slurm", opened("slurm", calls))
    texts = ("dask:tcp://a:1", "ray", "ray:a:6379", "ray:ray://a:1", "slurm", "slurm:constraint=a=b,time=5,chunk=7")
    for text in texts:
        with parse_executor(text).open(tmp_path):
            pass
    assert calls == [
        ("dask", "tcp://a:1"),
        ("ray", None),
        ("ray", "a:6379"),
        ("ray", "ray://a:1"),
        ("slurm", SlurmOptions(), tmp_path),
        ("slurm", SlurmOptions(constraint="a=b", time=5, chunk=7), tmp_path),
    ]


@pytest.mark.parametrize(("kind", "text"), [("dask", "dask:tcp://x:1"), ("ray", "ray"), ("slurm", "slurm")])
def test_without_its_package_the_extra_is_named(kind, text, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = invoke("sweep", write_sweep(tmp_path, {"grid": {"topology.pp": [2]}}), "--executor", text)
    assert result.exit_code == 2
    message = " ".join(result.stderr.split())
    assert f"needs the package {PACKAGES[kind]}: {install_extra(kind)}" in message


def test_processes_of_ours_and_a_cluster_exclude_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    sweep = write_sweep(tmp_path, {"grid": {"topology.pp": [2]}})
    result = invoke("sweep", sweep, "--executor", "ray", "--workers", "2")
    assert result.exit_code == 2
    assert "give one of --workers and --executor" in result.stderr
