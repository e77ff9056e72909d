"""Proposals on a plan's own ranks are better, verified, within the limit, and truly described."""

from fractions import Fraction
from functools import cache

import pytest
import yaml

from pipeproof.analysis.sweep.evaluate_point import Status
from pipeproof.analysis.tune import search_layouts
from pipeproof.analysis.tune.present_step import Cause, TuneError, idle_parts, largest_part
from pipeproof.analysis.tune.search_layouts import MAX_REFUSED, tune
from pipeproof.analysis.tune.tune_text import change_lines
from pipeproof.comm.generated_schedule import plan_schedule, stage_costs
from pipeproof.comm.lower import lower
from pipeproof.schedule.programs import asap
from pipeproof.sim.simulate import simulate
from pipeproof.specs.load_plan import LoadedPlan, plan_from_dict
from pipeproof.verify.check_plan import check
from tests.comm.test_overlap_pairs import plan as paired_plan
from tests.plans import plan_dict
from tests.tune.plans import four_ranks, loaded


def tuned(data, *kinds, **options):
    """The search of a plan, of some kinds of schedules if there are any."""
    fix = {**options.pop("fix", {}), **({"schedule": kinds} if kinds else {})}
    return tune(loaded(data), fix=fix, **options)


def steps(result):
    """The microseconds of each row, by its kind and chunks."""
    return {(row.layout.kind, row.layout.vpp): row.step * 10**6 for row in result.rows}


def test_1f1b_may_become_zb_h1_by_its_closed_form():
    """(m + p - 1)(f + b) = 33 becomes m(f + i + w) + (p - 1)f = 27."""
    result = tuned(four_ranks(), "1f1b", "zb_h1")
    assert result.present.step_us == 33
    assert steps(result) == {("zb_h1", 1): 27}
    assert result.rows[0].why == "bubble -6 us"
    changes = change_lines(result.present.spec.model_dump(mode="json", exclude_unset=True), result.rows[0].plan)
    assert changes == ["schedule:", "  kind: zb_h1"]


def test_the_memory_limit_of_the_plan_is_kept():
    """Interleaved by two takes 57 half steps and holds eleven half activations."""
    data = four_ranks(num_layers=8, kind="interleaved", num_chunks=2)
    free, limited = tuned(data), tuned({**data, "schedule": {**data["schedule"], "memory_limit": 9}})
    assert free.present.step_us == 57
    assert free.present.figures.peak == 11
    assert limited.counts.over_memory > free.counts.over_memory == 0
    assert all(row.plan["schedule"]["memory_limit"] in (4, 9) for row in limited.rows)


def test_what_is_faster_with_more_memory_and_slower_with_less_are_both_listed():
    result = tuned(four_ranks(cost={"p2p_latency_us": 1}), "1f1b", "zb_h1", "zb_h2")
    assert steps(result) == {("zb_h2", 1): 30, ("zb_h1", 1): 41}
    assert result.rows[0].peak_gib > result.rows[1].peak_gib


def test_a_plan_over_its_limit_is_told_what_fits_though_it_is_slower():
    data = four_ranks(kind="gpipe", memory_limit=4, cost={"p2p_latency_us": 1})
    result = tuned(data, "gpipe", "1f1b", "zb_h1")
    assert (result.present.step_us, result.present.figures.peak) == (39, 8)
    assert steps(result)["zb_h1", 1] == 41
    assert "gpipe" not in {row.layout.kind for row in result.rows}


def test_the_slow_stages_rank_is_named():
    present = tuned(four_ranks(cost={"forward_us": [1, 1, 4, 1]}), "1f1b").present
    assert largest_part(idle_parts(present.figures, present.path)) is Cause.OVERLOAD
    assert present.why == "Rank 2 is critical: it computes for 48 us, 18 us more than the ranks do on average."


def test_in_even_stages_the_rank_between_warm_up_and_cool_down_is_named():
    assert tuned(four_ranks(), "1f1b").present.why == (
        "Rank 3 is critical: the critical path computes there for 24 us, after a warm-up of 3 us and before a "
        "cool-down of 6 us."
    )


