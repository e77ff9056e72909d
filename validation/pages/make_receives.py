"""Writes parts of ``docs/deadlock.md`` and ``receives.md``: deadlock verdicts by ``recv_order``, and predicted steps.

``python validation/pages/make_receives.py`` writes, ``--check`` exits 1 if a part is stale.
"""

from __future__ import annotations

import sys
from fractions import Fraction
from typing import Any, get_args

import yaml
from pages import DOCS, EVIDENCE, fill, main, table
from shown_schedule import Shown, plan_text

from pipeproof.comm.channel_models import MODELS
from pipeproof.comm.lower import lower
from pipeproof.schedule.kinds import SCHEDULE_KINDS
from pipeproof.sim.outcome import SimulationError
from pipeproof.sim.simulate import simulate
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.specs.plan import PlanSpec
from pipeproof.specs.transport import RecvOrder
from pipeproof.verify.schedule_verdict import Outcome, check_schedule

POSTS: tuple[RecvOrder, ...] = get_args(RecvOrder)
MEASURED = {2: (342, 377), 4: (408, 463)}
"""Milliseconds of a step just in time and one operation early, by number of ranks: 1F1B, 8 micro-batches, H200s."""
SLOWDOWNS = (Fraction(14, 100), Fraction(24, 100))
"""Slowdown of a whole block, and of a product."""


def verdicts_part() -> str:
    """Table of the verdict for each kind of schedule and each order of receives."""
    rows = []
    for kind in SCHEDULE_KINDS.values():
        plan = yaml.safe_load(plan_text(Shown(kind)))
        rows.append(
            (f"[`{kind.name}`](../../docs/schedules.md#{kind.name})", *(_verdict(plan, post) for post in POSTS))
        )
    return table(("schedule", *(f"`{post}`" for post in POSTS)), rows)


def _verdict(plan: dict[str, Any], recv_order: RecvOrder) -> str:
    verdict = check_schedule(plan_from_dict({**plan, "transport": {"recv_order": recv_order}}))
    if verdict.outcome is Outcome.CONDITIONAL:
        return f"{len(verdict.failing)} of {len(MODELS)}"
    assert verdict.outcome is Outcome.ROBUST, verdict.reason
    return "robust"


def fifos_part() -> str:
    """Table of steps where channels share a FIFO, by schedule and order of receives."""
    queues = ("directed_edge", "pair", "rank")
    rows = [
        (f"`{kind}`", f"`{post}`", *(_shared(kind, post, queue) for queue in queues))
        for kind in ("gpipe", "1f1b")
        for post in POSTS
    ]
    return table(("schedule", "`recv_order`", *(f"`queue: {queue}`" for queue in queues)), rows)


def _shared(kind: str, recv_order: RecvOrder, queue: str) -> str:
    plan = _plan(4, kind, {"recv_order": recv_order, "queue": queue}, {"p2p": "backend", "p2p_latency_us": 50})
    try:
        return f"{float(simulate(lower(plan)).makespan):g}"
    except SimulationError:
        return "hangs"


def steps_part() -> str:
    """Table of the measured and simulated slowdown of a 1F1B step with early receives."""
    header = ("ranks", "measured", *(f"`prefetch_one`, {float(s):g}" for s in SLOWDOWNS),
              *(f"`send_order`, {float(s):g}" for s in SLOWDOWNS))  # fmt: skip
    rows = []
    for num_ranks, (just_in_time, early) in MEASURED.items():
        usual = _step(num_ranks, "just_in_time", SLOWDOWNS[0])
        longer = [_step(num_ranks, post, s) / usual for post in ("prefetch_one", "send_order") for s in SLOWDOWNS]
        rows.append(
            (str(num_ranks), *(f"{float(100 * (r - 1)):.1f} %" for r in (Fraction(early, just_in_time), *longer)))
        )
    return table(header, rows)


def _step(num_ranks: int, recv_order: RecvOrder, slowdown: Fraction) -> Fraction:
    return simulate(
        lower(_plan(num_ranks, "1f1b", {"recv_order": recv_order}, {"recv_slowdown": str(slowdown)}))
    ).makespan


def _plan(num_ranks: int, kind: str, transport: dict[str, Any], cost: dict[str, Any]) -> PlanSpec:
    """Return a plan with eight micro-batches and equal stages."""
    data = {
        "pipeproof": 1,
        "model": {"kind": "gpt", "num_layers": num_ranks, "hidden_size": 64, "num_heads": 4, "ffn_size": 128,
                  "vocab_size": 256, "seq_length": 32},
        "topology": {"pp": num_ranks},
        "schedule": {"kind": kind, "num_micro_batches": 8, "micro_batch_size": 1},
        "transport": transport,
        "cost": {"forward_us": 100, "backward_us": 200, **cost},
    }  # fmt: skip
    return plan_from_dict(data).spec


if __name__ == "__main__":
    parts = {
        DOCS / "deadlock.md": {"fifos": fifos_part()},
        EVIDENCE / "receives.md": {"verdicts": verdicts_part(), "steps": steps_part()},
    }
    sys.exit(main("validation/pages/make_receives.py", {page: fill(page, made) for page, made in parts.items()}))
