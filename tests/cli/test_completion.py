"""Completion is click's own: it has our groups, whose commands are imported only when they run."""

from click.shell_completion import ShellComplete

from pipeproof.cli.main import main


def offered(*words):
    *before, last = words
    items = ShellComplete(main, {}, "pipeproof", "_PIPEPROOF_COMPLETE").get_completions(list(before), last)
    return [item.value for item in items]


def test_commands_and_options_of_groups_are_completed():
    assert offered("ch") == ["check"]
    assert "megatron" in offered("import", "plan", "--from", "m")
    assert offered("check", "--format", "s") == ["sarif"]
    assert "--micro-batches" in offered("schedule", "show", "--m")
