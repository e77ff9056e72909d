"""Run the planted hangs and a healthy job, and write docs/planted-hangs.md with the measured seconds and verdicts.

    python validation/pages/make_hangs.py --healthy-minutes 30

The hangs take a few minutes. Without ``--healthy-minutes`` the healthy job runs for one minute.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from pipeproof.exec.monitor.verdict import PATIENCE_S  # noqa: E402
from tests.exec.monitor.hang_jobs import CAUSES, outcome  # noqa: E402

PAGE = ROOT / "docs" / "planted-hangs.md"
_STEP_S = 0.6
"""Measured seconds of a step of the healthy job, to choose their number; what the page states is counted."""
_NAMES = {
    "crossed_sends": "two ranks send to each other first",
    "missing_receive": "a rank leaves out one receive",
    "extra_collective": "a rank issues one more all-reduce",
    "rank_local_keys": "all-reduce of metrics by keys of the rank",
    "exception": "an exception on one rank",
    "killed": "a rank is killed (SIGKILL)",
    "stopped": "a rank is stopped (SIGSTOP)",
    "data_loader_stuck": "the data loader of a rank is stuck",
    "wrong_group": "an all-reduce in a wrong group",
    "micro_batch_counts": "ranks with different numbers of micro-batches",
    "shape_mismatch": "an all-reduce of another size",
}


def _ranks(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks)) or "none"


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--healthy-minutes", type=float, default=1.0)
    arguments = parser.parse_args()
    rows, detected, right = [], 0, 0
    with tempfile.TemporaryDirectory() as directory:
        for name, text in _NAMES.items():
            result = outcome(name, Path(directory) / name / "rings", patience_s=PATIENCE_S)
            verdict = result.verdict
            is_found = verdict is not None and verdict.status == "hang"
            named = verdict.causes if verdict is not None else ()
            kind = str(verdict.kind) if verdict is not None else "none"
            is_right = is_found and named == CAUSES[name]
            detected, right = detected + (is_found and result.seconds <= 10), right + is_right
            rows.append(
                f"| {text} | {_ranks(CAUSES[name])} | {result.seconds:.1f} | {kind} | {_ranks(named)} | "
                f"{'yes' if is_right else 'no'} |"
            )
            print(rows[-1], flush=True)
        seconds = arguments.healthy_minutes * 60
        num_steps = max(8, round(seconds / _STEP_S))
        rings = Path(directory) / "healthy" / "rings"
        healthy = outcome("healthy", rings, patience_s=PATIENCE_S, num_steps=num_steps, timeout_s=seconds)
    state = "running" if healthy.verdict is None else str(healthy.verdict.status)
    alarms = "one false alarm" if state == "hang" else "no false alarm"
    PAGE.write_text(
        f"""\
# Planted hangs

`validation/pages/make_hangs.py` writes this page. Each job has three ranks of PyTorch over gloo on one machine with two
processors: a pipeline of three micro-batches, two all-reduces of metrics and one of gradients in each step. The hang is
planted in the fifth step. The seconds are those from the last event of any rank to the verdict of
`pipeproof job hang --follow`, whose patience is {PATIENCE_S:g} s.

| planted | cause | seconds | kind | named cause | right |
| --- | --- | ---: | --- | --- | --- |
{chr(10).join(rows)}

{detected} of {len(rows)} detected within 10 s, cause named right in {right} of {len(rows)}.

A healthy job with jitter (one rank sleeps up to 1.5 s more than the others) was followed for at most
{seconds:.0f} s: {alarms}; it was {state} at the end.
""",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
