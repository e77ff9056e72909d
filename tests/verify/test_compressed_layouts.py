"""Layouts of compressed attention: each collective left out, and each sum of addends, is found by its rule alone."""

import dataclasses

import pytest

from pipeproof.comm import lower as lowering
from pipeproof.diagnostics.finding import Severity
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.typed_gpt import typed_gpt
from pipeproof.stages.describe.typed_ops import INVARIANT, PARTIAL, REPLICATED, cut
from pipeproof.verify.check_plan import check_subject
from tests.features import FEATURES
from tests.plans import subject
from tests.verify.programs import codes

COMPRESSED = FEATURES["compressed attention"]["model"]
TP = {"model": COMPRESSED, "topology": {"pp": 2, "tp": 2}}
SP = {"model": COMPRESSED, "topology": {"pp": 2, "tp": 2, "sequence_parallel": True}}
BLOCK = "compressed_sparse_attention_block"

ISSUED = {
    "tp": (TP, ["attn.out"], ["attn.compressor.in.grad", "attn.kv.in.grad", "attn.q.in.grad"]),
    "sp": (
        SP,
        ["attn.q.in", "attn.kv.in", "attn.compressor.in", "attn.indexer.in", "attn.out"],
        ["attn.out.grad", "attn.compressor.in.grad", "attn.kv.in.grad", "attn.q.in.grad"],
    ),
}
"""Collectives of the attention of the first block, forward and backward. The indexer's have no gradient."""
LEFT_OUT = [(name, label) for name, (_, *ways) in ISSUED.items() for way in ways for label in way]


@pytest.mark.parametrize("name", ISSUED)
def test_the_collectives_are_these(name):
    plan, *ways = ISSUED[name]
    one = subject(**plan)
    assert codes(one) == set()
    block = one.plan.layers[1]
    for calls, labels in zip((block.forward_collectives, block.backward_collectives), ways, strict=True):
        assert [c.label.removeprefix("layer.0.") for c in calls if ".attn." in c.label] == labels


@pytest.mark.parametrize(("name", "label"), LEFT_OUT)
def test_one_that_is_left_out_is_found_by_the_rule_of_collectives_alone(name, label):
    one = subject(**ISSUED[name][0])

    def without(calls):
        return tuple(call for call in calls if call.label != f"layer.0.{label}")

    layers = tuple(
        dataclasses.replace(
            layer, forward_collectives=without(layer.forward_collectives),
            backward_collectives=without(layer.backward_collectives),
        )
        for layer in one.plan.layers
    )  # fmt: skip
    wrong = dataclasses.replace(one, lowered=dataclasses.replace(one.plan, layers=layers))
    assert codes(wrong) == {"PP207"}


ADDENDS = ("compressor.positions", "compressor.norm")
"""Weights that every rank uses whole on all entries, for its own queries."""
OWN_TOKENS = ("q_down", "q_norm", "kv", "kv_norm", "compressor.kv", "compressor.gate")
"""Weights between layers: with sequence parallelism each rank uses them on its own tokens."""


@pytest.mark.parametrize(
    ("plan", "weight"), [*((TP, one) for one in ADDENDS), *((SP, one) for one in (*ADDENDS, *OWN_TOKENS))]
)
def test_a_sum_of_addends_that_is_left_out_is_found_by_the_rule_of_reductions_alone(plan, weight, monkeypatch):
    def unmarked(spec, *size):
        def changed(parameter):
            is_it = parameter.name == f"layer.0.attn.{weight}.weight"
            return dataclasses.replace(parameter, partial_over=()) if is_it else parameter

        layers = describe_gpt(spec, *size)
        return tuple(dataclasses.replace(layer, parameters=tuple(map(changed, layer.parameters))) for layer in layers)

    monkeypatch.setattr(lowering, "describe_layers", unmarked)
    found = [f for f in check_subject(subject(**plan)).findings if f.severity is Severity.ERROR]
    assert {f.code for f in found} == {"PP206"}
    assert all(f"`layer.0.attn.{weight}.weight` over tp" in f.message for f in found)


def test_what_the_types_mean():
    block = typed_gpt(subject(**SP).plan.spec)[BLOCK]
    for name, kind in {
        "kv_norm": cut("s"), "attn.kv.in": REPLICATED, "attn.compressor.entries": REPLICATED,
        "query": cut("a"), "mixed": cut("a"), "compressed": cut("z"),
        "attn.addends": PARTIAL, "attn.out": cut("s"),
    }.items():  # fmt: skip
        assert block.values[name].over("tp") == kind, name
    choice = block.values["attn.indexer.choice"]
    assert choice.over("tp").is_equal
    assert not choice.differentiable
    assert [name for name in block.partial_over if "indexer" in name and block.partial_over[name]] == []
    assert typed_gpt(subject(**TP).plan.spec)[BLOCK].values["kv_norm"].over("tp") == INVARIANT
