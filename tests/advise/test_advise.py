"""What is listed is better, verified and within the limit; what is said about it is so."""

from fractions import Fraction
from functools import cache

import pytest
import yaml

from pipeproof.analysis.advise import candidates, search
from pipeproof.analysis.advise.advice_report import change_to
from pipeproof.analysis.advise.candidates import Candidates, Changed
from pipeproof.analysis.advise.reasons import Cause, caveats, idle_parts, why_better, why_now
from pipeproof.analysis.advise.search import Group, NoTrainingError, advise
from pipeproof.analysis.tune.frameworks import named_framework
from pipeproof.comm.lower import lower
from pipeproof.diagnostics.source import PlanFileError
from pipeproof.schedule.programs import asap
from pipeproof.sim.simulate import simulate
from pipeproof.specs.load_plan import LoadedPlan
from pipeproof.verify.check_plan import check
from tests.advise.plans import four_ranks, loaded
from tests.plans import plan_dict


def advice_on(data, memory_limit=None, **options):
    return advise(loaded(data), memory_limit, **options)


def listed(advice, *groups):
    return [verified for group in groups or Group for verified in advice.listed.get(group, ())]


def steps(advice, *groups):
    """What is listed: kind, chunks and micro-batches to its step and its peak."""
    return {
        (v.candidate.choice.kind, v.candidate.choice.num_chunks, v.candidate.choice.num_micro_batches): (
            v.candidate.figures.makespan_us,
            v.candidate.figures.peak,
        )
        for v in listed(advice, *groups)
    }


@pytest.fixture
def only(monkeypatch):
    """Leave only some kinds of schedules to be tried."""

    def leave(*names):
        kept = {name: candidates.SCHEDULE_KINDS[name] for name in names}
        monkeypatch.setattr(candidates, "SCHEDULE_KINDS", kept)

    return leave


def test_1f1b_may_become_zb_h1_by_its_closed_form():
    """(m + p - 1)(f + b) = 33 becomes m(f + i + w) + (p - 1)f = 27, with the same four activations."""
    advice = advice_on(four_ranks())
    assert advice.present.makespan_us == 33
    assert steps(advice, Group.BETTER)["zb_h1", 1, 8] == (27, 4)
    assert advice.best.candidate.figures.makespan_us <= 27
    best = next(v for v in listed(advice, Group.BETTER) if v.candidate.choice.kind == "zb_h1")
    assert why_better(advice, best) == ("zb_h1 saves 6 us of 33 (18.2 %): 6 us of filling and draining the pipeline.")
    assert change_to(advice, best).lines() == ["schedule:", "  kind: zb_h1"]


def test_interleaved_may_become_1f1b_with_the_memory_of_fewer_chunks():
    """Interleaved by two takes 57 half steps and holds eleven half activations."""
    data = four_ranks(num_layers=8, kind="interleaved", num_chunks=2)
    advice = advice_on(data, 9, with_over_limit=True)
    assert (advice.present.makespan_us, advice.present.peak) == (57, 11)
    assert all(verified.candidate.figures.peak <= 9 for verified in listed(advice, Group.BETTER, Group.RESIZED))
    assert all(verified.candidate.figures.peak > 9 for verified in listed(advice, Group.OVER_LIMIT))


def test_what_is_faster_with_more_memory_and_slower_with_less_are_both_listed(only):
    only("gpipe", "1f1b", "zb_h1", "zb_h2")
    advice = advice_on(four_ranks(cost={"p2p_latency_us": 1}))
    assert steps(advice) == {("zb_h2", 1, 8): (30, 7), ("zb_h1", 1, 8): (41, 4)}


def test_what_runs_side_by_side_is_named_as_a_gain(only):
    only("dualpipe_v")
    advice = advice_on(four_ranks(num_layers=8, cost={"overlapped_us": 2}))
    assert "us of computing, by what runs side by side" in why_better(advice, advice.best)
    assert advice.best.candidate.spec.cost.overlapped_us == 1


@pytest.mark.parametrize("limit", [2, 4, 7])
def test_the_memory_limit_is_kept(limit):
    advice = advice_on(four_ranks(num_layers=8, micro_batch_size=2), limit, with_over_limit=True)
    assert advice.candidates.room == limit * 4
    within = listed(advice, Group.BETTER, Group.COPIED, Group.RESIZED)
    assert within
    assert all(verified.candidate.figures.peak <= limit * 4 for verified in within)
    assert all(verified.candidate.figures.peak > limit * 4 for verified in listed(advice, Group.OVER_LIMIT))


