"""What ``pipeproof show PLAN --memory`` does."""

from __future__ import annotations

from pathlib import Path

from pipeproof.commands.line import console_for, refusing_bad_plans


def show_memory(plan: Path) -> None:
    """Print what each stage of a plan holds."""
    with refusing_bad_plans("text", plan):
        from pipeproof.comm.loaded import blaming_plan, lower_loaded
        from pipeproof.sim.memory.show import render_stage_memory
        from pipeproof.specs.load import load_plan

        loaded = load_plan(plan)
        with blaming_plan(loaded):
            lowered = lower_loaded(loaded)
    render_stage_memory(lowered, console_for())
