"""Rows of blocks: what ``schedule show`` prints and papers draw is read as the schedule that it shows."""

import pytest
from click.testing import CliRunner

from pipeproof.cli.main import main
from pipeproof.schedule.formats.block_rows import looks_like_blocks
from pipeproof.schedule.formats.read_schedule import read_schedule
from pipeproof.schedule.formats.schedule_size_checks import Expected
from pipeproof.specs.schedule import ScheduleFileError

KINDS = {
    "gpipe": (), "1f1b": (), "eager_1f1b": (), "interleaved": ("-v", "2"), "looped_bfs": ("-v", "3"), "zb_h1": (),
    "zb_h2": (), "interleaved_zb": ("-v", "2"), "zb_v": (), "v_half": (), "v_min": (), "dualpipe_v": (),
}  # fmt: skip


def printed(*words, columns=600):
    result = CliRunner(env={"COLUMNS": str(columns)}).invoke(main, ["schedule", "show", *words])
    assert not result.exit_code, result.output
    return result.stdout


def programs(text):
    return [[str(op) for op in program] for program in read_schedule(text, "rows.txt", Expected()).programs]


@pytest.mark.parametrize("sizes", [(2, 8), (4, 12)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_printed_schedule_is_read_as_the_one_that_was_printed(kind, sizes):
    words = (kind, *KINDS[kind], "-p", str(sizes[0]), "-m", str(sizes[1]))
    assert programs(printed(*words)) == programs(printed(*words, "--as", "text"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("F0 F1 B0 B1\nF0 B0 F1 B1\n", [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]),
        ("rank 0: F0 I0 W0\n", [["0F0", "0I0", "0W0"]]),
        ("# of a paper\nrank 0 F0--F1--....B0B1\nrank 1 ....F0B0..F1B1\n",
         [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]),
        ("0F0 1F0 1B0 0B0", [["0F0", "1F0", "1B0", "0B0"]]),
    ],
)  # fmt: skip
def test_rows_are_read(text, expected):
    assert looks_like_blocks(text)
    assert programs(text) == expected


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("F0 F1 B0 BO\nF0 F1 B0 B1", "PP132", "`BO` is not a block"),
        ("rank 0 F0F1\nrank 2 F0F1", "PP135", "rank 1 comes next"),
        ("F0 .. F0 B0 .. B0\n.. F0 F0 B0 B0 ..", "PP132", "end at the same time with stages in a loop and in a V"),
        ("F0 B0\nB0 F0", "PP132", "cannot run in this order"),
        ("F0 0F1 B0", "PP132", "a stage, and blocks before it name none"),
        ("F0==B0--", "PP132", "a second stage by the sign"),
        ("F0F0B0", "PP132", "B0 or I0 1 times"),
        ("F0 F1 B0 B1 F12345678901234567890", "PP132", "number above"),
    ],
)
def test_what_is_no_schedule_is_refused_with_its_place(text, code, words):
    with pytest.raises(ScheduleFileError) as caught:
        read_schedule(text, "rows.txt", Expected(), format="blocks")
    assert caught.value.findings[0].code == code
    assert words in str(caught.value)


def test_a_picture_that_is_too_narrow_says_how_to_print_it():
    with pytest.raises(ScheduleFileError, match="is not a block") as caught:
        programs(printed("1f1b", "-p", "2", "-m", "32", columns=60))
    assert "COLUMNS=400" in caught.value.findings[0].help


@pytest.mark.parametrize("name", ["rows.txt", "rows"])
def test_commands_take_the_file(tmp_path, name):
    file = tmp_path / name
    file.write_text(printed("zb_v", "-p", "2", "-m", "4"))
    run = CliRunner().invoke
    assert "makespan 2.5 ms" in run(main, ["simulate", str(file)]).stdout
    assert "A and B take equally long" in run(main, ["compare", str(file), "zb_v"]).stdout
    assert "schedule.placement [[0, 3], [1, 2]]: the rows end soonest in a V" in run(main, ["check", str(file)]).output
    assert run(main, ["schedule", "show", str(file)]).stdout.count("rank ") >= 3
    for end in ("svg", "html", "json", "csv"):
        assert not run(main, ["simulate", str(file), "-o", str(tmp_path / f"picture.{end}")]).exit_code
