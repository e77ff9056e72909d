"""The simulated figures of the pages on pairs match the simulator."""

from pathlib import Path

import pytest
import yaml

from pipeproof.comm.lower import lower
from pipeproof.sim.simulate import simulate
from pipeproof.specs.load_plan import plan_from_dict
from tests.sim.test_overlap_parts import step_us

ROOT = Path(__file__).parents[2]
PAGE = "".join((ROOT / name / "overlap.md").read_text(encoding="utf-8") for name in ("docs", "validation/results"))


def rows(heading):
    """The cells of the table with this first heading, without backquotes."""
    lines = PAGE[PAGE.index(f"| {heading} |") :].split("\n\n")[0].splitlines()[2:]
    assert lines
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]


def step_of_example(**schedule):
    """The step of the example as the page has it, with other keys of the schedule; None removes one."""
    data = yaml.safe_load((ROOT / "examples" / "moe_overlap.yaml").read_text(encoding="utf-8"))
    merged = {**data["schedule"], **schedule}
    data["schedule"] = {key: value for key, value in merged.items() if value is not None}
    simulation = simulate(lower(plan_from_dict(data).spec))
    return f"{float(simulation.makespan) / 1000:.1f} ms"


@pytest.mark.parametrize(("overlap", "step"), rows("`schedule.overlap`"))
def test_steps_of_the_example(overlap, step):
    assert step_of_example(overlap=yaml.safe_load(overlap)) == step


@pytest.mark.parametrize(("schedule", "without", "step"), rows("`schedule`"))
def test_steps_of_the_example_with_other_schedules(schedule, without, step):
    keys = {"variant": None, "num_chunks": None, **yaml.safe_load(schedule)}
    assert (step_of_example(**keys, overlap="none"), step_of_example(**keys)) == (without, step)


@pytest.mark.parametrize(("size", "dispatcher", "execution", "ratio", "measured"), rows("sequences of a micro-batch"))
def test_ratios_next_to_measured_ones(size, dispatcher, execution, ratio, measured):
    sections = {"micro_batch_size": int(size), "dispatcher": dispatcher}
    sections["num_micro_batches"] = 8 * int(size)
    cost = {"analytic": {"device": "h200", "execution": execution}}
    pairs = step_us({**cost, "collective_slowdown": 0.23}, "pairs", **sections)
    found = float(pairs / step_us(cost, "none", **sections))
    assert f"{found:.2f}" == ratio
    assert (found < 1) == (float(measured.split()[0]) < 1)
