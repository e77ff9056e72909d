"""The results file: appended to, gone on from, mended where its last line was cut, refused where it is another's."""

import json
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeproof.analysis.sweep.results_file import ResultsFileError, open_results
from pipeproof.analysis.sweep.run_sweep import run_sweep
from pipeproof.verify.certificate import RULE_SET_VERSION
from tests.sweep.files import sweep_of

GRID = {"schedule.num_micro_batches": [3, 4, 5], "topology.tp": [1, 3]}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A sweep, its results, and the bytes of its results file."""
    folder = tmp_path_factory.mktemp("sweep")
    sweep = sweep_of(folder, GRID)
    path = folder / "results.jsonl"
    with open_results(path, sweep) as file, ThreadPoolExecutor(1) as pool:
        assert file.done == {}
        results = run_sweep(sweep, pool, on_result=file.append)
    return sweep, results, path.read_bytes()


def test_a_line_for_the_sweep_and_one_for_each_point(made):
    sweep, results, content = made
    head, *lines = map(json.loads, content.splitlines())
    assert head == {
        "pipeproof_sweep": 1, "digest": sweep.digest, "plan": "base.json", "rule_set_version": RULE_SET_VERSION,
    }  # fmt: skip
    assert lines == [result.to_json() for result in results]


@given(st.data())
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_wherever_the_file_was_cut_it_goes_on_from_there(made, tmp_path, data):
    sweep, results, content = made
    length = data.draw(st.integers(0, len(content)))
    path = tmp_path / "results.jsonl"
    path.write_bytes(content[:length])
    whole = content[:length].count(b"\n")
    with open_results(path, sweep) as file:
        assert list(file.done.values()) == list(results[: max(0, whole - 1)])
        assert (file.note is None) == (length == 0 or content[length - 1 : length] == b"\n")
        for result in results[max(0, whole - 1) :]:
            file.append(result)
    assert path.read_bytes() == content


def test_results_of_another_sweep_are_refused_and_left_alone(made, tmp_path):
    _, _, content = made
    path = tmp_path / "results.jsonl"
    for cut in (0, 3):
        path.write_bytes(content[: len(content) - cut])
        other = sweep_of(tmp_path, {"topology.tp": [1, 3]})
        with pytest.raises(ResultsFileError, match="another sweep, digest") as refusal, open_results(path, other):
            pass
        assert other.digest[:12] in str(refusal.value)
        assert path.read_bytes() == content[: len(content) - cut]


@pytest.mark.parametrize("text", ["hello", "hello\n", "{}\n", '{"pipeproof_sweep":2}\n', "\n", "[]\n"])
def test_what_is_no_results_file_is_left_alone(text, made, tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(ResultsFileError, match="no results file"), open_results(path, made[0]):
        pass
    assert path.read_text() == text


def ok_line(makespan, **others):
    """A line of an evaluated point."""
    figures = {"sequence": 1, "idle_ratio": 0, "most_idle_ratio": 0, "peak_activations": 1, "warnings": []}
    return json.dumps({"id": 16 * "0", "set": {}, "status": "ok", "makespan": makespan, **figures, **others})


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (ok_line("3/2"), "has no point 0000"),
        ("{", "the line is no result"),
        ("{}", "the line is no result"),
        ('{"id":"0000000000000000","set":{},"status":"refused","code":"PP140","message":"m"}', "has no point 0000"),
        ('{"id":"0000000000000000","set":{},"status":"good"}', "the line is no result"),
        (ok_line("1/0"), "the line is no result"),
        (ok_line("1e-99999999"), "the line is no result"),
        (ok_line(math.inf), "the line is no result"),
        (ok_line(1, peak_activations=math.inf), "the line is no result"),
        ("[" * 100_000, "the line is no result"),
    ],
)
def test_damage_in_the_middle_is_named_by_its_line(line, words, made, tmp_path):
    sweep, _, content = made
    lines = content.decode().splitlines()
    path = tmp_path / "results.jsonl"
    path.write_text("\n".join([*lines[:2], line, *lines[2:]]) + "\n")
    with pytest.raises(ResultsFileError, match=words) as refusal, open_results(path, sweep):
        pass
    assert f"{path}:3: " in str(refusal.value)


def test_two_at_a_time_are_refused(made, tmp_path):
    path = tmp_path / "results.jsonl"
    with (
        open_results(path, made[0]),
        pytest.raises(ResultsFileError, match="another process"),
        open_results(path, made[0]),
    ):
        pass