def test_the_plans_own_limit_counts_and_the_option_is_stronger():
    data = four_ranks(memory_limit=4)
    assert advice_on(data).candidates.room == 4
    assert advice_on(data, 5).candidates.room == 5
    without = advice_on(four_ranks(), with_over_limit=True)
    assert without.candidates.room is None
    assert without.listed[Group.OVER_LIMIT] == ()
    assert Group.OVER_LIMIT not in advice_on(data).listed


def test_a_plan_over_its_limit_is_told_what_fits_though_it_is_slower(only):
    only("gpipe", "1f1b", "zb_h1")
    advice = advice_on(four_ranks(kind="gpipe", cost={"p2p_latency_us": 1}), 4)
    assert (advice.present.makespan_us, advice.present.peak) == (39, 8)
    assert steps(advice) == {("zb_h1", 1, 8): (41, 4)}
    assert why_better(advice, advice.best) == (
        "zb_h1 takes 2 us longer (5.1 %) and fits the memory limit: 8 us of filling and draining the pipeline, "
        "against 10 us more of waiting for messages."
    )


def test_the_slow_stages_rank_is_named():
    advice = advice_on(four_ranks(cost={"forward_us": [1, 1, 4, 1]}))
    assert idle_parts(advice.present, advice.path).largest is Cause.OVERLOAD
    assert why_now(advice.present, advice.path) == (
        "Rank 2 is critical: it computes for 48 us, 18 us more than the ranks do on average."
    )


def test_in_even_stages_the_rank_between_warm_up_and_cool_down_is_named():
    advice = advice_on(four_ranks())
    assert why_now(advice.present, advice.path) == (
        "Rank 3 is critical: the critical path computes there for 24 us, after a warm-up of 3 us and before a "
        "cool-down of 6 us."
    )


def test_where_messages_rule_an_edge_is_named_and_eager_1f1b_saves_them():
    """1F1B waits for 2c[(p - 1) + floor((m - 1)(p - 1) / p)], and eager 1F1B, where 2c <= f + b, for 2c(p - 1)."""
    advice = advice_on(four_ranks(cost={"p2p_latency_us": "3/2"}), top=1)
    assert idle_parts(advice.present, advice.path).largest is Cause.MESSAGES
    assert advice.present.makespan_us == 33 + 3 * (3 + 5)
    assert why_now(advice.present, advice.path) == (
        "Messages are critical: the critical path waits 24 us for them, longest on the edge from rank 1 to rank 2 "
        "(4.500 us)."
    )
    eager = next(c for c in _timed(advice) if c.choice.kind == "eager_1f1b" and c.choice.num_micro_batches == 8)
    assert eager.figures.makespan_us == 33 + 3 * 3


def test_eager_1f1b_is_recommended_of_those_with_whole_backwards(only):
    """Among the schedules that do not cut the backward in two, it is the one that hides messages in less memory."""
    only("gpipe", "1f1b", "eager_1f1b")
    advice = advice_on(four_ranks(cost={"p2p_latency_us": "3/2"}))
    assert advice.best.candidate.choice.kind == "eager_1f1b"
    assert why_better(advice, advice.best) == ("eager_1f1b saves 15 us of 57 (26.3 %): 15 us of waiting for messages.")
    assert "It needs more memory: 7 activations in place of 4." in caveats(advice, advice.best)


def _timed(advice):
    """Every candidate with its figures, listed or not."""
    found = search._Search(advice.candidates, advice.present, None)
    found.time_all()
    return found.timed


PLANS = {
    "even": four_ranks(num_layers=8, micro_batch_size=2, cost={"p2p_latency_us": "1/3"}),
    "uneven": four_ranks(num_layers=8, cost={"forward_us": [2, 1, 1, 3], "backward_input_us": "5/3"}),
    "rendezvous": four_ranks(num_layers=8, cost={"p2p_latency_us": 1, "p2p": "rendezvous"}),
    "interleaved": four_ranks(num_layers=8, kind="interleaved", num_chunks=2, num_micro_batches=4),
    "tensor_parallel": plan_dict(topology={"tp": 2, "sequence_parallel": True}, schedule={"num_micro_batches": 3}),
}


@cache
def advised(name):
    """Advice on one of the plans within nine activations, found once."""
    return advice_on(PLANS[name], 9, top=3, with_over_limit=True)


@pytest.mark.parametrize("name", PLANS)
def test_what_is_listed_passes_its_check_and_takes_the_time_that_is_said(name):
    advice = advised(name)
    assert listed(advice)
    for verified in listed(advice):
        plan = verified.candidate.spec
        report = check(LoadedPlan(plan))
        assert not report.errors
        assert bool(verified.failing) == ("PP411" in {finding.code for finding in report.findings})
        figures = verified.candidate.figures
        assert simulate(lower(plan)).makespan == figures.makespan_us == verified.path.makespan
        idle = idle_parts(figures, verified.path)
        assert idle.overload + idle.messages + idle.fill == figures.idle_us
        assert min(idle.overload, idle.messages, idle.fill) >= 0


