"""A schedule without a whole step has no timeline; the refusal has the findings of ``check``."""

import json
from pathlib import Path

import pytest

import pipeproof as pp
from pipeproof.sim.outcome import SimulationError
from pipeproof.verify.check_plan import WHOLE_STEP
from tests.cli.commands import invoke
from tests.plans import plan_dict

FILES = Path(__file__).parents[1] / "schedule" / "files"

SCHEDULE = """\
0F0,0F1,0B0,0B1
1F0,1B0,1F1,1B1
"""

HANGS = """\
0F0,0B0,0F1,0B1
1F0,1F1,1B0,1B1
"""

MUTANTS = {
    "the last backward": (SCHEDULE.replace(",0B1", ""), "PP121"),
    "a backward in the middle": (SCHEDULE.replace("1B0,", ""), "PP121"),
    "a whole micro-batch of the last stage": (SCHEDULE.replace(",1F1,1B1", ""), "PP121"),
    "the weight gradient of a stage": (SCHEDULE.replace("0B1", "0I1"), "PP121"),
    "a second backward": (SCHEDULE.replace("1B1", "1B1,1B1"), "PP122"),
    "a backward before its forward": (SCHEDULE.replace("0F0,0F1,0B0", "0B0,0F0,0F1"), "PP123"),
}

TIMELINES = (("simulate",), ("schedule", "show"), ("schedule", "show", "--no-check"),
             ("schedule", "show", "--as", "svg"), ("schedule", "show", "--as", "csv"))  # fmt: skip


def errors_of_check(path):
    found = json.loads(invoke("check", "--format", "json", path).stdout)["findings"]
    return [finding["code"] for finding in found if finding["severity"] == "error"]


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_has_no_timeline(name, tmp_path):
    text, code = MUTANTS[name]
    path, whole = tmp_path / "mutant.csv", tmp_path / "whole.csv"
    path.write_text(text)
    whole.write_text(SCHEDULE)
    assert code in errors_of_check(path)
    for command in (*((*words, path) for words in TIMELINES), ("compare", path, "zb_v"), ("compare", whole, path)):
        answer = invoke(*command)
        assert (answer.exit_code, answer.stdout) == (1, ""), command
        assert f"error[{code}]" in answer.stderr


def test_no_file_is_written(tmp_path):
    path, output = tmp_path / "mutant.csv", tmp_path / "timeline.html"
    path.write_text(MUTANTS["the last backward"][0])
    assert invoke("simulate", path, "-o", output).exit_code == 1
    assert not output.exists()


@pytest.mark.slow(only=["interleaved_4x2_comms"])
@pytest.mark.parametrize("name", ["zbv_2x2", "interleaved_4x2_comms"])
def test_every_operation_that_is_left_out(name, tmp_path):
    """Each operation of a file of PyTorch in turn: a timeline exists only where ``check`` has no such error either."""
    rows = [line.split(",") for line in (FILES / f"{name}.csv").read_text().splitlines()]
    pp_size, count = {"zbv_2x2": (2, 4), "interleaved_4x2_comms": (4, 8)}[name]
    schedule = {"kind": "file", "path": str(tmp_path / "s.csv"), "num_chunks": 2, "num_micro_batches": count}
    plan = plan_dict(model={"num_layers": 8}, topology={"pp": pp_size}, schedule=schedule)
    for rank in range(2):
        for index, op in enumerate(rows[rank]):
            if not op:
                continue
            mutant = [[*row] for row in rows]
            del mutant[rank][index]
            (tmp_path / "s.csv").write_text("\n".join(map(",".join, mutant)) + "\n")
            wrong = [error for error in pp.check(plan).errors if error.code.startswith(WHOLE_STEP)]
            if not wrong:  # PyTorch's operations on weights and gradients; one replica has none of them
                assert op.endswith(("UNSHARD", "RESHARD", "REDUCE_GRAD")), op
                assert pp.simulate(plan).makespan > 0
                continue
            with pytest.raises(SimulationError) as refused:
                pp.simulate(plan)
            assert [(f.code, f.message) for f in refused.value.findings] == [(f.code, f.message) for f in wrong]


def test_a_schedule_of_a_plan_itself(tmp_path):
    plan = plan_dict(
        model={"num_layers": 2}, topology={"pp": 2},
        schedule={"kind": "custom", "num_micro_batches": 1, "programs": [["0F0"], ["1F0", "1B0"]]},
    )  # fmt: skip
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan))
    answer = invoke("simulate", path)
    assert answer.exit_code == 1
    assert "never runs 0B0" in answer.stderr
    assert "plan.json" in answer.stderr


def test_a_schedule_that_hangs_is_no_error_of_ours(tmp_path):
    path = tmp_path / "hangs.csv"
    path.write_text(HANGS)
    assert "PP401" in errors_of_check(path)
    for words in TIMELINES:
        answer = invoke(*words, path)
        assert answer.exit_code == 1
        assert "did not expect" not in answer.stderr
        assert "error[PP40" in answer.stderr
