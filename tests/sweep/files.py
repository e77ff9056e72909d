"""Sweep files for tests, next to a small base plan."""

import json
import os
import signal
import time

from pipeproof.analysis.sweep.evaluate_point import evaluate
from pipeproof.analysis.sweep.sweep_file import load_sweep
from tests.plans import plan_dict


def write_sweep(folder, content, **sections):
    """A sweep file of this content (text or data) whose plan is the base plan with these sections; its path."""
    (folder / "base.json").write_text(json.dumps(plan_dict(**sections)))
    path = folder / "sweep.yaml"
    path.write_text(content if isinstance(content, str) else json.dumps({"plan": "base.json", **content}))
    return path


def sweep_of(folder, **content):
    return load_sweep(write_sweep(folder, content))


def tune_command(folder):
    """A small search: the words of the command, without those that select where layouts are simulated."""
    cost = {"analytic": "h100"}
    (folder / "tuned.json").write_text(json.dumps(plan_dict(cost=cost)))
    options = ("--gpus", "4", "--global-batch", "8", "--top", "2", "--fix", "tp=1", "--format", "json")
    return ("tune", folder / "tuned.json", *options)


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


def sleeps(point, plan_file):
    """Evaluate a point, except that more than three micro-batches take minutes."""
    if point.settings["schedule.num_micro_batches"] > 3:
        time.sleep(600)
    return evaluate(point, plan_file)
