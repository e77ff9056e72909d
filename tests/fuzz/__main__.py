"""``python -m tests.fuzz [--seconds N] [--seed N] [READER ...]``: mutants of files, given to their commands.

Every mutant must end with a status of pipeproof, without a traceback and within the limit of time. The commands run in
a forked process: a mutant that ends its reader ends nothing else. A mutant that is not handled is printed, kept in
``tests/fuzz/seeds``, and makes the status 1; ``--write`` keeps the counts for ``validation/results/hardening.md``.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import time

from tests.fuzz import mutate
from tests.fuzz.mutate import mutant_of, outcome_of, preload
from tests.fuzz.readers import READERS, SEEDS


def main() -> int:
    """Fuzz the readers in turn until the time is over; status 1 where a mutant was not handled."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("readers", nargs="*", choices=[*READERS, []], metavar="READER")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    draw, ends = random.Random(options.seed), time.monotonic() + options.seconds
    counts, bad = dict.fromkeys(options.readers or READERS, 0), 0
    for name in counts:
        preload(READERS[name])
    while time.monotonic() < ends:
        for name in counts:
            reader = READERS[name]
            content = mutant_of(draw.choice(reader.all_seeds()), draw)
            problem = outcome_of(reader, content)
            counts[name] += 1
            if problem is not None:
                bad += 1
                kept = SEEDS / f"{name}.{hashlib.sha256(content).hexdigest()[:12]}"
                SEEDS.mkdir(exist_ok=True)
                kept.write_bytes(content)
                sys.stdout.write(f"{name}: {problem}; kept as {kept.name}\n")
    for name, count in counts.items():
        sys.stdout.write(f"{name:12} {count}\n")
    sys.stdout.write(
        f"{sum(counts.values())} mutants of {len(counts)} readers, {bad} not handled; at most {mutate.peak_mb:.0f} MB\n"
    )
    if options.write:
        from tests.fuzz.mutate import keep_counts

        keep_counts(counts, bad, options.seconds)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
