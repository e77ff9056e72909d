"""``check`` on plans whose schedule is a file: PyTorch's own pass, and slips in them are errors at their places."""

import json
import re
from pathlib import Path

import pytest

from tests.cli.commands import invoke
from tests.plans import plan_file

FILES = Path(__file__).parents[1] / "schedule" / "files"
SIZES = {"zero_bubble_2x2": (2, 4), "zbv_2x2": (2, 4), "dualpipe_v_4x2": (4, 10), "interleaved_4x2": (4, 8)}
NAMES = [f"{name}{ending}" for name in SIZES for ending in ("", "_comms")]
MODEL = {"num_layers": 8}


@pytest.fixture
def plan(tmp_path):
    """Write a plan next to the schedule file of a name and content; the plan's path."""

    def write(name, content, **sections):
        pp, num_micro_batches = SIZES[name.removesuffix("_comms")]
        (tmp_path / "s.csv").write_text(content)
        schedule = {"kind": "file", "path": "s.csv", "num_chunks": 2, "num_micro_batches": num_micro_batches}
        schedule |= sections.pop("schedule", {})
        return plan_file(tmp_path / "plan.json", model=MODEL, topology={"pp": pp}, schedule=schedule, **sections)

    return write


def lines_of(name):
    return [line.split(",") for line in (FILES / f"{name}.csv").read_text().splitlines()]


def joined(lines):
    return "\r\n".join(map(",".join, lines)) + "\r\n"


def column(lines, rank, index):
    return 1 + sum(len(cell) + 1 for cell in lines[rank][:index])


def index_of(lines, rank, pattern):
    return next(i for i, cell in enumerate(lines[rank]) if re.fullmatch(pattern, cell))


def findings(path):
    """Exit status, and (code, file name, line, column) of each error."""
    result = invoke("check", "--format", "json", path)
    found = [finding for finding in json.loads(result.stdout)["findings"] if finding["severity"] == "error"]
    places = [finding["location"] or {"file": "", "line": 0, "column": 0} for finding in found]
    return result.exit_code, [
        (finding["code"], Path(place["file"]).name, place["line"], place["column"])
        for finding, place in zip(found, places, strict=True)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_files_of_pytorch_pass(name, plan):
    assert findings(plan(name, (FILES / f"{name}.csv").read_text())) == (0, [])


@pytest.mark.parametrize("name", NAMES)
def test_a_doubled_operation(name, plan):
    lines = lines_of(name)
    index = index_of(lines, 1, r"\dF1")
    lines[1].insert(index, lines[1][index])
    status, found = findings(plan(name, joined(lines)))
    assert status == 1
    assert {place[1:] for place in found} & {("s.csv", 2, column(lines, 1, i)) for i in (index, index + 1)}


@pytest.mark.parametrize("name", NAMES)
def test_two_swapped_operations(name, plan):
    """A stage's first forward and backward, each where the other was."""
    lines = lines_of(name)
    backward = index_of(lines, 1, r"\d[BI]0")
    forward = index_of(lines, 1, rf"{lines[1][backward][0]}F0")
    lines[1][forward], lines[1][backward] = lines[1][backward], lines[1][forward]
    status, found = findings(plan(name, joined(lines)))
    assert status == 1
    assert {place[1:] for place in found} & {("s.csv", 2, column(lines, 1, i)) for i in (forward, backward)}


@pytest.mark.parametrize("name", NAMES)
def test_a_deleted_computation(name, plan):
    lines = lines_of(name)
    index = index_of(lines, 1, r"\d[BI]0")
    missing = lines[1].pop(index)
    path = plan(name, joined(lines))
    result = invoke("check", path)
    assert result.exit_code == 1
    assert re.search(rf"error\[PP121\]: .*rank 1 \(pp 1\) never runs {missing}", result.stdout)
    end = len(",".join(lines[1])) + 1
    assert ("PP121", "s.csv", 2, end) in findings(path)[1]


@pytest.mark.parametrize(
    ("schedule", "code"),
    [
        ({"path": "no.csv"}, "PP130"),
        ({"num_micro_batches": 5}, "PP136"),
        ({"num_chunks": 1}, "PP139"),
        ({"placement": [[0, 2], [1, 3]], "num_chunks": 1}, "PP134"),
        ({"format": "text"}, "PP133"),
    ],
)
def test_what_does_not_fit_the_plan_is_bad_input(schedule, code, plan):
    status, found = findings(plan("zbv_2x2", (FILES / "zbv_2x2.csv").read_text(), schedule=schedule))
    assert status == 2
    assert {finding[0] for finding in found} == {code}


def test_programs_in_the_plan(write):
    programs = [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
    schedule = {"kind": "custom", "num_micro_batches": 2, "programs": programs}
    assert findings(write(schedule=schedule))[0] == 0
    programs[1][2], programs[1][3] = programs[1][3], programs[1][2]
    status, found = findings(write(schedule=schedule))
    assert status == 1
    assert {file for _, file, line, _ in found if line} == {"plan.json"}
