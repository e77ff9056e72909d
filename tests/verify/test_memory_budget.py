"""The memory budget: ranks over it, the time, the parts, and changes that fit."""

import itertools
import json
import re

import pytest

from pipeproof.analysis.tune.search_layouts import tune
from pipeproof.cli import main as cli
from pipeproof.sim.memory_curve import GIB
from pipeproof.sim.simulate import simulate
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.verify import memory_peak
from pipeproof.verify.check_plan import check, check_graph
from tests.plans import plan_dict


def checked(budget, **sections):
    memory = {"budget_gib": budget / GIB, **sections.pop("memory", {})}
    report = check(plan_from_dict(plan_dict(memory=memory, **sections)))
    return [finding for finding in report.findings if finding.code.startswith("PP7")]


def peak(**sections):
    loaded = plan_from_dict(plan_dict(**sections))
    return max(curve.peak for curve in simulate(check(loaded).subject.plan).memory)


@pytest.mark.parametrize("sections", [{}, {"schedule": {"kind": "zb_h1"}}, {"topology": {"tp": 2, "dp": 2}}])
def test_a_plan_fits_its_own_peak_and_nothing_less(sections):
    assert checked(peak(**sections), **sections) == []
    (found,) = checked(peak(**sections) - 1, **sections)
    assert (found.code, found.severity) == ("PP701", "error")


def test_without_a_budget_nothing_is_simulated(monkeypatch):
    def refuse(*_):
        raise AssertionError("simulated")

    monkeypatch.setattr(memory_peak, "simulate", refuse)
    assert check(plan_from_dict(plan_dict())).errors == ()


def on_h100(**sections):
    """A plan whose states alone, 12 of 405B's blocks on two ranks, pass the 80 GiB of its device."""
    model = {"num_layers": 12, "hidden_size": 16384, "num_heads": 128, "num_kv_heads": 8, "ffn_size": 53248}
    return {"model": model, "cost": {"analytic": {"device": "h100", "dtype": "bfloat16"}}, **sections}


def test_a_plan_over_the_memory_of_its_device_is_a_warning():
    sections = on_h100()
    (found,) = [f for f in check(plan_from_dict(plan_dict(**sections))).findings if f.code.startswith("PP7")]
    assert (found.code, found.severity) == ("PP703", "warning")
    most = peak(**sections)
    assert most > 80 * GIB
    assert f"holds {most / GIB:.0f} GiB at " in found.message
    assert "`h100` has 80.0 GiB: " in found.message
    assert "`memory.budget_gib: 80`" in found.help


def test_a_budget_takes_the_place_of_the_memory_of_the_device():
    (found,) = checked(80 * GIB, **on_h100())
    assert found.code == "PP701"
    assert checked(2**20 * GIB, **on_h100()) == []


def test_a_small_plan_on_a_device_has_no_warning():
    cost = {"analytic": {"device": "h100", "dtype": "bfloat16"}}
    assert [f for f in check(plan_from_dict(plan_dict(cost=cost))).findings if f.code.startswith("PP7")] == []


def test_the_message_has_rank_time_and_parts():
    (found,) = checked(peak() - 1)
    assert found.message.startswith("rank 0 (pp 0) holds 150 KiB at 200 us, and `memory.budget_gib` is 150 KiB: ")
    assert found.message.endswith(
        "activations 57.8 KiB, optimizer 44.5 KiB, parameters 22.2 KiB, gradients 22.2 KiB, messages 3.00 KiB"
    )


def suggested(text):
    """The plan's sections with the changes of one suggestion, and the size that it names."""
    sections = {}
    for section, key, value in re.findall(r"`(\w+)\.(\w+): (\w+)`", text):
        sections.setdefault(section, {})[key] = value
    number, unit = re.search(r"needs ([\d.]+) (\w+)", text).groups()
    return sections, float(number) * 1024 ** ["B", "KiB", "MiB", "GiB"].index(unit)


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "zb_h2", "eager_1f1b"])
def test_what_the_help_says_fits_does_fit(kind):
    base = {"schedule": {"kind": kind, "num_micro_batches": 8}, "topology": {"dp": 2}}
    budget = 0.8 * peak(**base)
    (found,) = checked(budget, **base)
    for text in found.help.split("; "):
        sections, size = suggested(text)
        merged = {name: {**base.get(name, {}), **sections.get(name, {})} for name in {*base, *sections}}
        assert peak(**merged) == pytest.approx(size, rel=0.01)
        assert peak(**merged) <= budget


