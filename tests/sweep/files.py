"""Sweeps of a small plan for tests."""

import json
import os
import signal

from pipeproof.analysis.sweep.evaluate_point import evaluate
from pipeproof.analysis.sweep.sweep_points import sweep_of_plan
from tests.plans import plan_dict


def write_plan(folder, **sections):
    path = folder / "base.json"
    path.write_text(json.dumps(plan_dict(**sections)))
    return path


def sweep_of(folder, values, **sections):
    return sweep_of_plan(plan_dict(**sections), str(write_plan(folder, **sections)), values)


def axes(values):
    return [word for key, items in values.items() for word in ("--set", f"{key}={json.dumps(items)}")]


def dies_at_four(point, plan_file):
    """Evaluate a point, except that with four micro-batches the process is killed, as it is when memory runs out."""
    if point.settings.get("schedule.num_micro_batches") == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return evaluate(point, plan_file)


def dies_once(point, plan_file):
    """Evaluate a point; the first process that comes here is killed."""
    from pathlib import Path

    mark = Path(plan_file).with_suffix(".died")
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return evaluate(point, plan_file)


def raises_at_four(point, plan_file):
    if point.settings.get("schedule.num_micro_batches") == 4:
        raise RuntimeError("four")
    return evaluate(point, plan_file)
