"""Empty layers have no memory, time or messages, at every position."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pipeproof.analysis.tune.repartition import layer_times, stage_times
from pipeproof.cost.plan_times import with_times
from pipeproof.diagnostics.finding import BadPlanAtError
from pipeproof.diagnostics.source import PlanFileError
from pipeproof.specs.load_plan import load_plan
from pipeproof.stages.describe.boundary import MicroBatchSize
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.layer import Layer
from pipeproof.stages.describe.model_family import input_lifetime, stage_layers, stored_activations
from pipeproof.stages.describe.op_work import layer_work
from pipeproof.stages.describe.stage_memory import state_of
from pipeproof.stages.describe.typed_gpt import typed_gpt
from pipeproof.verify.check_plan import check_subject
from pipeproof.verify.subject import make_subject
from pipeproof.views.plan_tables import render_show
from tests.plans import plan_spec, subject

BARE = [["embed", "layer.0"], ["layer.1", "layer.2", "layer.3"], ["norm", "head"]]
FILLED = [["embed", "empty.0", "layer.0"], ["layer.1", "layer.2", "layer.3", "empty.1"], ["empty.2", "norm", "head"]]
ENDS = {"empty_layers": {"head": 1, "tail": 2}}
SIZE = MicroBatchSize(8, 2)


def spec(stages=None, **sections):
    model = {**(ENDS if stages != BARE else {}), **sections.pop("model", {})}
    return plan_spec(model=model, topology={"pp": 3}, stages=stages, **sections)


@pytest.mark.parametrize("place", ["after_tail_empty", "before_tail_empty"])
def test_they_are_layers_without_weights_and_collectives(place):
    plan = spec(FILLED, model={"final_norm": place}, run={"steps": 1})
    layers = describe_gpt(plan)
    end = ["empty.1", "empty.2", "norm"] if place == "after_tail_empty" else ["norm", "empty.1", "empty.2"]
    assert [layer.name for layer in layers] == [
        "embed", "empty.0", *(f"layer.{i}" for i in range(4)), *end, "head"
    ]  # fmt: skip
    for layer in layers:
        if layer.name.startswith("empty."):
            assert layer == Layer(layer.name, ())
            assert layer_work(plan, layer.name, SIZE, 4) == ()
    typed = typed_gpt(plan)["empty"]
    assert typed.values["x"].dims == ("s", "b", "h")
    assert (typed.problems, typed.forward, typed.backward, typed.partial_over) == ((), (), (), {})
    assert "empty" not in typed_gpt(spec(BARE))


@pytest.mark.parametrize("analytic", [None, "h200"])
def test_a_plan_costs_and_holds_what_it_does_without_them(analytic):
    cost = {} if analytic is None else {"analytic": analytic}
    filled, bare = (subject(model=m, topology={"pp": 3}, stages=s, cost=cost).plan
                    for m, s in ((ENDS, FILLED), ({}, BARE)))  # fmt: skip
    assert with_times(filled.spec).cost == with_times(bare.spec).cost
    for stage in range(3):
        with_empty, without = filled.layers_of(stage), bare.layers_of(stage)
        assert state_of(filled.spec, with_empty) == state_of(bare.spec, without)
        assert stored_activations(filled.spec, with_empty, SIZE) == stored_activations(bare.spec, without, SIZE)
        assert input_lifetime(filled.spec, with_empty) == input_lifetime(bare.spec, without)
    assert filled.graph.columns.equals(bare.graph.columns)


def test_a_stage_of_them_alone_keeps_nothing_and_is_no_error():
    stages = [
        ["embed", "empty.0"],
        ["layer.0", "layer.1", "layer.2", "layer.3"],
        ["empty.1"],
        ["empty.2", "norm", "head"],
    ]
    one = subject(model=ENDS, topology={"pp": 4}, stages=stages)
    alone = one.plan.layers_of(2)
    assert stored_activations(one.plan.spec, alone, SIZE) == ()
    assert not input_lifetime(one.plan.spec, alone)
    assert state_of(one.plan.spec, alone).parameters == 0
    assert not check_subject(one).errors
    console = Console(file=io.StringIO(), width=200)
    render_show(one.plan, console)
    assert ["2", "2", "empty.1", "0"] in map(str.split, console.file.getvalue().splitlines())


def test_they_get_none_of_a_stages_time():
    times = [12, 30, 20]
    of_layers = layer_times(tuple(map(tuple, FILLED)), times)
    assert {name: time for name, time in of_layers.items() if name.startswith("empty.")} == dict.fromkeys(
        ("empty.0", "empty.1", "empty.2"), 0
    )
    assert of_layers["layer.1"] == 10
    assert of_layers == {**layer_times(tuple(map(tuple, BARE)), times), "empty.0": 0, "empty.1": 0, "empty.2": 0}
    assert stage_times((("empty.0",), ("layer.1", "empty.1")), of_layers) == (0, 10)
    assert layer_times((("embed",), ("empty.0", "empty.1"), ("head",)), [1, 4, 1])["empty.1"] == 2


def layers_of(**sections):
    return stage_layers(plan_spec(**sections))


@given(st.integers(1, 40), st.integers(1, 12))
def test_the_even_cut_holds_every_layer_once_in_order(num_layers, pp):
    sections = {"model": {"num_layers": num_layers}, "topology": {"pp": pp}}
    if num_layers < pp:
        with pytest.raises(BadPlanAtError, match="PP110"):
            layers_of(**sections)
        return
    stages = layers_of(**sections)
    names = [name for stage in stages for name in stage]
    assert names == ["embed", *(f"layer.{i}" for i in range(num_layers)), "norm", "head"]
    counts = [sum(name.startswith("layer.") for name in stage) for stage in stages]
    assert len(stages) == pp
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)


def test_stages_of_the_plan_are_taken_as_they_are():
    stages = [["embed", "layer.0"], ["layer.1", "layer.2", "layer.3", "norm", "head"]]
    assert layers_of(stages=stages) == tuple(map(tuple, stages))


def test_an_unknown_layer_is_an_error_at_its_place(tmp_path):
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "pipeproof: 1\n"
        "model: {kind: gpt, num_layers: 2, hidden_size: 8, num_heads: 2, ffn_size: 8, vocab_size: 8, seq_length: 4}\n"
        "topology: {pp: 2}\n"
        "schedule: {kind: 1f1b, num_micro_batches: 2, micro_batch_size: 1}\n"
        "stages:\n"
        "  - [embed, layer.0]\n"
        "  - [layer1, norm, head]\n"
    )
    with pytest.raises(PlanFileError) as caught:
        make_subject(load_plan(plan))
    (finding,) = caught.value.findings
    assert finding.code == "PP111"
    assert (finding.location.line, finding.location.column) == (7, 6)
    assert "did you mean `layer.1`" in finding.help


def test_too_few_layers_is_an_error_at_the_topology():
    with pytest.raises(PlanFileError, match="PP110: 2 transformer layers"):
        subject(model={"num_layers": 2}, topology={"pp": 3})
