"""From profiles to times: curves over bytes, the times of stages, and plans that a profile does not speak of."""

import json
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.comm.lower import lower_loaded, with_measured_times
from pipeproof.cost.measured_profile import Curve, ProfileTimes
from pipeproof.cost.plan_times import resolved_cost
from pipeproof.diagnostics.finding import BadPlanError
from pipeproof.schedule.ops import OpKind
from pipeproof.sim.simulate import simulate
from pipeproof.specs.load_plan import load_plan, plan_from_dict
from pipeproof.specs.profile_file import Profile
from tests.plans import plan_dict, subject
from tests.profiles import COST, plan_with_profile, profile_of, profile_text


def curve(*points):
    return Curve.through([(size, Fraction(time), 1) for size, time in points])


# --- curves ---


def test_a_curve_goes_through_its_points_and_on_with_its_last_slope():
    three = curve((100, 10), (200, 20), (400, 60))
    assert [three.at(size) for size in (100, 150, 200, 300, 400, 500)] == [10, 15, 20, 40, 60, 80]
    assert three.at(0) == three.at(99) == 10
    assert curve((100, 10)).at(10**9) == 10


def test_a_larger_message_that_took_less_counts_with_its_neighbour():
    pooled = Curve.through([(1, Fraction(30), 3), (2, Fraction(10), 1), (3, Fraction(40), 1)])
    assert [pooled.at(size) for size in (1, 2, 3)] == [25, 25, 40]
    twice = Curve.through([(1, Fraction(30), 1), (2, Fraction(20), 1), (3, Fraction(10), 2)])
    assert twice.times == (Fraction(70, 4),) * 3


POINTS = st.lists(
    st.tuples(st.integers(0, 10**6), st.fractions(0, 1000), st.integers(1, 9)),
    min_size=1, max_size=8, unique_by=lambda point: point[0],
).map(sorted)  # fmt: skip


@settings(deadline=None)
@given(POINTS, st.lists(st.integers(0, 2 * 10**6), min_size=2).map(sorted))
def test_a_curve_never_falls_and_keeps_points_that_do_not(points, sizes):
    found = Curve.through(points)
    times = [found.at(size) for size in sizes]
    assert times == sorted(times)
    weights = sum(count for _, _, count in points)
    assert (
        sum(found.at(size) * count for size, _, count in points) / weights
        == sum(time * count for _, time, count in points) / weights
    )
    rising = [time for _, time, _ in points]
    if rising == sorted(rising):
        assert [found.at(size) for size, _, _ in points] == rising


# --- times ---


@pytest.mark.parametrize("kind", ["1f1b", "gpipe", "eager_1f1b"])
def test_a_plan_with_the_profile_of_its_own_simulation_takes_the_same_time(tmp_path, kind):
    """The times in the log of 1f1b hold for any schedule of the same stages."""
    sections = {"schedule": {"kind": kind, "num_micro_batches": 6}}
    given_times = simulate(lower_loaded(plan_from_dict(plan_dict(cost=COST, **sections)))).makespan
    plan = plan_with_profile(tmp_path, profile=profile_text(), **sections)
    assert simulate(lower_loaded(load_plan(plan))).makespan == given_times


def test_the_times_of_stages_are_medians_and_those_of_messages_a_curve(tmp_path):
    plan = load_plan(plan_with_profile(tmp_path, profile=profile_text()))
    cost = with_measured_times(plan).spec.cost
    assert [cost.forward_of(stage) for stage in (0, 1)] == COST["forward_us"]
    assert [cost.backward_of(stage) for stage in (0, 1)] == COST["backward_us"]
    assert (cost.p2p_latency_us, cost.p2p, cost.profile) == (7, "rendezvous", None)
    assert with_measured_times(plan_from_dict(plan_dict())).spec.cost.profile is None


def times_of(**changes):
    content = json.loads(profile_text()) | changes
    return ProfileTimes.of(Profile.model_validate(content), "profile.json")


