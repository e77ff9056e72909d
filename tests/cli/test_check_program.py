"""``check``: a program text alone, with findings at its own lines."""

import json

import pytest

from tests.cli.commands import invoke

RIGHT = """\
# one micro-batch through two stages
tensor hidden: shape=4x8 dtype=float32 dims=sh
rank 0: 0F0 0SEND_F0{tensor=0 range=0..32} WAIT(0SEND_F0)
rank 1: 1RECV_F0{tensor=0 range=0..32} WAIT(1RECV_F0) 1F0
"""
SWAPPED = """\
rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 WAIT(0SEND_F0) WAIT(0SEND_F1)
rank 1: 1RECV_F1 1RECV_F0 WAIT(1RECV_F0) 1F0 WAIT(1RECV_F1) 1F1
"""


@pytest.fixture
def program(tmp_path):
    def write(text):
        path = tmp_path / "program.txt"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize("backend", [(), ("--transport", "paddle-gloo")])
def test_a_right_program(program, backend):
    result = invoke("check", program(RIGHT), *backend)
    assert result.exit_code == 0
    assert "proved" in result.stdout
    assert "6 operations on 2 ranks, " in result.stdout
    assert "in flight" not in result.stdout


def test_a_wrong_program_is_shown_at_its_operation(program):
    path = program(SWAPPED)
    result = invoke("check", path)
    assert result.exit_code == 1
    assert "error[PP302]" in result.stdout
    place, *excerpt = result.stdout.split(f"--> {path}:")[1].splitlines()
    line, column = map(int, place.split(":"))
    op = SWAPPED.splitlines()[line - 1][column - 1 :].split()[0]
    assert op in ("0SEND_F0", "0SEND_F1", "1RECV_F0", "1RECV_F1")
    marks = next(number for number, text in enumerate(excerpt) if "^" in text)
    start = excerpt[marks].index("^")
    assert excerpt[marks - 1][start : len(excerpt[marks])] == op


@pytest.mark.parametrize(
    ("text", "code", "place"),
    [
        ("", "PP131", "1:1"),
        ("# nothing\n", "PP131", "1:1"),
        ("rank 0:\nrank 1:\n", "PP131", "1:1"),
        ("rank 0: 0F0xyz\n", "PP132", "1:9"),
        ("rank 0: 0F0{que=side}\n", "PP133", "1:13"),
        ("rank 0: 0F0\n0F1,1F1\n", "PP133", "2:1"),
        ("rank 0: 0F0 0SEND_F0\n", "PP138", "1:13"),
    ],
)
@pytest.mark.parametrize("form", ["text", "json", "sarif"])
def test_a_text_that_is_no_program(program, text, code, place, form):
    path = program(text)
    result = invoke("check", path, "--format", form)
    assert result.exit_code == 2
    line, column = map(int, place.split(":"))
    match form:
        case "text":
            assert f"error[{code}]" in result.stderr
            assert f"--> {path}:{place}" in result.stderr
        case "json":
            (finding,) = json.loads(result.stdout)["findings"]
            assert (finding["code"], finding["location"]["line"], finding["location"]["column"]) == (code, line, column)
        case "sarif":
            (found,) = json.loads(result.stdout)["runs"][0]["results"]
            assert found["ruleId"] == code
            assert found["locations"][0]["physicalLocation"]["region"]["startColumn"] == column


CROSSING = """\
rank 0: 0SEND_F0{peer=1} 1RECV_B0{peer=1} WAIT(0SEND_F0) WAIT(1RECV_B0)
rank 1: 2SEND_B0{peer=0} 1RECV_F0{peer=0} WAIT(2SEND_B0) WAIT(1RECV_F0)
"""


@pytest.mark.parametrize(
    ("queue", "code"), [((), "PP411"), (("--queue", "directed_edge"), "PP411"), (("--queue", "pair"), "PP401"),
                        (("--queue", "pair", "--transport", "torch-nccl"), "PP401")]
)  # fmt: skip
def test_the_queue_of_a_runtime_that_is_stricter_than_the_backend(program, queue, code):
    result = invoke("check", program(CROSSING), "--select", "PP401,PP411", "--format", "json", *queue)
    assert [finding["code"] for finding in json.loads(result.stdout)["findings"]] == [code]
    assert result.exit_code == (1 if code == "PP401" else 0)
