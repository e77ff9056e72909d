"""``python -m pipeproof``: the same as the ``pipeproof`` command."""

from pipeproof.cli import main

main(prog_name="pipeproof")