SPREAD = {"count": 3, "q1_us": 1, "median_us": 2.0004, "q3_us": 3, "mean_us": 2}


def test_messages_of_the_steps_count_before_bare_ones():
    assert times_of().message_us(10**9) == 7
    bare = times_of(messages=[])
    assert [bare.message_us(size) for size in (0, 64, 4096, 8128)] == [5, 5, 9, 13]
    assert bare.message_us(65).denominator in (1, 2, 4, 5, 8, 10, 20, 25, 40, 50, 100, 125, 200, 250, 500, 1000)


def test_collectives_go_by_kind_members_and_bytes():
    point = {"kind": "ALL_GATHER", "axis_size": 2, "bytes": 10, **SPREAD}
    times = times_of(collectives=[point])
    assert times.collective_us(OpKind.ALL_GATHER, 2, 10) == 2
    assert times.collective_us(OpKind.GATHER_BACKWARD, 2, 99) == 2
    assert times.collective_us(OpKind.ALL_REDUCE, 1, 99) == 0
    with pytest.raises(BadPlanError, match=r"PP161: `profile\.json` has no time of a ALL_REDUCE among 2 ranks"):
        times.collective_us(OpKind.ALL_REDUCE, 2, 10)
    with pytest.raises(BadPlanError, match="PP161"):
        times.collective_us(OpKind.ALL_GATHER, 4, 10)
    with pytest.raises(ValueError, match="SEND_F is not a collective"):
        times.collective_us(OpKind.SEND_FORWARD, 2, 10)


def test_a_profile_with_split_backwards_gives_both_parts(tmp_path):
    content = json.loads(profile_text())
    for stage in content["stages"]:
        (backward,) = [op for op in stage["ops"] if op["kind"] == "B"]
        stage["ops"].remove(backward)
        stage["ops"] += [{**backward, "kind": "I"}, {**backward, "kind": "W"}]
    plan = load_plan(plan_with_profile(tmp_path, profile=json.dumps(content)))
    cost = with_measured_times(plan).spec.cost
    assert [cost.backward_input_of(0), cost.backward_weight_of(1)] == [210, 190]
    assert cost.backward_us is None


def test_where_one_stage_split_its_backwards_that_of_another_is_halved(tmp_path):
    content = json.loads(profile_text())
    ops = content["stages"][0]["ops"]
    (backward,) = [op for op in ops if op["kind"] == "B"]
    ops += [{**backward, "kind": "I"}, {**backward, "kind": "W"}]
    plan = load_plan(plan_with_profile(tmp_path, profile=json.dumps(content)))
    cost = with_measured_times(plan).spec.cost
    assert [cost.backward_input_of(stage) for stage in (0, 1)] == [210, 95]
    assert [cost.backward_weight_of(stage) for stage in (0, 1)] == [210, 95]


def test_what_takes_no_time_at_all_takes_a_nanosecond_forward(tmp_path):
    content = json.loads(profile_text())
    for spread in ("whole", "own"):
        content["stages"][0]["ops"][0][spread] |= {"q1_us": 0, "median_us": 0}
    plan = load_plan(plan_with_profile(tmp_path, profile=json.dumps(content)))
    assert with_measured_times(plan).spec.cost.forward_of(0) == Fraction(1, 1000)


@pytest.mark.parametrize(
    ("stage", "kind", "fragment"),
    [(1, "F", "a F of stage 1"), (0, "B", "a B of stage 0"), (0, "STEP", "a STEP of stage 0")],
)
def test_a_time_that_is_missing_is_said(tmp_path, stage, kind, fragment):
    content = json.loads(profile_text())
    ops = content["stages"][stage]["ops"]
    content["stages"][stage]["ops"] = [op for op in ops if op["kind"] != kind]
    with pytest.raises(BadPlanError, match=f"PP161.*has no time of {fragment}"):
        lower_loaded(load_plan(plan_with_profile(tmp_path, profile=json.dumps(content))))


