"""The sweep file and the code of the page on sweeps do what the page says."""

import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from pipeproof.analysis.sweep.cluster import Cluster
from pipeproof.analysis.sweep.sweep_file import load_sweep
from tests.cli.commands import EXAMPLES, REPOSITORY


def blocks(page, language):
    text = (REPOSITORY / "docs" / page).read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "base.yaml").write_text((EXAMPLES / "gpt_pp4.yaml").read_text().replace("layers: 4", "layers: 8"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_sweep_of_the_page(folder, capsys):
    (text,) = blocks("sweep.md", "yaml")
    (folder / "sweep.yaml").write_text(text)
    points = load_sweep("sweep.yaml").points
    assert len(points) == 3 * 2 * 2 + 1
    assert points[1].plan["topology"]["pp"] == 8
    assert points[1].plan["cost"]["forward_us"] == 100
    assert points[-1].plan["schedule"] == {
        "kind": "zb_v", "num_chunks": 2, "num_micro_batches": 8, "micro_batch_size": 2,
    }  # fmt: skip
    code, _ = blocks("sweep.md", "python")
    exec(compile(code, "sweep.md", "exec"), {})
    *results, best = capsys.readouterr().out.splitlines()
    assert len(results) == len(points)
    assert all("Status.OK" in line for line in results)
    assert float(best) > 0


def test_the_cluster_of_the_page(folder, monkeypatch):
    @contextmanager
    def in_threads(options, where):
        assert (options.partition, where.resolve()) == ("cpu", folder)
        with ThreadPoolExecutor(2) as executor:
            yield Cluster(executor, 64, options.chunk)

    monkeypatch.setattr("pipeproof.analysis.sweep.slurm_arrays.open_slurm", in_threads)
    (text,) = blocks("sweep.md", "yaml")
    (folder / "sweep.yaml").write_text(text)
    names = {}
    exec(compile(blocks("sweep.md", "python")[1], "sweep.md", "exec"), names)
    assert [result.id for result in names["results"]] == [point.id for point in load_sweep("sweep.yaml").points]
