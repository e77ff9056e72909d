"""The code of the page on sweeps does what the page says."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

import pipeproof as pp
from tests.cli.commands import EXAMPLES, REPOSITORY


def blocks(page, language):
    text = (REPOSITORY / "docs" / page).read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "plan.yaml").write_text((EXAMPLES / "gpt_pp4.yaml").read_text().replace("layers: 4", "layers: 8"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_code_of_the_page(folder, capsys):
    (code,) = blocks("sweep.md", "python")
    exec(compile(code, "sweep.md", "exec"), {})
    assert float(capsys.readouterr().out) > 0


VALUES = {"schedule.num_micro_batches": [4, 8]}


def example(title):
    (code,) = blocks("sweep.md", f'python title="{title}"')
    return code


def times(result):
    return [point.makespan for point in result.points]


def run_example(title, folder, monkeypatch, change=()):
    """Run an example of the page on this machine; its result equals the result in own processes."""
    (folder / "plan.yaml").write_text((EXAMPLES / "gpt_pp4.yaml").read_text())
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    code = example(title)
    for old, new in change:
        assert old in code
        code = code.replace(old, new)
    names = {"__name__": "example"}
    exec(compile(code, title, "exec"), names)
    with ThreadPoolExecutor(1) as executor:
        assert times(names["result"]) == times(pp.sweep("plan.yaml", VALUES, executor=executor))


@pytest.mark.slow
@pytest.mark.needs("distributed")
def test_dask(folder, monkeypatch):
    run_example("dask", folder, monkeypatch, [('"tcp://head-node:8786"', "processes=False, dashboard_address=None")])


@pytest.mark.slow
@pytest.mark.needs("ray")
def test_ray(folder, monkeypatch):
    import ray

    environment = {"env_vars": {"PYTHONPATH": str(REPOSITORY)}}
    local = f"ray.init(num_cpus=1, include_dashboard=False, runtime_env={environment})"
    try:
        run_example("ray", folder, monkeypatch, [("ray.init()", local)])
    finally:
        ray.shutdown()


@pytest.mark.slow
@pytest.mark.needs("submitit")
def test_submitit(folder, monkeypatch):
    local = [('AutoExecutor("jobs")', 'AutoExecutor("jobs", cluster="local")'), ('slurm_partition="cpu", ', "")]
    run_example("submitit", folder, monkeypatch, local)