def test_a_plan_of_several_ranks_needs_messages(tmp_path):
    content = json.loads(profile_text()) | {"messages": [], "bare_messages": []}
    with pytest.raises(BadPlanError, match=r"PP161.*has no time of a message between stages"):
        lower_loaded(load_plan(plan_with_profile(tmp_path, profile=json.dumps(content))))


def test_one_rank_needs_none(tmp_path):
    alone = {"topology": {"pp": 1}}
    text = json.dumps(profile_of(subject(cost={"forward_us": 5}, **alone)).to_json())
    assert json.loads(text)["messages"] == []
    loaded = load_plan(plan_with_profile(tmp_path, profile=text, **alone))
    assert resolved_cost(lower_loaded(loaded).spec).p2p_latency_us == 0


# --- plans that the profile does not speak of ---


@pytest.mark.parametrize(
    ("sections", "fragment"),
    [
        ({"model": {"hidden_size": 32}}, "model.hidden_size is 16 there, 32 here"),
        ({"model": {"activation_order": "bsh"}}, "model.activation_order is the default there, bsh here"),
        ({"topology": {"tp": 2}}, "topology.tp is the default there, 2 here"),
        ({"topology": {"sequence_parallel": True}}, "topology.sequence_parallel is the default there, true here"),
        ({"topology": {"pp": 4}}, "it has 2 stages there, 4 here"),
        (
            {"stages": [["embed", "layer.0"], ["layer.1", "layer.2", "layer.3", "norm", "head"]]},
            "stage 0 has layers embed, layer.0, layer.1 there, embed, layer.0 here",
        ),
        ({"schedule": {"micro_batch_size": 1}}, "schedule.micro_batch_size is 2 there, 1 here"),
        ({"schedule": {"last_micro_batch_size": 1}}, "micro-batches differ in size here, and"),
        ({"run": {"dtype": "float64"}}, "run.dtype is float32 there, float64 here"),
        ({"run": {"optimizer": "sgd"}}, "run.optimizer is adamw there, sgd here"),
    ],
)
def test_what_differs_from_the_measured_plan_is_named(tmp_path, sections, fragment):
    path = plan_with_profile(tmp_path, profile=profile_text(), **sections)
    with pytest.raises(BadPlanError) as error:
        lower_loaded(load_plan(path))
    (finding,) = error.value.findings
    assert finding.code == "PP162"
    assert fragment in finding.message
    assert finding.location is not None
    assert finding.location.file == str(path)


@pytest.mark.parametrize(("here", "where"), [({}, "there"), ({"last_micro_batch_size": 1}, "there and here")])
def test_a_profile_of_micro_batches_that_differ_predicts_nothing(tmp_path, here, where):
    uneven = profile_text(schedule={"last_micro_batch_size": 1})
    with pytest.raises(BadPlanError, match=f"PP162.*differ in size {where}, and a profile has one time for all"):
        lower_loaded(load_plan(plan_with_profile(tmp_path, profile=uneven, schedule=here)))


def test_of_many_differences_a_few_are_named(tmp_path):
    model = {"hidden_size": 32, "ffn_size": 64, "vocab_size": 64, "seq_length": 16, "num_heads": 2, "num_layers": 8}
    with pytest.raises(BadPlanError, match=r"; 2 more$"):
        lower_loaded(load_plan(plan_with_profile(tmp_path, profile=profile_text(), model=model)))


@pytest.mark.parametrize(
    "sections",
    [
        {"topology": {"order": ["pp", "dp", "tp", "cp", "ep"]}},
        {"transport": "partial"},
        {"topology": {"pp": 1}, "schedule": {"kind": "looped_bfs", "num_chunks": 2}},
        {"schedule": {"kind": "zb_h1", "num_micro_batches": 7}, "run": {"steps": 9, "seed": 1}},
    ],
)
def test_what_stages_do_not_depend_on_may_differ(tmp_path, sections):
    path = plan_with_profile(tmp_path, profile=profile_text(), **sections)
    assert simulate(lower_loaded(load_plan(path))).makespan > 0