@pytest.mark.parametrize("name", PLANS)
def test_the_change_makes_the_candidate_of_the_plan(name):
    """The lines are laid over the plan as a person would do it."""
    advice = advised(name)
    for verified in listed(advice):
        changed = {section: dict(v) if isinstance(v, dict) else v for section, v in PLANS[name].items()}
        change = change_to(advice, verified)
        for key in change.remove:
            section, _, name_ = key.partition(".")
            if name_:
                del changed[section][name_]
            else:
                del changed[section]
        lines = yaml.safe_load("\n".join(change.lines()))
        for section, values in lines.items():
            changed.setdefault(section, {}).update(values)
        assert loaded(changed).spec == verified.candidate.spec


@pytest.mark.parametrize("name", PLANS)
def test_lists_are_in_order_and_nothing_on_them_is_outdone(name):
    advice = advised(name)
    for group in (Group.BETTER, Group.COPIED, Group.RESIZED):
        times = [verified.candidate.figures.makespan_us for verified in listed(advice, group)]
        assert times == sorted(times)
        assert advice.present.peak > advice.candidates.room or all(t <= advice.present.makespan_us for t in times)
    assert all(not v.candidate.choice.num_sequence_splits > 1 for v in listed(advice, Group.BETTER))
    changes = advice.candidates.changes
    for one in listed(advice):
        for other in listed(advice):
            faster = one.candidate.figures.makespan_us < other.candidate.figures.makespan_us
            smaller = one.candidate.figures.peak <= other.candidate.figures.peak
            nearer = changes(one.candidate.choice) <= changes(other.candidate.choice)
            assert not (faster and smaller and nearer)


def test_each_group_asks_for_what_its_name_says():
    advice = advised("even")
    resizing = {Changed.MICRO_BATCHES, Changed.SPLITS}
    for verified in listed(advice, Group.BETTER):
        assert advice.candidates.changes(verified.candidate.choice) <= {Changed.CHUNKS}
    for verified in listed(advice, Group.RESIZED):
        assert advice.candidates.changes(verified.candidate.choice) & resizing
    for verified in listed(advice, Group.COPIED):
        assert Changed.COPIES in advice.candidates.changes(verified.candidate.choice)


def test_of_the_plans_own_schedule_nothing_is_advised_twice():
    advice = advice_on(four_ranks(kind="zb_h1"))
    assert ("zb_h1", 1, 8) not in steps(advice)
    assert all(time < 27 or peak < 4 for time, peak in steps(advice, Group.BETTER).values())


def test_one_rank_is_never_idle():
    advice = advice_on(plan_dict(topology={"pp": 1}, schedule={"micro_batch_size": 1}))
    assert advice.best is None
    assert why_now(advice.present, advice.path) == "No rank is ever idle."
    assert listed(advice) == []


def test_a_schedule_that_never_ends_is_advised_on():
    programs = [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]
    data = plan_dict(schedule={"kind": "custom", "programs": programs, "num_micro_batches": 2, "micro_batch_size": 2})
    advice = advice_on(data)
    assert advice.present is None
    assert advice.errors == ("PP401",)
    best = advice.best
    assert best.candidate.choice.num_micro_batches == 2
    assert why_better(advice, best).endswith("us; the plan's own schedule never ends.")


def test_an_error_that_no_schedule_mends_ends_the_search():
    data = plan_dict(topology={"tp": 2, "sequence_parallel": True}, transport="partial")
    advice = advice_on(data)
    assert advice.gave_up
    assert advice.errors == ("PP201",)
    assert advice.refused == {"PP201": search.MAX_REFUSED + 1}
    assert listed(advice) == []


def test_a_candidate_that_fails_its_check_is_dropped_and_counted(monkeypatch):
    real = search.check

    def strict(plan):
        return real(loaded(four_ranks_refused()) if plan.spec.schedule.kind == "zb_h1" else plan)

    monkeypatch.setattr(search, "check", strict)
    advice = advice_on(four_ranks())
    assert advice.refused["PP201"] >= 1
    assert "zb_h1" not in {kind for kind, _, _ in steps(advice)}


def four_ranks_refused():
    return {**four_ranks(), "topology": {"pp": 4, "tp": 2, "sequence_parallel": True}, "transport": "partial"}


def test_what_does_not_exist_is_counted_with_its_reason():
    advice = advice_on(four_ranks(num_micro_batches=2))
    assert sum(advice.impossible.values()) >= 1
    assert any("DualPipe" in reason for reason in advice.impossible)


