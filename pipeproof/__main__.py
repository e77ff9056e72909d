"""``python -m pipeproof`` and the ``pipeproof`` command: both begin here, before anything slow is imported."""

import sys

from pipeproof.system_calls import address_space_limit

LEAST_ADDRESS_SPACE = 256 * 2**20
"""Least address space in bytes of a command: with less, libraries end the process with a status of their own."""


def start() -> None:
    """Run the command of this process; one that is interrupted while it still imports ends as any other."""
    limit = address_space_limit()
    if limit is not None and limit < LEAST_ADDRESS_SPACE:
        sys.stderr.write(
            f"error: this process has an address space of {limit / 1e6:.0f} MB (`ulimit -v`), and pipeproof needs "
            f"{LEAST_ADDRESS_SPACE / 1e6:.0f} MB\n"
        )
        sys.exit(2)  # ExitStatus.BAD_INPUT, which is not imported yet
    try:
        from pipeproof.cli.main import main

        main(prog_name="pipeproof")
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)  # ExitStatus.INTERRUPTED, which may not have been imported
    except MemoryError:
        sys.stderr.write("error: out of memory\n")  # no more than this: a longer report needs memory
        sys.exit(2)


if __name__ == "__main__":
    start()
