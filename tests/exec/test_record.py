"""Records of real runs: equal bits, equal names on both sides, and whole steps after a kill."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys

import numpy as np
import pytest

from pipeproof.analysis.align.read_record import RecordFile
from pipeproof.analysis.align.record_format import values_file
from pipeproof.comm.lower import lower_loaded
from pipeproof.exec.compare.run_record import RankStep, Recorder, ReferenceStep
from pipeproof.exec.rank.job_files import RecordOptions
from pipeproof.specs.load_plan import plan_from_dict
from tests.cli.commands import invoke
from tests.docs.test_schemas import require_fit
from tests.exec.processes import PATIENCE_S, REPOSITORY, Run
from tests.plans import plan_dict


def aligned(directory, *options):
    result = invoke("state", "align", directory / "run", directory / "reference", "--format", "json", *options)
    content = json.loads(result.stdout)
    require_fit("align", content)
    return result.exit_code, content


@pytest.mark.slow
@pytest.mark.needs_paddle
def test_a_recorded_run_has_the_bits_of_one_that_is_not(tmp_path):
    """Two stages a rank: layers inside stages, and boundaries between stages of one rank and of two."""
    plan = plan_dict(schedule={"kind": "interleaved", "num_chunks": 2, "num_micro_batches": 2})
    ended = Run(tmp_path / "a", plan, "--record", "out", "--record-layers", "--record-values").end()
    assert ended.status == 0, ended.output
    assert "compare: pipeproof state align out/run out/reference" in ended.output
    out = tmp_path / "a" / "out"
    status, found = aligned(out)
    assert status == 0
    assert found["tensors"]["compared"] == 2 * (2 * (13 + 12) + 4 * 7 + 3)
    plain = Run(tmp_path / "b", plan, "--record", "out").end()
    assert plain.status == 0
    md5s = [[g["md5"] for g in one.report["gradients"]] for one in (ended, plain)]
    assert md5s[0] == md5s[1]
    for step, values in zip(RecordFile(out / "run").steps(), (0, 1), strict=True):
        with np.load(values_file(out / "run", values)) as arrays:
            assert {tensor.key for tensor in step.tensors} == set(arrays.files)
        of_report = {g["name"]: g["md5"] for g in ended.report["gradients"] if g["step"] == step.step}
        assert {t.parameter: t.md5 for t in step.tensors if t.parameter} == of_report
        assert float(step.loss) == ended.report["steps"][step.step]["loss"]
    for line in (out / "run" / "record.jsonl").read_text().splitlines():
        require_fit("record", json.loads(line))
    lines = [
        [line for line in (one / "run" / "record.jsonl").read_text().splitlines() if '"kind":"gradient"' in line]
        for one in (out, tmp_path / "b" / "out")
    ]
    assert lines[0] == lines[1]  # byte for byte
    both = invoke("state", "align", out / "run", tmp_path / "b" / "out" / "run")
    assert both.exit_code == 0  # gradients and losses: the second has no layers
    assert "B has no tensors of layers" in both.stdout


@pytest.mark.slow
@pytest.mark.needs_paddle
def test_sequence_splits_and_copies_of_stages_are_recorded_by_name(tmp_path):
    plans = {
        "pieces": plan_dict(
            topology={"pp": 1, "dp": 2},
            schedule={"kind": "seq1f1b", "num_sequence_splits": 2, "num_micro_batches": 2},
            run={"steps": 1},
        ),
        "copies": plan_dict(schedule={"kind": "chimera"}, run={"steps": 1}),
    }
    for name, plan in plans.items():
        ended = Run(tmp_path / name, plan, "--record", "out", "--record-layers").end()
        assert ended.status == 0, ended.output
        status, found = aligned(tmp_path / name / "out")
        assert status == 0, found
    (step,) = RecordFile(tmp_path / "pieces" / "out" / "run").steps()
    assert {t.piece for t in step.tensors} == {0, 1}
    assert {t.micro_batch: t.shards[0].rank for t in step.tensors if not t.parameter} == {0: 0, 1: 0, 2: 1, 3: 1}
    (step,) = RecordFile(tmp_path / "copies" / "out" / "run").steps()
    assert {t.micro_batch for t in step.tensors if not t.parameter} == set(range(4))
    assert {s.rank for t in step.tensors if t.layer == "layer.0" and not t.parameter for s in t.shards} == {0, 1}


@pytest.mark.slow
@pytest.mark.needs_paddle
def test_the_walk_through_of_the_page(tmp_path):
    """Slices that are taken for wholes are located at the boundary of two stages, as docs/aligning.md shows it."""
    page = (REPOSITORY / "docs" / "aligning.md").read_text()
    commands, shown = re.search(
        r"```console\n(\$ pipeproof run --unsafe .*?)```\n\n```text\n(.*?)```", page, re.DOTALL
    ).groups()
    first, second = (shlex.split(line)[2:] for line in commands.splitlines())
    place = {**os.environ, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "400"}
    first = [str(REPOSITORY / word) if word.startswith("examples/") else word for word in first]
    ran, said = (
        subprocess.run(
            [sys.executable, "-m", "pipeproof", *words], cwd=tmp_path, env=place, capture_output=True, text=True,
            timeout=PATIENCE_S, check=False,
        )
        for words in (first, second)
    )  # fmt: skip
    assert ran.returncode == said.returncode == 1, ran.stdout + said.stderr
    assert without_numbers(said.stdout) == without_numbers(shown)
    status, found = aligned(tmp_path / "out")
    assert status == 1
    difference = found["tensors"]["first_difference"]
    assert (difference["tensor"]["layer"], difference["tensor"]["direction"], difference["tensor"]["side"]) == (
        "layer.1", "backward", "input",
    )  # fmt: skip
    assert found["tensors"]["last_equal_before"]["layer"] == "layer.2"
    assert difference["handed_on"]
    assert difference["ranks"] == [0, 1]
    assert difference["cause"]["family"] == "layout"


def without_numbers(text):
    """Part of a record that is equal on every machine."""
    text = re.sub(r"[0-9a-f]{32}", "MD5", text)
    text = re.sub(r"\d+ ulps", "N ulps", text)
    return re.sub(r"(norm|relative|A|B|of|;) -?\d[\d.e+-]*", r"\1 N", text)


def test_ranks_that_hold_other_values_of_one_part(tmp_path):
    """Two stages compute a layer: the whole comes from the lowest rank, which is correct here."""
    key = "layer.1/forward/input/0/0"
    plan = lower_loaded(plan_from_dict(plan_dict()))
    right = np.random.default_rng(1).standard_normal((8, 2, 16)).astype("f4")
    gradients = {p.name: np.ones(p.shape, "f4") for layer in plan.layer_by_name.values() for p in layer.parameters}
    recorder = Recorder(RecordOptions(tmp_path, layers=True, values=True), plan, "d" * 64)
    ranks = [RankStep(gradients, {key: right}), RankStep({}, {key: right * 2})]
    recorder.put(0, np.float32(1), ranks, ReferenceStep(np.float32(1), gradients, {key: right}))
    status, found = aligned(tmp_path)
    difference = found["tensors"]["first_difference"]
    assert (status, difference["ranks"], difference["relative"]) == (1, [1], 1.0)
    assert difference["a"]["md5"] == difference["b"]["md5"]
    assert difference["cause"]["evidence"] == "on rank 1: all 256 elements of A that are not zero are 2 of B's, exactly"
    turned = json.loads(invoke("state", "align", tmp_path / "reference", tmp_path / "run", "--format", "json").stdout)
    assert (
        "on rank 1: all 256 elements of A that are not zero are 1/2"
        in (turned["tensors"]["first_difference"]["cause"]["evidence"])
    )
    assert aligned(tmp_path, "--relative", "2")[0] == 1


@pytest.mark.needs_paddle
def test_a_killed_run_leaves_whole_steps(tmp_path):
    started = Run(tmp_path, plan_dict(run={"steps": 100_000}), "--record", "out", "--record-layers")
    started.await_output("step 2  ")
    os.kill(started.process.pid, signal.SIGKILL)
    started.end()
    for who in ("run", "reference"):
        steps = [step.step for step in RecordFile(tmp_path / "out" / who).steps()]
        assert steps == list(range(len(steps)))
        assert len(steps) >= 2


def test_a_record_is_never_written_over(tmp_path):
    (tmp_path / "run").mkdir(parents=True)
    (tmp_path / "run" / "record.jsonl").write_text("old")
    with pytest.raises(FileExistsError):
        Recorder(RecordOptions(tmp_path), lower_loaded(plan_from_dict(plan_dict())), "d" * 64)
    assert (tmp_path / "run" / "record.jsonl").read_text() == "old"


def test_tensors_are_in_the_order_of_one_process(tmp_path):
    """Whatever the order in which ranks hand them over."""
    plan = lower_loaded(plan_from_dict(plan_dict(schedule={"num_micro_batches": 2})))
    one = np.ones((8, 2, 16), "f4")
    keys = [
        "layer.2/backward/output/0/0", "layer.1/forward/output/1/0", "layer.2/backward/input/0/0",
        "layer.2/forward/input/0/0", "embed/forward/output/0/0", "layer.1/backward/output/0/0",
    ]  # fmt: skip
    gradients = {p.name: np.ones(p.shape, "f4") for layer in plan.layer_by_name.values() for p in layer.parameters}
    recorder = Recorder(RecordOptions(tmp_path), plan, "d" * 64)
    ranks = [RankStep(gradients, dict.fromkeys(keys[:3], one)), RankStep({}, dict.fromkeys(keys[3:], one))]
    recorder.put(0, np.float32(1), ranks, ReferenceStep(np.float32(1), gradients, dict.fromkeys(keys, one)))
    for who in ("run", "reference"):
        (step,) = RecordFile(tmp_path / who).steps()
        named = [t.key for t in step.tensors]
        assert named[:6] == [keys[4], keys[3], keys[2], keys[0], keys[5], keys[1]]
        assert named[6:9] == ["gradient/head.weight", "gradient/norm.weight", "gradient/layer.3.mlp.down.weight"]
        assert named[-1] == "gradient/embed.weight"
        assert step.loss == "1." + "0" * 20