def test_every_smallest_set_of_changes_that_fits_is_suggested():
    """All sets of three changes are tried; in one of the cases two of them together replace the third."""
    changes = {"memory.recompute": "full", "memory.shard_optimizer": "dp", "schedule.kind": "1f1b"}

    def plan(*chosen):
        sections = {"schedule": {"kind": "gpipe", "num_micro_batches": 2}, "topology": {"dp": 2}, "memory": {}}
        for change in chosen:
            section, key = change.split(".")
            sections[section][key] = changes[change]
        return sections

    subsets = [frozenset(chosen) for num in range(4) for chosen in itertools.combinations(changes, num)]
    peaks = {chosen: peak(**plan(*chosen)) for chosen in subsets}
    suggestions = []
    for budget in sorted(peaks.values())[:-1]:
        fitting = [chosen for chosen in subsets if peaks[chosen] <= budget]
        smallest = {chosen for chosen in fitting if not any(other < chosen for other in fitting)}
        (found,) = checked(budget, **plan())
        suggestions.append({frozenset(re.findall(r"`([\w.]+): \w+`", text)) for text in found.help.split("; ")})
        assert suggestions[-1] == smallest
    assert {frozenset({"memory.recompute"}), frozenset({"memory.shard_optimizer", "schedule.kind"})} in suggestions


@pytest.mark.parametrize(
    ("tp", "activations", "is_suggested"), [(2, "keep", True), (2, "regather", False), (1, "keep", False)]
)
def test_to_gather_again_is_suggested_where_it_is_not_done(tp, activations, is_suggested):
    base = {"topology": {"tp": tp, "sequence_parallel": True}, "memory": {"sequence_parallel_activations": activations}}
    (found,) = checked(peak(**base) - 1, **base)
    assert ("`memory.sequence_parallel_activations: regather`" in found.help) == is_suggested


def test_where_nothing_fits_the_help_says_what_comes_nearest():
    (found,) = checked(1000, topology={"dp": 2})
    text = (
        "use more pipeline or tensor parallel ranks, or smaller micro-batches: even with `memory.recompute: full` and "
    )
    assert found.help.startswith(text + "`memory.shard_optimizer: dp` it needs ")


def test_where_nothing_more_can_be_changed_there_is_only_the_advice():
    (found,) = checked(1000, memory={"recompute": "full"})
    assert found.help == "use more pipeline or tensor parallel ranks, or smaller micro-batches"


def test_a_step_that_never_ends_is_not_checked():
    programs = [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]
    (found,) = checked(1e9, schedule={"kind": "custom", "num_micro_batches": 2, "programs": programs})
    assert (found.code, found.severity) == ("PP702", "warning")


def test_the_finding_is_at_the_budget(tmp_path, invoke):
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(plan_dict(memory={"budget_gib": 0.0001}), indent=1))
    result = invoke("check", plan)
    assert result.exit_code == 1
    line = next(i for i, text in enumerate(plan.read_text().splitlines(), 1) if "budget_gib" in text)
    assert f"plan.json:{line}:" in result.output


def test_tune_keeps_to_the_budget():
    """Every row is checked, and one that needs more is not listed."""
    plan = plan_dict(schedule={"kind": "1f1b", "num_micro_batches": 8}, topology={"pp": 4}, cost={"backward_us": 200})
    most = max(row.peak_gib * GIB for row in tune(plan_from_dict(plan)).rows)
    budget = (peak(schedule=plan["schedule"], topology=plan["topology"]) + most) / 2
    kept = tune(plan_from_dict({**plan, "memory": {"budget_gib": budget / GIB}}))
    assert kept.counts.refused["PP701"] > 0
    assert kept.rows
    assert all(row.peak_gib * GIB <= budget for row in kept.rows)


@pytest.fixture
def invoke():
    from click.testing import CliRunner

    return lambda *arguments: CliRunner().invoke(cli.main, [str(argument) for argument in arguments])


def test_a_graph_without_a_plan_has_no_memory_to_compare():
    graph = check(plan_from_dict(plan_dict())).subject.graph
    report = check_graph(graph)
    assert report.subject.lowered is None
    assert not [finding for finding in report.findings if finding.code.startswith("PP7")]