def test_where_messages_rule_an_edge_is_named_and_eager_1f1b_saves_them():
    """1F1B waits for 2c[(p - 1) + floor((m - 1)(p - 1) / p)], and eager 1F1B, where 2c <= f + b, for 2c(p - 1)."""
    result = tuned(four_ranks(cost={"p2p_latency_us": "3/2"}), "gpipe", "1f1b", "eager_1f1b")
    present = result.present
    assert largest_part(idle_parts(present.figures, present.path)) is Cause.MESSAGES
    assert present.step_us == 33 + 3 * (3 + 5)
    assert present.why == (
        "Messages are critical: the critical path waits 24 us for them, longest on the edge from rank 1 to rank 2 "
        "(4.5 us)."
    )
    assert steps(result) == {("eager_1f1b", 1): 33 + 3 * 3}
    assert result.rows[0].why == "exposed communication -15 us"


PLANS = {
    "even": four_ranks(num_layers=8, micro_batch_size=2, cost={"p2p_latency_us": "1/3"}),
    "uneven": four_ranks(num_layers=8, cost={"forward_us": [2, 1, 1, 3], "backward_input_us": "5/3"}),
    "rendezvous": four_ranks(num_layers=8, cost={"p2p_latency_us": 1, "p2p": "rendezvous"}),
    "interleaved": four_ranks(num_layers=8, kind="interleaved", num_chunks=2, num_micro_batches=4),
    "tensor_parallel": plan_dict(topology={"tp": 2, "sequence_parallel": True}, schedule={"num_micro_batches": 3}),
}


@cache
def searched(name):
    """The search on one of the plans with other micro-batches and splits, made once."""
    return tuned(PLANS[name], fix={"mbs": (1, 2), "splits": (1, 2)}, top=4)


@pytest.mark.parametrize("name", PLANS)
def test_rows_pass_their_check_and_take_the_time_that_is_said(name):
    result = searched(name)
    assert result.rows
    for row in result.rows:
        spec = plan_from_dict(row.plan).spec
        report = check(LoadedPlan(spec))
        assert not report.errors
        assert (row.deadlocks_with is not None) == ("PP411" in {finding.code for finding in report.findings})
        assert simulate(lower(spec)).makespan == row.step * 10**6
        assert sum(row.parts_s.values()) == pytest.approx(row.step_s)


@pytest.mark.parametrize("name", PLANS)
def test_the_change_makes_the_row_of_the_plan(name):
    """The lines are laid over the plan as a person would do it."""
    result = searched(name)
    for row in result.rows:
        changed = {section: dict(v) if isinstance(v, dict) else v for section, v in PLANS[name].items()}
        changes = change_lines(result.present.spec.model_dump(mode="json", exclude_unset=True), row.plan)
        for line in changes:
            if not line.startswith("# remove "):
                continue
            section, _, name_ = line.removeprefix("# remove ").partition(".")
            if name_:
                del changed[section][name_]
            else:
                del changed[section]
        for section, values in yaml.safe_load("\n".join(changes)).items():
            changed.setdefault(section, {}).update(values)
        assert loaded(changed).spec == plan_from_dict(row.plan).spec


@pytest.mark.parametrize("name", PLANS)
def test_rows_are_in_order_and_each_holds_less_than_those_before_it(name):
    result = searched(name)
    times, peaks = [row.step for row in result.rows], [row.peak_gib for row in result.rows]
    assert times == sorted(times)
    assert times[-1] * 10**6 <= result.present.step_us
    assert peaks == sorted(set(peaks), reverse=True)


def test_for_a_schedule_that_never_ends_others_are_listed():
    programs = [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]
    data = plan_dict(schedule={"kind": "custom", "programs": programs, "num_micro_batches": 2, "micro_batch_size": 2})
    result = tuned(data)
    assert (result.present.step_us, result.present.errors) == (None, ("PP401",))
    assert result.rows[0].layout.num_micro_batches == 2


def test_an_error_that_no_schedule_mends_ends_the_search():
    data = plan_dict(topology={"tp": 2, "sequence_parallel": True}, transport="partial")
    result = tuned(data, fix={"mbs": (1, 2, 4), "splits": (1, 2, 4)}, top=50)
    assert result.present.errors == ("PP201",)
    assert result.rows == ()
    assert result.counts.refused["PP201"] > 0
    assert result.counts.checked <= MAX_REFUSED + 50


def test_a_row_that_fails_its_check_is_dropped_and_counted(monkeypatch):
    checked = search_layouts.check_layout

    def strict(point, plan_file):
        result = checked(point, plan_file)
        if point.plan["schedule"]["kind"] == "zb_h1":
            return type(result)(point.id, {}, Status.REFUSED, code="PP201", message="refused here")
        return result

    monkeypatch.setattr(search_layouts, "check_layout", strict)
    result = tuned(four_ranks(), "zb_h1", "zb_h2", "chimera")
    assert result.counts.refused == {"PP201": 1}
    assert "zb_h1" not in {row.layout.kind for row in result.rows}


