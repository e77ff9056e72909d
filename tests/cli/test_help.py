"""Help that a newcomer reads: every command in a section, with a sentence and an example that can be typed."""

import shlex

import click
import pytest

from pipeproof.cli.help_sections import EXAMPLES, SECTIONS
from pipeproof.cli.main import main
from tests.cli.commands import invoke


def leaves(group, *words):
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from leaves(command, *words, name)
        else:
            yield (*words, name), command


COMMANDS = dict(leaves(main))


def test_every_command_has_one_section_and_one_example():
    """Whoever adds a command says here where a newcomer finds it."""
    placed = [name for _, names in SECTIONS for name in names]
    assert sorted(placed) == sorted(main.commands)
    assert sorted(EXAMPLES) == sorted(" ".join(words) for words in COMMANDS)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_the_example_is_in_the_help_and_can_be_typed(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    example = EXAMPLES[" ".join(words)]
    shown = invoke(*words, "--help").stdout
    assert f"Example:\n    {example}\n" in shown
    typed = shlex.split(example)
    typed = typed[: typed.index(">")] if ">" in typed else typed
    assert typed[: len(words) + 1] == ["pipeproof", *words]
    context = main.make_context("pipeproof", typed[1:2], resilient_parsing=True)
    group, rest = main, typed[1:]
    while isinstance(group, click.Group):
        name, command, rest = group.resolve_command(context, rest)
        context = command.make_context(
            name, list(rest[:1]) if isinstance(command, click.Group) else list(rest), context
        )
        group = command
    assert context.command is COMMANDS[words]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_argument_and_option_is_explained(words):
    """The first sentence describes the command; an option without help has choices that explain it."""
    command = COMMANDS[words]
    assert command.help.partition("\n")[0].endswith((".", ":")) or "." in command.help
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help or isinstance(parameter.type, click.Choice), parameter.name


def test_the_list_of_commands_has_whole_sentences_in_sections():
    shown = invoke("--help").stdout
    assert "..." not in shown.partition("\n")[2]
    titles = [title for title, _ in SECTIONS]
    assert [line[:-1] for line in shown.splitlines() if line[:-1] in titles] == titles
    assert "More:" not in shown


def test_a_command_without_a_section_is_listed_all_the_same():
    from pipeproof.cli.help_sections import SectionedGroup

    @click.command()
    def novel():
        """Do something new."""

    group = SectionedGroup("pipeproof")
    group.add_command(novel)
    shown = group.get_help(click.Context(group, info_name="pipeproof"))
    assert "More:\n  novel  Do something new." in shown
