"""Launch arguments: the importer makes the plan that they were written for."""

import random
from dataclasses import replace

import pytest

from pipeproof.analysis.tune.frameworks import FRAMEWORKS
from pipeproof.analysis.tune.layout_bounds import Bounds, even_stages
from pipeproof.analysis.tune.layout_plans import base_data, plan_data
from pipeproof.analysis.tune.layouts import SearchSpace
from pipeproof.interop.tune_models import MODELS, tune_model
from pipeproof.interop.write_arguments import (
    NoArgumentsError,
    differences,
    imported_again,
    launch_of,
)
from pipeproof.specs.load_plan import plan_from_dict
from tests.tune.models import LARGE_EXPERTS, to_tune

WITHOUT = {
    ("paddle", "deepseekv3"): "sigmoid",
    ("paddle", "kimi_k2"): "sigmoid",
}
"""Models that a framework's arguments do not express, and a word of the reason."""


def plans(name, framework, number=8):
    """Plans of some layouts of a public model."""
    spec = tune_model(name).plan.spec
    found = FRAMEWORKS[framework]
    base = base_data(spec, found, "h100")
    bounds = Bounds(base, spec)
    layouts = [*SearchSpace(spec, found, 64, 256, 8, {"mbs": [1, 2], "cp": [1, 2]}).layouts()]
    for layout in random.Random(0).sample(layouts, number):
        if bounds.of(layout) is not None:
            stages = bounds.stages_of(layout)
            yield plan_from_dict(plan_data(base, found, layout, None if even_stages(stages) else stages)).spec


@pytest.mark.parametrize("framework", ["megatron", "paddle"])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_importing_the_arguments_gives_the_plan(name, framework):
    for spec in plans(name, framework):
        if (framework, name) in WITHOUT:
            with pytest.raises(NoArgumentsError, match=WITHOUT[framework, name]):
                launch_of(spec, framework, "x")
        else:
            launch = launch_of(spec, framework, "x")
            assert not [*differences(spec, imported_again(launch, spec.topology.num_ranks))]


@pytest.mark.parametrize(
    "parts",
    [
        {"norm": "layer", "positions": "learned", "mlp": "gelu_tanh", "biases": "all", "tied_embedding": True},
        {"dropout": {"hidden": 0.1, "embedding": 0.1, "attention": 0.2}},
        {"vocab_size": 16128, "unpadded_vocab_size": 16100},
        {"head_size": 64, "num_kv_heads": 1},
        {"moe": {"num_experts": 4, "top_k": 2, "ffn_size": 64, "router_dtype": "float32"}},
    ],
)
def test_parts_of_a_model_have_flags_of_megatron(parts):
    spec = to_tune().spec
    data = {**spec.model_dump(mode="json", exclude_unset=True)["model"], **parts}
    base = base_data(to_tune(data).spec, FRAMEWORKS["megatron"], "h100")
    layouts = SearchSpace(to_tune(data).spec, FRAMEWORKS["megatron"], 4, 8, 8, {"tp": [1], "pp": [2]}).layouts()
    layout = next(iter(layouts))
    launch_of(plan_from_dict(plan_data(base, FRAMEWORKS["megatron"], layout, None)).spec, "megatron", "x")


def test_recomputed_modules_have_flags_of_megatron():
    memory = {"recompute": "selective", "recompute_modules": ["mla_up_proj", "moe_act"]}
    spec = tune_model("deepseekv3").plan.spec
    framework = FRAMEWORKS["megatron"]
    base = base_data(spec, framework, "h100")
    base["memory"] |= {"recompute_modules": memory["recompute_modules"]}
    layouts = SearchSpace(spec, framework, 64, 256, 8, {"recompute": ["selective"], "overlap": ["none"]}).layouts()
    layout = next(layout for layout in layouts if layout.cut == "even" and layout.vpp == 1)
    made = plan_from_dict(plan_data(base, framework, layout, None)).spec
    launch = launch_of(made, "megatron", "x")
    assert "--recompute-granularity selective --recompute-modules mla_up_proj moe_act" in " ".join(
        launch.files["x.sh"].replace("\\\n", " ").split()
    )
    assert imported_again(launch, made.topology.num_ranks).memory.recompute_modules == ("mla_up_proj", "moe_act")
    full = replace(layout, recompute="full")
    assert "recompute_modules" not in plan_data(base, framework, full, None)["memory"]


def test_pairs_have_flags_of_megatron():
    framework, loaded = FRAMEWORKS["megatron"], to_tune(LARGE_EXPERTS)
    base = base_data(loaded.spec, framework, "h100")
    fix = {"overlap": ["pairs"], "pp": [1, 2], "vpp": [1, 2], "ep": [2], "cut": ["even"]}
    layouts = [*SearchSpace(loaded.spec, framework, 4, 8, 8, fix).layouts()]
    assert {layout.kind for layout in layouts} == {"1f1b", "interleaved"}
    for layout in layouts:
        spec = plan_from_dict(plan_data(base, framework, layout, None)).spec
        launch = launch_of(spec, "megatron", "x")
        (text,) = launch.files.values()
        assert not [*differences(spec, imported_again(launch, spec.topology.num_ranks))]
        for flag in ("--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute"):
            assert flag in text
            text = text.replace(flag, "--seed 1")
        changed = replace(launch, files={"x.sh": text})
        assert [*differences(spec, imported_again(changed, spec.topology.num_ranks))]


def test_a_changed_argument_is_another_plan():
    """The proof is not empty: it sees each single change of a script."""
    spec = next(plans("llama3_70b", "megatron", 1))
    launch = launch_of(spec, "megatron", "x")
    (text,) = launch.files.values()
    for old, new in (
        ("--sequence-parallel", "--seed 1"),
        ("--overlap-grad-reduce", "--seed 1"),
        ("--num-query-groups 8", "--num-query-groups 16"),
        ("--clip-grad 1", "--clip-grad 2"),
    ):
        if old in text:
            changed = replace(launch, files={"x.sh": text.replace(old, new)})
            assert [*differences(spec, imported_again(changed, spec.topology.num_ranks))], old


def test_what_has_no_arguments_is_refused_by_key():
    spec = next(plans("llama3_70b", "megatron", 1))
    changed = spec.model_copy(update={"transport": spec.transport.model_copy(update={"connections": "warm"})})
    with pytest.raises(NoArgumentsError, match=r"transport\.connections"):
        launch_of(changed, "megatron", "x")
