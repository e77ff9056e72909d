"""``pipeproof schedule convert``: files in and out, findings at their place, and nothing left out silently."""

import pytest

from pipeproof.cli.schedule_command import FORMATS
from pipeproof.schedule.formats.read_schedule import WRITTEN_FORMATS
from tests.cli.commands import invoke

FORMS = {
    "text": "rank 0: 0F0 0B0\nrank 1: 1F0 1B0\n",
    "csv": "0F0,0B0\n1F0,1B0\n",
    "fleet": "f0;b0;\nf0;b0;\n",
}


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "schedule"
        path.write_text(text)
        return path

    return write


def converted(*arguments):
    result = invoke("schedule", "convert", *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*arguments):
    result = invoke("schedule", "convert", *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    return result.stderr


def test_the_formats_are_those_that_are_written():
    assert list(FORMATS) == [*WRITTEN_FORMATS]


@pytest.mark.parametrize("source", FORMS)
@pytest.mark.parametrize("target", FORMS)
def test_every_format_into_every_other(source, target, file):
    path = file(FORMS[source])
    assert converted(path, "--as", target) == FORMS[target]
    assert converted(path, "--as", target, "--from", source) == FORMS[target]


def test_what_a_format_cannot_say_is_an_error_at_its_place(file):
    path = file("0F0,0I0,0W0\n1F0,1I0,1W0\n")
    message = refused(path, "--as", "fleet")
    assert "error[PP141]" in message
    assert "schedule:1:5" in message
    assert "0I0 is a part of a backward" in message


def test_a_refused_schedule_leaves_the_output_alone(file, tmp_path):
    output = tmp_path / "out"
    output.write_text("before")
    refused(file("0F0,0I0,0W0\n"), "--as", "fleet", "-o", output)
    assert output.read_text() == "before"
