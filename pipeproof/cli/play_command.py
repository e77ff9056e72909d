"""``pipeproof play``: the page on which schedules are changed and timed in a browser."""

from __future__ import annotations

from pathlib import Path

import click

from pipeproof.cli.console import echo, writable


@click.command()
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), default=Path("play.html"),
              show_default=True, callback=writable, help="Write the page to this file.")  # fmt: skip
def play(output: Path) -> None:
    """Write a page that times schedules in a browser, without a server."""
    from pipeproof.atomic_write import write_output
    from pipeproof.views.play.play_page import play_html

    write_output(output, play_html())
    echo(f"written to {output}: open it in a browser")
