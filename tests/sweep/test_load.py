"""Sweep files: which points they have, and what is wrong with them, with its place."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeproof.analysis.sweep.plan_keys import unknown_part
from pipeproof.analysis.sweep.sweep_file import load_sweep
from pipeproof.analysis.sweep.sweep_points import grid_of, laid_over
from pipeproof.diagnostics.source import PlanFileError
from pipeproof.specs.plan import PlanSpec
from tests.plans import plan_dict
from tests.sweep.files import sweep_of, write_sweep


def settings(sweep):
    return [dict(point.settings) for point in sweep.points]


def test_a_grid_is_the_product_and_zipped_keys_go_side_by_side(tmp_path):
    sweep = sweep_of(
        tmp_path,
        grid={"schedule.kind": ["1f1b", "gpipe"]},
        zip={"schedule.num_micro_batches": [4, 8], "cost.forward_us": [10, 20]},
        include=[{"topology.pp": 4}],
    )
    assert settings(sweep) == [
        {"schedule.kind": "1f1b", "schedule.num_micro_batches": 4, "cost.forward_us": 10},
        {"schedule.kind": "1f1b", "schedule.num_micro_batches": 8, "cost.forward_us": 20},
        {"schedule.kind": "gpipe", "schedule.num_micro_batches": 4, "cost.forward_us": 10},
        {"schedule.kind": "gpipe", "schedule.num_micro_batches": 8, "cost.forward_us": 20},
        {"topology.pp": 4},
    ]
    assert sweep.keys == ("schedule.kind", "schedule.num_micro_batches", "cost.forward_us", "topology.pp")
    assert sweep.points[1].plan["cost"] == {"forward_us": 20}
    assert sweep.points[4].plan["topology"] == {"pp": 4, "tp": 1}


def test_the_same_plan_twice_is_one_point(tmp_path):
    sweep = sweep_of(tmp_path, grid={"topology.tp": [1, 2, 1]}, include=[{"topology": {"tp": 2}}])
    assert settings(sweep) == [{"topology.tp": 1}, {"topology.tp": 2}]


AXES = st.dictionaries(st.sampled_from("abcdef"), st.lists(st.integers(), min_size=1, max_size=4), max_size=4)


@given(AXES, st.integers(1, 4), st.lists(st.fixed_dictionaries({"x": st.integers()}), max_size=3))
def test_as_many_points_as_the_lists_say(grid, rows, include):
    zipped = {"y": list(range(rows)), "z": list(range(rows))}
    points = list(grid_of(grid, zipped, include))
    product = rows
    for values in grid.values():
        product *= len(values)
    assert len(points) == product + len(include)
    assert points[len(points) - len(include) :] == include
    assert all(point["y"] == point["z"] for point in points[:product])


def test_what_is_set_is_laid_over_the_plan():
    base = {"a": {"b": 1, "c": {"d": 2}}, "e": [1, 2]}
    laid = laid_over(base, {"a.c": {"f": 3}, "e": [4], "a.b": None, "g.h": 5, "e2": None})
    assert laid == {"a": {"c": {"d": 2, "f": 3}}, "e": [4], "g": {"h": 5}}
    assert base == {"a": {"b": 1, "c": {"d": 2}}, "e": [1, 2]}
    both = laid_over({"transport": "partial"}, {"transport.forward": "full"})
    assert both["transport"] == {"forward": "full", "backward": "partial"}
    computed = laid_over({"cost": {"analytic": "h200"}}, {"cost.analytic.matmul_efficiency": 0.5})
    assert computed["cost"] == {"analytic": {"device": "h200", "matmul_efficiency": 0.5}}


def test_every_key_of_plans_is_known():
    for section, field in PlanSpec.model_fields.items():
        assert unknown_part(section) is None
        for key in getattr(field.annotation, "model_fields", {}):
            assert unknown_part(f"{section}.{key}") is None
    assert unknown_part("model.moe.num_experts") is None
    assert unknown_part("model.mtp.num_modules") is None  # of a later release: each point says so
    assert unknown_part("schedule.kind.more") == "schedule.kind.more"
    assert unknown_part("boundaries.name") == "boundaries.name"  # a list is set as a whole
    assert unknown_part("topologie.pp") == "topologie"


def test_the_digest_is_of_points_and_the_files_that_they_name(tmp_path):
    grid = {"topology.tp": [1, 2]}
    digest = sweep_of(tmp_path, grid=grid).digest
    assert sweep_of(tmp_path, zip=grid).digest == digest
    assert sweep_of(tmp_path, grid={"topology.tp": [1]}).digest != digest
    assert load_sweep(write_sweep(tmp_path, {"grid": grid}, schedule={"num_micro_batches": 8})).digest != digest
    named = {"grid": {"schedule": [{"kind": "file", "path": "orders.csv"}]}}
    missing = sweep_of(tmp_path, **named).digest
    (tmp_path / "orders.csv").write_text("0F0,0B0\n")
    there = sweep_of(tmp_path, **named).digest
    (tmp_path / "orders.csv").write_text("0F0\n")
    assert len({missing, there, sweep_of(tmp_path, **named).digest}) == 3


def test_the_digest_is_of_the_profile_too(tmp_path):
    (tmp_path / "profile.json").write_text("1")
    named = {"grid": {"cost": [{"profile": "profile.json"}]}}
    before = sweep_of(tmp_path, **named).digest
    (tmp_path / "profile.json").write_text("2")
    assert sweep_of(tmp_path, **named).digest != before


BASE = "plan: base.json\n"
LARGE = f"grid: {{topology.pp: {list(range(1000))}, topology.tp: {list(range(101))}}}"


@pytest.mark.parametrize(
    ("text", "code", "place", "words"),
    [
        ("", "PP105", (1, 1), "nothing: the file is empty"),
        ("[1]", "PP105", (1, 1), "a list of 1"),
        ("plan: [", "PP101", (1, 8), ""),
        ("plan: 3\ngrid: {topology.pp: [2]}", "PP105", (1, 7), "the name of a plan file"),
        ("grid: {topology.pp: [2]}", "PP104", (1, 1), "`plan` is missing"),
        (BASE, "PP104", (1, 1), "no points"),
        (BASE + "grid: {}", "PP105", (2, 7), "an empty one"),
        (BASE + "grid: {topology.pp: 2}", "PP105", (2, 21), "a list of values, found integer 2"),
        (BASE + "grid: {topology.pp: []}", "PP105", (2, 21), "an empty one"),
        (BASE + "grid: {topologie.pp: [2]}", "PP102", (2, 8), "no key `topologie`"),
        (BASE + "grid: {schedule.knd: [gpipe]}", "PP102", (2, 8), "no key `schedule.knd`"),
        (BASE + "grid: {topology.pp: [2]}\ngird: 3", "PP102", (3, 1), "no key `gird`"),
        (BASE + "grid: {topology.pp: [2]}\ngrid: {topology.pp: [4]}", "PP103", (3, 1), "line 2 has it already"),
        (BASE + "grid: {topology.pp: [2]}\nzip: {topology.pp: [2]}", "PP106", (3, 7), "in `grid` as well"),
        (BASE + "zip: {topology.pp: [2, 4], topology.tp: [1]}", "PP106", (2, 41), "1 values, `topology.pp` has 2"),
        (BASE + "grid: {cost.forward_us: [.inf]}", "PP106", (2, 26), "finite"),
        (BASE + "include: [3]", "PP105", (2, 11), "a mapping of plan keys"),
        (BASE + "include: 3", "PP105", (2, 10), "a list of points"),
        (BASE + "include: [{pp: 2}]", "PP102", (2, 12), "no key `pp`"),
        (BASE + LARGE, "PP106", (2, 1), "101000 points"),
    ],
)
def test_what_is_wrong_has_a_place(text, code, place, words, tmp_path):
    path = write_sweep(tmp_path, text)
    with pytest.raises(PlanFileError) as refusal:
        load_sweep(path)
    (finding,) = refusal.value.findings
    assert (finding.code, (finding.location.line, finding.location.column)) == (code, place)
    assert finding.location.file == str(path)
    assert words in finding.message
    assert refusal.value.source.file == str(path)


@pytest.mark.parametrize(
    ("text", "help"),
    [
        (BASE + "topology.pp: [2]\ngrid: {topology.tp: [1]}", "`grid: {topology.pp: [...]}`"),
        (BASE + "grid: {schedule.knd: [gpipe]}", "`schedule.kind`"),
        (BASE + "include: [{num_chunks: 2}]", "`schedule.num_chunks`"),
    ],
)
def test_helps_name_what_was_meant(text, help, tmp_path):
    with pytest.raises(PlanFileError) as refusal:
        load_sweep(write_sweep(tmp_path, text))
    assert help in refusal.value.findings[0].help


def test_a_base_plan_may_lack_what_the_sweep_gives(tmp_path):
    path = write_sweep(tmp_path, {"grid": {"schedule.kind": ["1f1b"]}})
    plan = plan_dict(topology={"pp": 3})
    del plan["schedule"]["kind"]
    (tmp_path / "base.json").write_text(json.dumps(plan))
    assert len(load_sweep(path).points) == 1


@pytest.mark.parametrize(
    ("change", "code"), [({"modle": {}}, "PP102"), ({"topology": {"pp": "2"}}, "PP105"), ({"model": 3}, "PP105")]
)
def test_a_base_plan_that_no_point_can_mend_is_refused_at_its_place(change, code, tmp_path):
    path = write_sweep(tmp_path, {"grid": {"schedule.num_micro_batches": [4]}}, **change)
    with pytest.raises(PlanFileError) as refusal:
        load_sweep(path)
    assert {finding.code for finding in refusal.value.findings} == {code}
    assert Path(refusal.value.findings[0].location.file).name == "base.json"


@pytest.mark.parametrize("name", ["none.yaml", "."])
def test_a_base_plan_that_cannot_be_read(name, tmp_path):
    path = write_sweep(tmp_path, f"plan: {name}\ngrid: {{topology.pp: [2]}}")
    with pytest.raises(PlanFileError) as refusal:
        load_sweep(path)
    assert refusal.value.findings[0].code == "PP100"
