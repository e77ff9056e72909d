import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeproof.diagnostics.finding import BadPlanAtError
from pipeproof.diagnostics.source import PlanFileError
from pipeproof.specs.load_plan import load_plan, plan_from_dict
from pipeproof.stages.describe.model_family import stage_layers
from pipeproof.verify.subject import make_subject
from tests.plans import plan_dict


def layers_of(**sections):
    return stage_layers(plan_from_dict(plan_dict(**sections)).spec)


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
        make_subject(plan_from_dict(plan_dict(model={"num_layers": 2}, topology={"pp": 3})))
