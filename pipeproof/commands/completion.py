"""``pipeproof completion``: what a shell has to run so that it completes our commands."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

_NAME = "pipeproof"
_VARIABLE = "_PIPEPROOF_COMPLETE"
"""What click itself looks for in the environment of a command of this name."""


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    r"""Print the script with which a shell completes commands, options, plans, codes and schedules.

    \b
    bash   in ~/.bashrc:                 eval "$(pipeproof completion bash)"
    zsh    in ~/.zshrc, after compinit:  eval "$(pipeproof completion zsh)"
    fish   once:  pipeproof completion fish > ~/.config/fish/completions/pipeproof.fish
    """
    script = get_completion_class(shell)
    assert script is not None  # click has these three
    click.echo(script(context.find_root().command, {}, _NAME, _VARIABLE).source())
