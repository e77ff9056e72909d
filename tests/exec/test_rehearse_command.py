"""``pipeproof rehearse`` on real processes, and its refusals."""

import json
import re

import pytest
from click.testing import CliRunner
from jsonschema import Draft202012Validator

from pipeproof.cli.main import main
from tests.exec.processes import REPOSITORY, Run
from tests.plans import plan_dict

SEQUENCE_PARALLEL = {"pp": 2, "tp": 2, "sequence_parallel": True}


def require_fit(name, content):
    schema = json.loads((REPOSITORY / "docs" / "schemas" / f"{name}.schema.json").read_text())
    Draft202012Validator(schema).validate(content)


def rehearsal(tmp_path, plan, *options, **more):
    return Run(tmp_path, plan, *options, verb="rehearse", **more)


@pytest.mark.needs_paddle
def test_paddle_moves_every_element_correctly_and_every_edge_is_measured(tmp_path):
    profile = tmp_path / "profile.json"
    plan = plan_dict(run={"clip_norm": 1.0})
    ended = rehearsal(tmp_path, plan, "--set", "model.seq_length=4", "-o", str(profile)).end()
    assert ended.status == 0, ended.output
    report = ended.report
    require_fit("rehearse", report)
    assert (report["passed"], report["faults"], report["log_matches_graph"]) == (True, 0, True)
    assert (report["messages"], report["steps"]) == (2 * 4 * 2, 2)
    assert report["collectives"] > 0
    assert "correct: every element" in ended.output
    assert "`network` of `--output`" in ended.output
    measured = json.loads(profile.read_text())
    require_fit("rehearsal_profile", measured)
    assert [edge["channel"] for edge in measured["edges"]] == ["forward 0->1", "backward 1->0"]
    assert all(edge["bandwidth"] > 0 for edge in measured["edges"])
    costs = json.dumps({**plan, "cost": {"forward_us": 10**5, "network": measured["network"]}})
    (tmp_path / "measured.json").write_text(costs)
    result = CliRunner().invoke(main, ["simulate", str(tmp_path / "measured.json")])
    assert result.exit_code == 0, result.output


@pytest.mark.slow
@pytest.mark.needs_paddle
def test_partial_under_sequence_parallelism_is_refused_and_unsafe_shows_what_it_does(tmp_path):
    plan = plan_dict(topology=SEQUENCE_PARALLEL, transport="partial")
    ended = rehearsal(tmp_path, plan, "--unsafe").end()
    assert ended.status == 1
    require_fit("rehearse", ended.report)
    codes = [(one["code"], one["message"].split(":")[0]) for one in ended.report["findings"]]
    assert codes == [
        ("PP905", "the plan does not pass check; it was rehearsed unsafe"),
        ("PP915", "boundary 0->1, forward"),
        ("PP915", "boundary 1->0, backward"),
    ]
    assert "wrong: 32 operations" in ended.output
    forward = ended.report["findings"][1]["witness"]
    assert [(one["rank"], one["start"], one["stop"], one["source_rank"]) for one in forward["foreign"]] == [
        (2, 64, 128, 1),
        (3, 0, 64, 0),
    ]


@pytest.mark.needs_torch
def test_pytorch_executes_a_paddle_plan_in_sixteen_bits_under_torchrun(tmp_path):
    moe = {"num_experts": 4, "top_k": 2, "ffn_size": 8}
    plan = plan_dict(topology={"pp": 1, "tp": 2, "sequence_parallel": True, "ep": 2}, model={"moe": moe})
    command = ("-m", "torch.distributed.run", "--nproc-per-node", "4", "-m", "pipeproof")
    options = ("--set", "run.backend=torch", "--set", "run.dtype=bfloat16")
    ended = rehearsal(tmp_path, plan, *options, command=command).end()
    assert ended.status == 0, ended.output
    assert len(re.findall("correct: every element", ended.output)) == 1
    assert ended.report["backend"] == "torch"
    assert ended.report["collectives"] > 0


@pytest.mark.needs_torch
def test_a_gpu_that_is_not_there_is_named_before_anything_starts(tmp_path, monkeypatch):
    from pipeproof.exec.rank import gpu_assignment

    monkeypatch.setattr(gpu_assignment, "num_gpus", lambda backend: 0)
    code, output = refused(tmp_path, plan_dict(), "--set", "run.backend=torch", "--set", "run.device=gpu")
    assert code == 2
    assert "error[PP913]: run.device is gpu, and PyTorch sees 0 GPUs here for 2 ranks" in output


def refused(tmp_path, plan, *options):
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    result = CliRunner().invoke(main, ["rehearse", str(tmp_path / "plan.json"), *options])
    assert "Traceback" not in result.output
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("sections", "options", "status", "text"),
    [
        ({"topology": SEQUENCE_PARALLEL, "transport": "partial"}, [], 1, "not rehearsed: the plan does not pass check"),
        ({}, ["--share-gpus", "-o", "edges.json"], 2, "--output: "),
        ({}, ["--inject", "0:7F0:die"], 2, "--inject: rank 0 of 2 never runs 7F0"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused(tmp_path, sections, options, status, text):
    code, output = refused(tmp_path, plan_dict(**sections), *options)
    assert code == status, output
    assert text in output
