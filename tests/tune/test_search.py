"""The search against all layouts simulated one by one, and its bounds against the simulator."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.analysis.sweep.evaluate_point import Status
from pipeproof.analysis.sweep.sweep_points import Point
from pipeproof.analysis.tune import search_layouts
from pipeproof.analysis.tune.evaluate_layout import PARTS, simulate_layout
from pipeproof.analysis.tune.frameworks import FRAMEWORKS
from pipeproof.analysis.tune.layout_bounds import Bounds, even_stages
from pipeproof.analysis.tune.layout_plans import balanced_cut, base_data, near_even_cut, plan_data
from pipeproof.analysis.tune.layouts import Layout, SearchSpace, near_even_blocks
from pipeproof.analysis.tune.present_step import TuneError
from pipeproof.analysis.tune.search_layouts import tune
from pipeproof.cost.analytic_times import AnalyticCosts
from pipeproof.diagnostics.finding import BadPlanError
from pipeproof.sim.memory_curve import GIB
from pipeproof.specs.load_plan import LoadedPlan, plan_from_dict
from pipeproof.stages.describe.layer import layer_order
from pipeproof.verify.check_plan import check
from tests.tune.models import DENSE, EXPERTS, LARGE_EXPERTS, REPLAYED, to_tune


def all_layouts(loaded, framework, *, gpus, batch, fix=None):
    """Each layout of a search space with its bound and its simulation."""
    found = FRAMEWORKS[framework]
    base = base_data(loaded.spec, found, "h100")
    bounds = Bounds(base, loaded.spec)
    for layout in SearchSpace(loaded.spec, found, gpus, batch, 8, fix or {}).layouts():
        bound = bounds.of(layout)
        if bound is not None:
            stages = bounds.stages_of(layout)
            plan = plan_data(base, found, layout, None if even_stages(stages) else stages)
            yield layout, bound, simulate_layout(Point({}, plan, "0" * 16), "")


@pytest.mark.slow(only=["dense-torch", "experts-torch"])
@pytest.mark.parametrize("framework", sorted(FRAMEWORKS))
@pytest.mark.parametrize("model", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_no_simulation_is_below_its_bounds(framework, model):
    fix = {"mbs": [1], "tp": [1, 2], "cp": [1], "vpp": [1, 2]}
    kinds = set()
    for layout, bound, result in all_layouts(to_tune(model), framework, gpus=4, batch=8, fix=fix):
        assert result.status is Status.OK, (layout, result.message)
        kinds.add(layout.kind)
        assert bound.step_us <= result.makespan * (1 + 1e-9), layout
        assert bound.peak_bytes <= result.details["peak_bytes"] + 1, layout
    assert kinds == FRAMEWORKS[framework].kinds


@given(
    host_us=st.sampled_from([0, 5, 105]),
    ranks_per_node=st.sampled_from([1, 2, 8]),
    link_efficiency=st.sampled_from([0.05, 0.3, 0.9]),
    overlap=st.sampled_from([[], ["tp"]]),
    slowdown=st.sampled_from([None, 0.2]),
    place=st.floats(0, 1, exclude_max=True),
)
@settings(max_examples=40, deadline=None)
def test_no_simulation_of_pairs_is_below_its_bounds(host_us, ranks_per_node, link_efficiency, overlap, slowdown, place):
    analytic = {"device": "h100", "host_us": host_us, "ranks_per_node": ranks_per_node}
    analytic |= {"link_efficiency": link_efficiency, "overlap": overlap}
    spec, framework = to_tune(LARGE_EXPERTS, cost={"analytic": analytic}).spec, FRAMEWORKS["megatron"]
    base = base_data(spec, framework, "h100")
    if slowdown is not None:
        base["cost_of_pairs"] = {"collective_slowdown": slowdown}
    bounds = Bounds(base, spec)
    fix = {"overlap": ["pairs"], "cp": [1], "mbs": [1], "tp": [1, 2]}
    layouts = [*SearchSpace(spec, framework, 8, 16, 8, fix).layouts()]
    begin = int(place * len(layouts))
    layout = next(one for one in (*layouts[begin:], *layouts) if bounds.of(one) is not None)
    bound, stages = bounds.of(layout), bounds.stages_of(layout)
    plan = plan_data(base, framework, layout, None if even_stages(stages) else stages)
    result = simulate_layout(Point({}, plan, "0" * 16), "")
    assert plan["cost"].get("collective_slowdown") == slowdown
    assert bound.step_us <= result.makespan * (1 + 1e-9), layout
    assert bound.peak_bytes <= result.details["peak_bytes"] + 1, layout


def overlapping(model, framework="megatron", gpus=8, **sections):
    """The layouts with pairs that are tried."""
    spec = to_tune(model, **sections).spec
    layouts = [*SearchSpace(spec, FRAMEWORKS[framework], gpus, 16, 8, {"cp": [1], "mbs": [1]}).layouts()]
    return [layout for layout in layouts if layout.overlap == "pairs"]


def test_pairs_are_tried_where_megatron_has_them():
    found = overlapping(LARGE_EXPERTS)
    assert {layout.kind for layout in found} == {"1f1b", "interleaved"}
    for layout in found:
        assert layout.ep > 1
        assert layout.recompute != "full"
        assert layout.pp == 1 if layout.kind == "1f1b" else layout.vpp > 1


@pytest.mark.slow
def test_pairs_that_save_time_are_listed_with_parts_that_add_up():
    options = {"gpus": 4, "device": "h100", "global_batch": 16, "workers": 1, "top": 3}
    fix = {"tp": [1], "cp": [1], "ep": [2, 4], "mbs": [1]}
    model = to_tune(LARGE_EXPERTS, cost=REPLAYED)
    both, without = (tune(model, fix={**fix, **more}, **options) for more in ({}, {"overlap": ["none"]}))
    assert both.rows[0].layout.overlap == "pairs"
    assert both.rows[0].plan["schedule"]["overlap"] == "pairs"
    assert both.rows[0].step < without.rows[0].step
    assert {row.layout.overlap for row in without.rows} == {"none"}
    for row in both.rows:
        assert min(row.parts_s.values()) >= 0
        assert sum(row.parts_s.values()) == pytest.approx(row.step_s)
        assert not check(LoadedPlan(plan_from_dict(row.plan).spec)).errors
    best = {}
    for layout, _, result in all_layouts(model, "megatron", gpus=4, batch=16, fix=fix):
        group = replace(layout, cut="", recompute="", shard_optimizer="", overlap="")
        best[group] = min(best.get(group, result.makespan), result.makespan)
    assert sorted(row.step_s for row in both.rows) == [float(us / 10**6) for us in sorted(best.values())[:3]]


@pytest.mark.slow
def test_bounds_are_close_enough_to_remove_most_layouts():
    close = Counter(
        bound.step_us > 0.5 * float(result.makespan)
        for _, bound, result in all_layouts(to_tune(), "megatron", gpus=4, batch=16, fix={"tp": [1, 2], "cp": [1]})
    )
    assert close[True] > close[False]


@pytest.mark.parametrize("num_layers", [8, pytest.param(7, marks=pytest.mark.slow)], ids=["even", "near_even"])
def test_the_rows_are_the_best_of_all_layouts(num_layers):
    """With a limit of memory that only some layouts keep."""
    fix = {"tp": [1, 2], "cp": [1], "mbs": [1, 2]}
    limit = 1.5
    best, cuts = {}, set()
    model = to_tune({**DENSE, "num_layers": num_layers})
    for layout, _, result in all_layouts(model, "megatron", gpus=4, batch=16, fix=fix):
        cuts.add(layout.cut)
        group = layout.pp, layout.vpp, layout.tp, layout.ep, layout.mbs
        if result.details["peak_bytes"] <= limit * GIB:
            best[group] = min(best.get(group, result.makespan), result.makespan)
    result = tune(model, gpus=4, device="h100", global_batch=16, memory_gib=limit, top=5, fix=fix, workers=1)
    assert cuts >= {"balanced", "even" if num_layers == 8 else "near_even"}
    assert sorted(row.step_s for row in result.rows) == [float(us / 10**6) for us in sorted(best.values())[:5]]
    assert 5 <= result.counts.simulated < result.counts.tried
    assert result.counts.over_memory + result.counts.over_memory_simulated > 0


@pytest.mark.slow
def test_rows_pass_their_check_and_their_parts_add_up():
    fix = {"tp": [1], "mbs": [2]}
    options = {"gpus": 8, "device": "h100", "global_batch": 16, "fix": fix}
    result = tune(to_tune(EXPERTS), framework="torch", top=4, workers=1, **options)
    assert len(result.rows) == 4
    for row in result.rows:
        assert not check(LoadedPlan(plan_from_dict(row.plan).spec)).errors
        assert row.parts_s.keys() == set(PARTS)
        assert sum(row.parts_s.values()) == pytest.approx(row.step_s)
        assert row.tokens_per_s == pytest.approx(16 * 512 / row.step_s)
        assert row.plan["run"]["dtype"] == "bfloat16"  # the framework's
        assert row.tflops_per_gpu == pytest.approx(row.mfu * 989.4)
        assert row.layout.dp * row.layout.ep * row.layout.mbs * row.layout.num_micro_batches == 16


@pytest.mark.slow
def test_a_row_that_fails_its_check_is_replaced(monkeypatch):
    options = {"gpus": 4, "device": "h100", "global_batch": 8, "workers": 1, "fix": {"tp": [1]}}
    expected = tune(to_tune(), top=3, **options).rows
    checked = search_layouts.check_layout

    def refuse_the_first(point, plan_file):
        result = checked(point, plan_file)
        if result.details["digest"] == expected[0].digest:
            return type(result)(point.id, {}, Status.REFUSED, code="PP201", message="refused here")
        return result

    monkeypatch.setattr(search_layouts, "check_layout", refuse_the_first)
    result = tune(to_tune(), top=2, **options)
    assert result.counts.refused == {"PP201": 1}
    assert expected[0].digest not in {row.digest for row in result.rows}
    assert result.rows[-1].step_s <= expected[-1].step_s


def test_an_executor_of_the_caller_gives_them_too_and_stays_open():
    options = {"gpus": 4, "device": "h100", "global_batch": 8, "top": 3, "fix": {"tp": [1], "cp": [1]}}
    with ThreadPoolExecutor(2) as pool:
        found = tune(to_tune(), executor=pool, **options)
        assert pool.submit(int).result() == 0
    assert found == tune(to_tune(), workers=1, **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"device": "h101"}, "did you mean h100"),
        ({"framework": "megatorn"}, "did you mean megatron"),
        ({"fix": {"ttp": [1]}}, "did you mean tp"),
        ({"gpus": 0}, "at least 1"),
    ],
)
def test_wrong_options_are_refused(options, text):
    with pytest.raises(TuneError, match=text):
        tune(to_tune(), **{"gpus": 4, "device": "h100", "global_batch": 8, **options})


def test_keys_that_depend_on_the_layout_are_refused():
    schedule = {"kind": "1f1b", "num_micro_batches": 2, "micro_batch_size": 2, "last_micro_batch_size": 1}
    with pytest.raises(BadPlanError, match="last_micro_batch_size"):
        tune(to_tune(schedule=schedule), gpus=4, device="h100", global_batch=8)


def test_times_of_cells_are_those_of_their_own_recomputation():
    """Cells that differ in recomputation share the times of operations."""
    spec = to_tune(EXPERTS, memory={"recompute": "selective", "recompute_modules": ["core_attn", "moe"]}).spec
    bounds = Bounds(base_data(spec, FRAMEWORKS["megatron"], "h100"), spec)
    for recompute in ("none", "selective", "full"):
        spec = bounds._cell_spec(2, 1, 2, 1, recompute)
        costs = AnalyticCosts(spec, spec.cost.analytic)
        layout = Layout(1, 1, 2, 1, 2, 1, 1, 1, "1f1b", None, "even", recompute, "none")
        shared = bounds._cell(layout)
        for index, layer in enumerate(shared.costs.layers.values()):
            expected = [[float(time.device_us), float(time.host_us)] for time in costs.layer(layer).values()]
            assert shared.costs.times[recompute][:, (0, 2), index].tolist() == expected


@pytest.mark.parametrize("num_stages", range(2, 12))
def test_a_near_even_cut_is_that_of_megatron(num_stages):
    """61 blocks over 16 stages are 4 on each but the last, as the layout Et*4|(t*4|)*14tmL of DeepSeek-V3 has them."""
    assert near_even_blocks(61, 16) == [4] * 15 + [1]
    assert near_even_blocks(126, 32) == [3, *[4] * 30, 3]
    assert near_even_blocks(3, 5) == [0, 1, 1, 1, 0]
    assert near_even_blocks(5, 4) is None
    blocks = near_even_blocks(61, num_stages)
    assert blocks is None or (sum(blocks) == 61 and len(set(blocks[1:-1])) < 2)
    stages = near_even_cut(to_tune({**DENSE, "num_layers": 61}).spec, num_stages)
    assert [sum(name.startswith("layer.") for name in names) for names in stages] == (blocks or [])


def test_a_balanced_cut_begins_stages_at_the_nearest_block():
    """The first of two equally near blocks; blocks without time are one place."""
    spec = to_tune().spec
    times = dict.fromkeys(layer_order(spec.gpt), 0.0)
    for number, time in enumerate([2, 0, 0, 2, 2, 0, 1, 1]):
        times[f"layer.{number}"] = float(time)
    begins = [0, 2, 2, 2, 4, 6, 6, 7, 8]
    for num_stages in (2, 3, 4):
        cut = balanced_cut(spec, times, num_stages)
        starts = [int(next(name for name in names if name.startswith("layer.")).split(".")[1]) for names in cut]
        shares = [8 * stage / num_stages for stage in range(1, num_stages)]
        nearest = [min(range(9), key=lambda index, share=share: abs(begins[index] - share)) for share in shares]
        assert [max(index, before + 1) for index, before in zip(nearest, starts, strict=False)] == starts[1:]


def test_modules_after_the_blocks_do_not_count_in_a_near_even_cut():
    """Multi-token prediction is on the last stage, as in the layout Et*4|(t*4|)*14tmL."""
    stages = near_even_cut(to_tune({**EXPERTS, "num_layers": 7, "mtp": {"num_modules": 1}}).spec, 4)
    assert [sum(name.startswith("layer.") for name in names) for names in stages] == [2, 2, 2, 1]
    assert stages[-1] == ("layer.6", "mtp.0", "norm", "head")
