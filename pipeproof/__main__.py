"""``python -m pipeproof`` and the ``pipeproof`` command: both begin here, before anything slow is imported."""

import sys


def start() -> None:
    """Run the command of this process; one that is interrupted while it still imports ends as any other."""
    try:
        from pipeproof.cli.main import main
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)  # ExitStatus.INTERRUPTED, which may not have been imported
    main(prog_name="pipeproof")


if __name__ == "__main__":
    start()
