"""An option has one spelling and one kind of value in all commands that have it; nothing is excepted."""

import json

import click
import pytest

from pipeproof.cli.main import main
from tests.cli.commands import EXAMPLES, invoke

MOST_COMMANDS = 16


@pytest.fixture
def make_options(validation_script):
    return validation_script("make_options")


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
    assert readers >= {"simulate", "show", "tune", "run", "rehearse", "schedule show"}
    by_option = {"check", "state reshard", "state aoa", "import profile"}
    assert (readers | by_option) - set(make_options.options()["--set"]) == set()


def test_every_command_that_reads_a_plan_takes_files_of_other_tools(make_options):
    """Except commands that read a plan by an option."""
    found = make_options.options()
    readers = {words for words in found["--set"] if words.split()[0] not in ("init", "import", "state")}
    assert readers >= {"check", "simulate", "show", "tune", "sweep", "compare", "run", "rehearse"}
    assert readers - set(found["--from"]) == set()
    for option in ("--model-config", "--world-size"):
        assert readers - set(found[option]) == set()


def test_set_replaces_a_value_and_its_errors_name_it(good):
    shown = [invoke("simulate", good, "--set", f"schedule.num_micro_batches={m}").stdout for m in (4, 8)]
    assert ["F7" in text for text in shown] == [False, True]
    refused = invoke("check", good, "--set", "topology.pp=0")
    assert refused.exit_code == 2
    assert "at least 1, found integer 0 (given by `--set topology.pp=..`)" in refused.output
    inside = invoke("check", good, "--set", "schedule.kind.name=x")
    assert "`schedule.kind.name` cannot be set: `schedule.kind` is not a mapping of keys" in inside.output
    assert "did you mean `kind`?" in invoke("check", good, "--set", "schedule.knd=gpipe").output


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("simulate",), "step time"),
        (("show",), "parameters"),
        (("tune", "--top", "1", "--fix", "mbs=1,2"), "a step, bubble"),
        (("compare", EXAMPLES / "gpt_pp4.yaml"), "step time"),
    ],
    ids=lambda value: " ".join(map(str, value))[:20],
)
def test_a_file_of_another_tool_is_read_in_place_of_a_plan(words, text):
    script = EXAMPLES / "importing" / "strategy.prototxt"
    result = invoke(*words, script, "--from", "fleet", "--set", "topology.pp=4", "--set", "topology.tp=1")
    assert result.exit_code == 0, result.output
    assert text in result.stdout
    assert f"`pipeproof check --from fleet {script}` lists them" in result.stderr


def test_a_sweep_of_a_file_of_another_tool():
    script = EXAMPLES / "importing" / "megatron.sh"
    values = ("--set", "schedule.micro_batch_size=[1, 2]", "--workers", "1")
    options = ("--from", "megatron", "--device", "h100", "--set", "model.ffn_size=1024")
    result = invoke("sweep", script, *options, *values, "--format", "json")
    assert result.exit_code == 0, result.output
    points = json.loads(result.stdout)["points"]
    assert [point["status"] for point in points] == ["ok", "ok"]


def test_set_is_for_the_plan_that_an_option_names(tmp_path):
    plan, state = EXAMPLES / "gpt_pp4.yaml", tmp_path / "none"
    reshard = ("state", "reshard", plan, "--to", plan, "--check", "--set")
    assert invoke(*reshard, "topology.pp=2").exit_code == 0
    assert "model.vocab_size was 256 and is 64" in invoke(*reshard, "model.vocab_size=64").output
    assert "given by `--set topology.pp=..`" in invoke(*reshard, "topology.pp=0").output
    imported = ("check", "--from", "fleet", EXAMPLES / "importing" / "strategy.prototxt", "--set")
    refused = " ".join(invoke(*imported, "topology.sequence_paralel=true").output.split())
    assert "given by `--set topology.sequence_paralel=..`" in refused
    assert "strategy.prototxt:" not in refused
    assert "--to PLAN" in invoke("state", "reshard", state, "--check", "--names", "megatron", "--set", "a=1").stderr
    names = ("state", "aoa", plan, "--names", "pipeproof", "--to-names", "megatron")
    assert "given by `--set model.num_layers=..`" in invoke(*names, "--set", "model.num_layers=0").output
    assert "--set is for plans" in invoke("state", "aoa", plan, "--source", tmp_path, "--set", "a=1").stderr
