"""Schedules by themselves: robust, conditional or wrong, with the reason."""

from dataclasses import replace

import pytest

from pipeproof.comm.channel_models import MODELS
from pipeproof.comm.generated_schedule import sample_plan
from pipeproof.diagnostics.finding import Finding, Severity
from pipeproof.diagnostics.source import PlanFileError
from pipeproof.schedule.formats.read_schedule import write_schedule
from pipeproof.schedule.kinds import SCHEDULE_KINDS, Request
from pipeproof.verify.schedule_verdict import Outcome, check_schedule


def verdict(kind, p=4, m=8, **options):
    return check_schedule(sample_plan(kind, p, m, num_chunks=SCHEDULE_KINDS[kind].min_chunks, **options))


def test_gpipe_is_robust():
    found = verdict("gpipe")
    assert (found.outcome, found.failing, found.errors) == (Outcome.ROBUST, (), ())
    assert found.reason == f"no deadlock under any of {len(MODELS)} channel models"


def test_1f1b_is_conditional_and_the_models_are_named():
    found = verdict("1f1b")
    assert found.outcome is Outcome.CONDITIONAL
    assert {model.queue for model in found.failing} == {"device", "rank", "pair"}
    assert f"deadlocks under {len(found.failing)} of {len(MODELS)} channel models: one FIFO per " in found.reason
    assert found.backend in found.reason


@pytest.mark.parametrize("kind", SCHEDULE_KINDS)
def test_every_kind_is_right_on_the_smallest_plan(kind):
    assert verdict(kind).errors == ()


def test_errors_outweigh_all_else():
    wrong = replace(
        verdict("1f1b"), errors=(Finding("PP401", Severity.ERROR, "m"), Finding("PP402", Severity.ERROR, "n"))
    )
    assert wrong.outcome is Outcome.WRONG
    assert wrong.reason == "PP401: m; PP402: n"


def test_the_sample_plan_has_a_layer_for_each_stage_and_unit_costs():
    spec = sample_plan("seq1f1b", 3, 2, num_sequence_splits=3, cost={"forward_us": "1/3"}, variant=None).spec
    assert spec.model.num_layers == 3
    assert spec.model.seq_length % 3 == 0
    assert (str(spec.cost.forward_us), spec.cost.backward_input_us, spec.cost.backward_weight_us) == ("1/3", 1, 1)
    assert spec.schedule.variant is None
    with pytest.raises(PlanFileError):
        sample_plan("1f1b", 0, 2)


ON_ONE_RANK = [kind for kind in SCHEDULE_KINDS.values() if kind.placement != "both_ways" and not kind.splits_sequences]


@pytest.mark.parametrize("kind", ON_ONE_RANK, ids=lambda kind: kind.name)
def test_transfers_in_pytorchs_order_are_robust_in_every_schedule(kind, tmp_path, monkeypatch):
    """Receives are in the order of their sends: no two transfers cross, under any model."""
    monkeypatch.chdir(tmp_path)
    variant = kind.variants[0] if kind.variants else None
    for p, m in ((2, 4), (4, 8)):
        schedule = kind.generate(Request(p, m, kind.min_chunks, variant=variant))
        (tmp_path / "s.csv").write_text(write_schedule(schedule, "csv-comms"))
        plan = sample_plan("file", p, m, num_chunks=kind.min_chunks, path="s.csv", format="csv-comms")
        assert check_schedule(plan).outcome is Outcome.ROBUST
