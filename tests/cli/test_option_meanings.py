"""An option has one spelling and one kind of value in all commands that have it; nothing is excepted."""

import importlib

import click
import pytest

from pipeproof.cli.main import main
from tests.cli.commands import REPOSITORY, invoke

MOST_COMMANDS = 16


@pytest.fixture
def make_options(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "validation" / "pages"))
    return importlib.import_module("make_options")


def test_one_screen_has_all_commands():
    assert len(main.commands) <= MOST_COMMANDS


def test_an_option_has_one_spelling_and_one_kind_of_value(make_options):
    found = make_options.options()
    assert set(found) >= {"--output", "--format", "--set", "--backend", "--device", "--from"}
    several = {name: of_commands for name, of_commands in found.items() if len(of_commands) > 1}
    for facts in (make_options.spelling, make_options.kind):
        differing = {name: {facts(option) for option in several[name].values()} for name in several}
        assert {name: found for name, found in differing.items() if len(found) > 1} == {}


def test_the_comparison_finds_another_kind_and_another_spelling(make_options):
    output = click.Option(["-o", "--output"], type=click.Path())
    assert make_options.kind(output) != make_options.kind(click.Option(["-o", "--output"], type=int))
    assert make_options.kind(output) != make_options.kind(click.Option(["-o", "--output"], is_flag=True))
    assert make_options.spelling(output) != make_options.spelling(click.Option(["--output"]))


def test_the_options_that_many_commands_share(make_options):
    found = make_options.options()
    assert {make_options.spelling(option) for option in found["--output"].values()} == {("-o", "--output")}
    for option in found["--format"].values():
        assert option.type.choices[:2] == ("text", "json") or option.type.choices[:2] == ["text", "json"]
        assert option.default == "text"
    assert len({tuple(option.type.choices) for option in found["--backend"].values()}) == 1


def test_every_command_that_reads_a_plan_takes_set(make_options):
    readers = {
        words
        for words, command in make_options.commands()
        for argument in command.params
        if isinstance(argument, click.Argument) and "PLAN" in (argument.metavar or "")
    }
    assert readers >= {"check", "simulate", "show", "advise", "run", "rehearse", "schedule solve", "job file"}
    assert readers - set(make_options.options()["--set"]) == set()


def test_set_replaces_a_value_and_its_errors_name_it(good):
    shown = [invoke("simulate", good, "--set", f"schedule.num_micro_batches={m}").stdout for m in (4, 8)]
    assert ["F7" in text for text in shown] == [False, True]
    refused = invoke("check", good, "--set", "topology.pp=0")
    assert refused.exit_code == 2
    assert "at least 1, found integer 0 (given by `--set topology.pp=..`)" in refused.output
    inside = invoke("check", good, "--set", "schedule.kind.name=x")
    assert "`schedule.kind.name` cannot be set: `schedule.kind` is not a mapping of keys" in inside.output
    assert "did you mean `kind`?" in invoke("check", good, "--set", "schedule.knd=gpipe").output
    assert "--set is for plans" in invoke("check", "--program", good, "--set", "topology.pp=2").stderr


def test_a_job_file_starts_both_steps_with_the_values(good):
    text = invoke("job", "file", good, "--for", "paddle", "--set", "run.steps=3").stdout
    assert text.count("--set run.steps=3") == 2


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (("reshard",), "did you mean `pipeproof state reshard`?"),
        (("hang",), "did you mean `pipeproof job hang`?"),
        (("chek",), "did you mean `pipeproof check`?"),
        (("import", "megatorn"), "did you mean `pipeproof import megatron`?"),
        (("qqqqqqqq",), "`pipeproof --help` lists the commands"),
    ],
)
def test_an_unknown_command_is_answered_with_the_nearest(words, fix):
    refused = invoke(*words)
    assert refused.exit_code == 2
    assert fix.replace("pipeproof", "main") in " ".join(refused.stderr.split())