def test_a_plan_that_only_runs_forwards_is_refused():
    programs = [["0F0"], ["1F0"]]
    data = plan_dict(schedule={"kind": "custom", "programs": programs, "num_micro_batches": 1, "micro_batch_size": 2})
    with pytest.raises(NoTrainingError, match="no backward"):
        advice_on(data)


def test_a_plan_that_cannot_be_lowered_is_refused():
    with pytest.raises(PlanFileError):
        advice_on(four_ranks(num_layers=3))


def test_a_plan_whose_sends_cross_in_one_fifo_is_told_what_ends(only):
    only("1f1b", "gpipe")
    data = four_ranks(cost={"p2p": "backend"})
    data["transport"] = {"queue": "pair"}
    found = advice_on(data)
    assert found.errors == ("PP401",)
    assert found.receives == ()
    assert found.present is None
    assert found.best is not None
    assert {verified.candidate.choice.kind for verified in listed(found, Group.BETTER)} == {"gpipe"}


def test_progress_is_told_and_comes_to_an_end():
    told = []
    advise(loaded(four_ranks()), on_progress=lambda *what: told.append(what))
    timing = [(done, total) for what, done, total in told if what == "timing schedules"]
    assert timing == [(done, len(timing)) for done in range(len(timing))]
    assert any(what.startswith("checking") for what, _, _ in told)


def test_advice_is_the_same_every_time():
    one, other = steps(advised("uneven")), steps(advised.__wrapped__("uneven"))
    assert one == other
    assert [*one] == [*other]


def test_the_listed_times_are_exact():
    advice = advice_on(four_ranks(cost={"forward_us": "1/3", "backward_input_us": "1/7"}))
    verified = next(v for v in listed(advice, Group.BETTER))
    plan = verified.candidate.spec
    from pipeproof.comm.generated_schedule import plan_schedule, stage_costs

    assert verified.candidate.figures.makespan_us == asap(plan_schedule(plan), stage_costs(plan)).makespan
    assert isinstance(verified.candidate.figures.makespan_us, Fraction)


def test_what_cannot_sum_early_is_left_out_with_the_reason(only):
    """Every stage of DualPipe and Chimera has copies; whether sums can come early shows when a plan is lowered."""
    only("1f1b", "zb_h1", "dualpipe", "chimera")
    data = four_ranks(reduce_gradients="when_ready")
    data["topology"]["dp"] = 2
    advice = advice_on(data)
    assert {v.candidate.choice.kind for v in listed(advice)} == {"zb_h1"}
    assert any("every stage has copies" in reason for reason in advice.impossible)


def test_only_the_framework_that_the_plan_names_unless_all_are_asked_for():
    data = four_ranks(num_layers=8, kind="interleaved", num_chunks=2)
    data["schedule"]["variant"] = "megatron"
    own, every = (advise(loaded(data), top=50, every_schedule=every_schedule) for every_schedule in (False, True))
    kinds = {one.candidate.spec.schedule.kind for rows in own.listed.values() for one in rows}
    assert own.candidates.framework is not None
    assert kinds <= own.candidates.framework.kinds
    assert "zb_h1" not in kinds
    assert own.num_timed < every.num_timed
    assert every.candidates.framework is None


@pytest.mark.parametrize(
    ("framework", "num_micro_batches", "tried"),
    [
        ("megatron", 8, {("1f1b", None), ("interleaved", "megatron")}),
        ("paddle", 8, {("1f1b", None), ("interleaved", "fleet"), ("interleaved", "fleet_balanced"),
                       ("interleaved", "fleet_fthenb"), ("dualpipe_v", None)}),
        ("paddle", 4, {("1f1b", None), ("interleaved", "fleet_balanced"), ("interleaved", "fleet_fthenb")}),
    ],
)  # fmt: skip
def test_a_framework_that_the_plan_names_has_its_own_orders_and_conditions(framework, num_micro_batches, tried):
    data = four_ranks(num_layers=8, num_micro_batches=num_micro_batches, micro_batch_size=1)
    data["schedule"]["framework"] = framework
    found = Candidates(loaded(data), None, framework=named_framework(loaded(data).spec))
    choices = [*found.choices(None)]
    assert ("interleaved", None) not in {(choice.kind, choice.variant) for choice in choices}
    assert {(choice.kind, choice.variant) for choice in choices} <= tried
    interleaved = next(choice for choice in choices if choice.kind == "interleaved")
    assert found.plan_of(interleaved).schedule.variant == interleaved.variant


def test_the_backend_of_runs_is_no_framework_for_every_schedule_runs_on_it():
    advice = advise(loaded(four_ranks(num_layers=8) | {"run": {"backend": "torch"}}), top=50)
    assert advice.candidates.framework is None
