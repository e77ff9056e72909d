"""Stacks of py-spy, as it wrote them for three ranks; one rank waits for its data."""

import json
import shutil
from pathlib import Path

import pytest

from pipeproof.diagnostics.source import PlanFileError
from pipeproof.interop.hang.py_spy import StackFrame, ask_py_spy, read_stack, read_stacks
from tests.cli.commands import invoke
from tests.docs.test_schemas import require_fit

STACKS = Path(__file__).parents[2] / "goldens" / "stacks"


def fake_py_spy(monkeypatch, directory, script):
    """Put a shell script in place of py-spy."""
    path = directory / "bin" / "py-spy"
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")


@pytest.mark.parametrize(("form", "file"), [("text", "train.py"), ("json", "/home/user/job/train.py")])
def test_both_forms_have_the_line_of_the_program(form, file):
    stacks = read_stacks(STACKS / form)
    assert [stack.own[0] for stack in stacks.values()] == [
        StackFrame("step", file, 8), StackFrame("next_batch", file, 4), StackFrame("step", file, 8),
    ]  # fmt: skip
    assert [frame.function for frame in stacks[1].frames][:2] == ["Condition.wait", "Queue.get"]
    assert stacks[1].text == (
        f"next_batch ({file}:4), called by step ({file}:7), main ({file}:10); in Condition.wait of threading.py"
    )
    assert not stacks[1].is_active


def test_the_main_thread_is_read_among_others(tmp_path):
    path = tmp_path / "rank_0"
    path.write_text(
        'Process 7: python train.py\nPython v3.12.1 (/usr/bin/python3.12)\n\nThread 9 (active): "loader"\n'
        '    get (loader.py:3)\nThread 7 (active+gil): "MainThread"\n    matmul (torch/functional.py:5)\n'
        "        Locals:\n            a: 3\n    forward (model.py:60)\n"
    )
    stack = read_stack(path)
    assert (stack.pid, stack.is_active, stack.text) == (7, True, "forward (model.py:60); in matmul of functional.py")
    threads = json.loads((STACKS / "json" / "rank_1.json").read_text())
    other = {**threads[0], "os_thread_id": 1, "thread_name": "loader", "frames": []}
    path.write_text(json.dumps([other, *threads]))
    assert read_stack(path).own[0].function == "next_batch"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rank_0.txt", "Process 7: python\n", "it has no threads"),
        ("rank_0.json", '[{"pid": 7}]', "is not a dump of py-spy"),
        ("rank_0.json", "[{", "is not a dump of py-spy"),
        ("rank_0.txt", "nothing", "no stack of py-spy in"),
    ],
)
def test_other_files_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(PlanFileError, match=message) as refused:
        read_stacks(tmp_path)
    assert refused.value.findings[0].code == "PP930"


def test_two_files_of_one_rank_are_refused(tmp_path):
    shutil.copy(STACKS / "text" / "rank_1.txt", tmp_path / "rank_1.txt")
    shutil.copy(STACKS / "json" / "rank_1.json", tmp_path / "rank_1.json")
    with pytest.raises(PlanFileError, match="both of rank 1"):
        read_stacks(tmp_path)


def test_the_command_names_the_rank_that_is_elsewhere():
    result = invoke("job", "hang", STACKS / "text")
    assert result.exit_code == 0
    assert "rank 1, by py-spy: next_batch (train.py:4), called by step (train.py:7)" in result.stdout
    assert result.stdout.endswith("in another call than the others: rank 1\n")
    report = json.loads(invoke("job", "hang", STACKS / "json", "--format", "json").stdout)
    require_fit("hang", report)
    assert (report["outside"], report["different"]) == ([], [1])
    assert report["stacks"][1]["frames"][2]["line"] == 4


def test_ranks_that_are_not_in_communication_are_named(tmp_path):
    for rank, line in ((0, 17), (1, 9), (2, 15)):
        calls = (
            ["    wait (threading.py:327)"] if rank == 1 else ["    send (torch/distributed/distributed_c10d.py:2900)"]
        )
        text = "\n".join((f"Process {rank + 5}: python", f'Thread {rank + 5} (idle): "MainThread"', *calls))
        (tmp_path / f"rank_{rank}.txt").write_text(f"{text}\n    main (train.py:{line})\n")
    assert invoke("job", "hang", tmp_path).stdout.endswith("not in communication: rank 1\n")
    (tmp_path / "rank_1.txt").unlink()
    assert invoke("job", "hang", tmp_path).stdout.endswith("the ranks are in different calls\n")


def test_stacks_are_shown_with_dumps(tmp_path):
    result = invoke("job", "hang", STACKS.parents[1].parent / "examples/importing/dumps", "--stacks", STACKS / "text")
    assert result.exit_code == 1
    assert "rank 1, by py-spy: next_batch (train.py:4)" in result.stdout


def test_py_spy_is_asked_without_a_pause_of_the_process(monkeypatch, tmp_path):
    fake_py_spy(monkeypatch, tmp_path, f'echo "$@" > {tmp_path}/arguments; cat {STACKS}/json/rank_1.json')
    assert ask_py_spy(7).own[0].function == "next_batch"
    assert (tmp_path / "arguments").read_text() == "dump --json --nonblocking --pid 7\n"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (
            "echo \"Permission Denied: Try running again with elevated permissions by going 'sudo ..'\" >&2; exit 1",
            "py-spy is not permitted to read PID 7: as root run `py-spy dump --pid 7`; a container needs",
        ),
        (
            "echo 'Error: Failed to find python version from target process' >&2; exit 1",
            "py-spy cannot read PID 7: Failed to find python version from target process",
        ),
        ("exit 3", "py-spy cannot read PID 7: exit status 3"),
        ("echo hello", "py-spy did not print stacks: "),
    ],
)
def test_a_refusal_is_a_reason(monkeypatch, tmp_path, script, reason):
    fake_py_spy(monkeypatch, tmp_path, script)
    assert ask_py_spy(7).startswith(reason)


def test_without_py_spy_there_is_no_stack(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ask_py_spy(7) == "py-spy is not installed"