def test_a_plan_that_only_runs_forwards_is_refused():
    programs = [["0F0"], ["1F0"]]
    data = plan_dict(schedule={"kind": "custom", "programs": programs, "num_micro_batches": 1, "micro_batch_size": 2})
    with pytest.raises(TuneError, match="no backward"):
        tuned(data)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"device": "h100"}, "go with `gpus`"),
        ({"global_batch": 8}, "go with `gpus`"),
        ({"framework": "megatorn"}, "did you mean megatron"),
        ({"fix": {"tp": [1]}}, "known are vpp, mbs, splits, schedule, overlap"),
        ({"top": 0}, "at least 1"),
    ],
)
def test_options_that_do_not_go_with_the_plans_ranks_are_refused(options, text):
    with pytest.raises(TuneError, match=text):
        tune(loaded(four_ranks()), **options)


def test_a_plan_whose_sends_cross_in_one_fifo_is_told_what_ends():
    data = four_ranks(cost={"p2p": "backend"})
    data["transport"] = {"queue": "pair"}
    result = tuned(data, "1f1b", "gpipe")
    assert (result.present.step_us, result.present.errors) == (None, ("PP401",))
    assert {row.layout.kind for row in result.rows} == {"gpipe"}


def test_the_listed_times_are_exact():
    result = tuned(four_ranks(cost={"forward_us": "1/3", "backward_input_us": "1/7"}), "zb_h1", "zb_h2")
    spec = plan_from_dict(result.rows[0].plan).spec
    assert result.rows[0].step * 10**6 == asap(plan_schedule(spec), stage_costs(spec)).makespan
    assert isinstance(result.rows[0].step, Fraction)


def test_what_cannot_sum_early_is_refused():
    """Every stage of DualPipe and Chimera has copies; whether sums can come early shows when a plan is lowered."""
    data = four_ranks(reduce_gradients="when_ready")
    data["topology"]["dp"] = 2
    result = tuned(data, "1f1b", "zb_h1", "dualpipe", "chimera")
    assert {row.layout.kind for row in result.rows} == {"zb_h1"}
    assert sum(result.counts.refused.values()) == 2


def test_only_the_framework_that_the_plan_names_unless_any_is_asked_for():
    data = four_ranks(num_layers=8, kind="interleaved", num_chunks=2)
    data["schedule"]["variant"] = "megatron"
    own, every = (tune(loaded(data), top=50, framework=framework) for framework in (None, "any"))
    assert (own.framework, every.framework) == ("megatron", "any")
    assert own.counts.tried < every.counts.tried
    assert {row.layout.kind for row in own.rows} <= {"1f1b", "interleaved"}


def test_the_backend_of_runs_is_no_framework_for_every_schedule_runs_on_it():
    assert tune(loaded(four_ranks(num_layers=8) | {"run": {"backend": "torch"}}), top=1).framework == "any"


SLOW = {"ranks_per_node": 8, "node": {"latency_us": 2, "bandwidth": 0.1}}


def test_pairs_that_make_a_step_slower_are_left_out():
    """With few micro-batches a backward of the last rank waits for a long forward of the first."""
    times = {"forward_us": [8000, 1000], "backward_input_us": [4000, 2000], "backward_weight_us": [5000, 1000]}
    network = {**SLOW, "node": {"latency_us": 2, "bandwidth": 1}}
    plan = paired_plan(
        schedule={"kind": "1f1b", "num_micro_batches": 2, "overlap": "pairs"}, cost={**times, "network": network}
    )
    result = tune(plan, fix={"schedule": ["1f1b"]})
    assert [row.layout.overlap for row in result.rows] == ["none"]
    assert result.rows[0].step * 10**6 < result.present.step_us


def test_pairs_are_listed_where_they_save_time():
    times = {"forward_us": 300, "backward_input_us": 300, "backward_weight_us": 100, "network": SLOW}
    schedule = {"kind": "interleaved", "num_chunks": 2, "variant": "megatron", "num_micro_batches": 8}
    result = tune(paired_plan(schedule=schedule, cost=times), fix={"schedule": ["interleaved"]})
    assert result.rows[0].plan["schedule"]["overlap"] == "pairs"
    assert result.rows[0].step * 10**6 < result.present.step_us
