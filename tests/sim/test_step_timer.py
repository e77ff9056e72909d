"""One graph, timed with several durations."""

import re
from dataclasses import replace
from pathlib import Path

from pipeproof.comm.channel_models import ChannelModel
from pipeproof.sim.op_durations import durations_of
from pipeproof.sim.simpy_model import run_model
from pipeproof.sim.simulate import StepTimer, channel_model_of, simulate
from tests.plans import subject

COST = {"forward_us": 100, "backward_us": 200}


def test_the_durations_of_a_plan_have_its_step_time():
    plan = subject(topology={"pp": 4}, cost=COST).plan
    timer = StepTimer(plan.graph, channel_model_of(plan, None), 2)
    durations = durations_of(plan)
    assert timer.makespan(durations) == simulate(plan).makespan
    assert timer.makespan(replace(durations, ticks=tuple(2 * t for t in durations.ticks))) == (
        2 * simulate(plan).makespan
    )


def test_bounded_channels_are_timed_by_the_reference_model():
    plan = subject(topology={"pp": 2}, cost=COST | {"p2p_latency_us": 5}).plan
    model, durations = ChannelModel("directed_edge", "eager", eager_bytes=1), durations_of(plan)
    outcome = run_model(plan.graph, durations, model)
    assert StepTimer(plan.graph, model, 1).makespan(durations) * durations.ticks_per_us == max(outcome.ends)


def test_the_example_of_the_page(monkeypatch):
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    page = (root / "docs" / "simulating.md").read_text(encoding="utf-8")
    (code,) = [code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "StepTimer" in code]
    exec(code, {})
