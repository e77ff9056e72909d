"""Hyper-connections without a framework: hand-written description against types, widths, bytes, FLOPs, mistakes."""

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from math import prod

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.specs.axis_layout import INVARIANT
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.specs.plan import plan_json_schema
from pipeproof.stages.describe.boundary import MicroBatchSize
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.layer import layer_kind
from pipeproof.stages.describe.layers.layer_operations import INITIAL_SCALE, measured_with, residual_streams_of
from pipeproof.stages.describe.model_family import describe_boundaries, input_lifetime, stored_activations
from pipeproof.stages.describe.op_work import Phase, layer_work
from pipeproof.stages.describe.stage_memory import Lifetime
from pipeproof.stages.describe.synthetic import initial_weight
from pipeproof.stages.describe.typed_gpt import typed_gpt
from pipeproof.verify.check_plan import check, check_subject
from tests.describe.test_model_parts import assert_described_as_typed
from tests.plans import plan_dict, plan_spec, subject

MOE = {"num_experts": 8, "top_k": 3, "ffn_size": 8, "num_shared_experts": 1, "dense_layers": 1}
MTP = {"mtp": {"num_modules": 1, "reads": "after_norm", "embedding": "own"}}
MLA = {"kv_rank": 6, "nope_head_size": 4, "rope_head_size": 2, "value_head_size": 3}


def spec_of(streams, model=(), **sections):
    sections = {"topology": {"pp": 1}, **sections}
    model = {"seq_length": 16, "hyper_connections": {"streams": streams}, **dict(model)}
    return plan_spec(model=model, **sections)


@settings(max_examples=60, deadline=None)
@given(
    streams=st.integers(2, 5),
    num_layers=st.integers(2, 4),
    model=st.sampled_from([{}, {"moe": MOE}, {"mla": MLA}, {"mtp": {"num_modules": 2, "magic_send": True}}, MTP]),
    more=st.sampled_from([{}, {"transposed": True}, {"sinkhorn": "softmax", "epsilon": 0.1, "contraction": "learned"}]),
    tp=st.sampled_from([1, 2]),
    cp=st.sampled_from([1, 2]),
    ep=st.sampled_from([1, 2]),
    sp=st.booleans(),
    size=st.sampled_from([None, MicroBatchSize(32, 1), MicroBatchSize(8, 3)]),
)
def test_the_description_by_hand_is_what_the_types_say(streams, num_layers, model, more, tp, cp, ep, sp, size):
    topology = {"pp": 1, "tp": tp, "cp": cp, "ep": ep, "sequence_parallel": sp}
    model = {"num_layers": num_layers, **model, "hyper_connections": {"streams": streams, **more}}
    assert_described_as_typed(spec_of(streams, model, topology=topology), size)


OF_STREAMS = {
    "hyper_connections": {"streams": 3, "contraction": "learned"},
    "mtp": {"num_modules": 1, "reads": "streams", "magic_send": True},
}


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("ranks", [{}, {"tp": 2}, {"ep": 2}, {"tp": 2, "ep": 2}])
def test_a_module_of_all_streams_is_what_the_types_say(ranks, sp):
    spec = spec_of(3, {**OF_STREAMS, "moe": MOE}, topology={"pp": 1, **ranks, "sequence_parallel": sp})
    assert_described_as_typed(spec, None)


def test_a_module_of_all_streams_reads_them_before_the_main_model_contracts_them():
    cut = [["embed", "layer.0", "layer.1", "layer.2", "layer.3"], ["mtp.0"], ["norm", "head"]]
    spec = spec_of(3, OF_STREAMS, topology={"pp": 3}, stages=cut)
    shapes = [edge.members(0)[0].shape for edge in describe_boundaries(spec)]
    assert shapes == [(16, 2, 3 * 16), (16, 2 * 2, 16)]  # then rows of the main model and of the module
    own = {p.name.split(".", 2)[2]: p.shape for p in describe_gpt(spec)[-3].parameters if "streams" in p.name}
    assert own["main_streams.weight"] == own["out_streams.weight"] == (48, 3)
    assert not any("out_streams" in p.name for p in describe_gpt(spec)[4].parameters)
    assert check(plan_from_dict(spec.model_dump(mode="json"))).certificate


@pytest.mark.parametrize("sp", [False, True])
def test_a_block_has_two_sets_of_three_weights_that_every_tensor_parallel_rank_holds(sp):
    spec = spec_of(4, topology={"pp": 1, "tp": 2, "sequence_parallel": sp})
    own = [p for p in describe_gpt(spec)[2].parameters if "_streams." in p.name]
    assert {p.name: p.shape for p in own} == {
        f"layer.1.{at}_streams.{end}": shape
        for at in ("attn", "mlp")
        for end, shape in {"weight": (4 * 16, 24), "scale": (3,), "bias": (24,)}.items()
    }
    assert {(p.tp, p.partial_over) for p in own} == {(INVARIANT, ("tp",) if sp else ())}
    assert initial_weight(own[1], 0, "float32").tolist() == pytest.approx([INITIAL_SCALE] * 3)
    ends = [f"layer.1.mlp_streams.{end}" for end in ("weight", "scale", "bias")]
    assert measured_with(ends[0]) == (ends[1], ends[2])
    assert measured_with(ends[1]) == (ends[0], ends[2], "norm.weight")
    assert measured_with(ends[2]) == (ends[0], ends[1], "norm.weight")
    assert measured_with("layer.3.out_streams.weight")[-1] == "norm.weight"
    assert measured_with("layer.1.mlp_norm.weight") == ()


def test_the_ends_of_the_blocks_make_several_streams_of_one_and_one_of_several():
    found = [residual_streams_of(spec_of(3, {"num_layers": 3}).model, f"layer.{i}") for i in range(3)]
    assert [(one.count, one.spec.sinkhorn_iterations, one.expands, one.contracts) for one in found] == [
        (3, 20, True, False), (3, 20, False, False), (3, 20, False, True),
    ]  # fmt: skip
    only = residual_streams_of(spec_of(3, {"num_layers": 1}).model, "layer.0")
    assert (only.expands, only.contracts) == (True, True)
    assert residual_streams_of(spec_of(3).model, "norm") is None


LAYERS = ["embed", "layer.0", "layer.1", "layer.2", "layer.3", "norm", "head"]


@settings(max_examples=60, deadline=None)
@given(cuts=st.lists(st.sampled_from(range(1, 7)), min_size=1, max_size=5, unique=True), sp=st.booleans())
def test_every_edge_is_as_wide_as_the_activation_before_it(cuts, sp):
    bounds = [0, *sorted(cuts), 7]
    stages = [LAYERS[a:b] for a, b in pairwise(bounds)]
    topology = {"pp": len(stages), "tp": 2, "sequence_parallel": sp}
    for order, shape in (("sbh", (16, 2)), ("bsh", (2, 16))):
        spec = spec_of(3, {"activation_order": order}, topology=topology, stages=stages)
        typed = typed_gpt(spec)
        for names, edge in zip(stages, describe_boundaries(spec), strict=False):
            ((tensor,),) = edge.variants
            width = 3 * 16 if names[-1] in ("layer.0", "layer.1", "layer.2") else 16
            assert tensor.shape == (*shape, width)
            assert tensor.tp.dim == (order.index("s") if sp else None)
            made = typed[layer_kind(spec.model, names[-1])]
            (result,) = made.program.results
            assert prod(made.program.sizes[dim] for dim in result.dims) == prod(tensor.shape)


def test_a_declared_tensor_is_as_wide_as_its_edge():
    stages = [["embed"], ["layer.0", "layer.1"], ["layer.2", "layer.3"], ["norm", "head"]]
    spec = spec_of(2, topology={"pp": 4}, stages=stages, boundaries=[{"name": "hidden", "dims": "sbh"}])
    assert [edge.members(0)[0].shape[-1] for edge in describe_boundaries(spec)] == [16, 32, 16]


def test_plans_are_proved_and_the_width_is_in_what_is_sent_and_shown():
    plan = subject(model={"hyper_connections": {"streams": 3}}, topology={"pp": 2, "tp": 2})
    report = check_subject(plan)
    assert report.certificate is not None
    assert {tensor.numel for tensor in plan.graph.tensors} == {8 * 2 * 48}
    assert [one.boundary_bytes for one in report.in_flight] == [2 * 4 * 8 * 2 * 16] * 2 + [4 * 8 * 2 * 48] * 2
    one_stream = subject(topology={"pp": 2, "tp": 2})
    assert {tensor.numel for tensor in one_stream.graph.tensors} == {8 * 2 * 16}


def owes_nothing(parameter):
    return replace(parameter, partial_over=()) if "_streams." in parameter.name else parameter


def test_a_sum_that_sequence_parallelism_owes_these_weights_is_asked_for():
    one = subject(model={"hyper_connections": {"streams": 2}}, topology={"pp": 1, "tp": 2, "sequence_parallel": True})
    layers = tuple(replace(layer, parameters=tuple(map(owes_nothing, layer.parameters))) for layer in one.plan.layers)
    found = check_subject(replace(one, lowered=replace(one.lowered, layers=layers))).findings
    assert {f.code for f in found if "_streams." in f.message} >= {"PP206"}


def held(spec, *names):
    return stored_activations(
        spec, [layer for layer in describe_gpt(spec) if layer.name in names], MicroBatchSize(16, 2)
    )


def total(holdings, *lives):
    return sum(one.num_bytes for one in holdings if one.lifetime in lives)


@pytest.mark.parametrize("sp", [False, True])
def test_bytes_of_a_block_with_streams(sp):
    """n streams around each of two sub-layers: the streams, their norm, gates and mixes, results."""
    topology = {"pp": 1, "tp": 2, "sequence_parallel": sp}
    several, one = spec_of(4, topology=topology), plan_spec(model={"seq_length": 16}, topology=topology)  # fmt: skip
    tokens, n, hidden, gates = Fraction(16 * 2, 2 if sp else 1), 4, 16, 24
    forward = (Lifetime.TO_INPUT, Lifetime.TO_WEIGHT)
    more = total(held(several, "layer.1"), *forward) - total(held(one, "layer.1"), *forward)
    assert more == 2 * 4 * tokens * (n * hidden + 1 + n * hidden + gates + n * n + gates + hidden)
    between = total(held(several, "layer.1"), Lifetime.BETWEEN) - total(held(one, "layer.1"), Lifetime.BETWEEN)
    assert between == 2 * 4 * tokens * 2 * gates


def test_recomputation_keeps_what_a_block_is_given():
    spec = spec_of(4, memory={"recompute": "full"})
    kept = [total(held(spec, f"layer.{i}"), Lifetime.TO_INPUT, Lifetime.TO_WEIGHT) for i in range(4)]
    assert kept == [4 * 32 * 16, *[4 * 32 * 4 * 16] * 3]
    stages = {name: [layer for layer in describe_gpt(spec) if layer.name == name] for name in ("layer.0", "layer.1")}
    assert all(input_lifetime(spec, layers) is Lifetime.TO_INPUT for layers in stages.values())
    plain = spec_of(4)
    assert [input_lifetime(plain, layers) for layers in stages.values()] == [None, Lifetime.TO_INPUT]


def test_flops_of_what_reads_and_mixes():
    """Of 32 tokens and 4 streams: the gates' product both ways and for the weight; the other passes by their sums."""
    spec, size = spec_of(4), MicroBatchSize(16, 2)
    works = [work for work in layer_work(spec, "layer.1", size, 4) if ".streams." in work.name]
    assert not any(work.name == "attn.add" for work in layer_work(spec, "layer.1", size, 4))
    by_name = {(work.name, work.phase): work for work in works}
    for phase in Phase:
        assert by_name["attn.streams.gates", phase].flops == 2 * 32 * 64 * 24
        assert not by_name["attn.streams.gates", phase].narrow
    assert by_name["mlp.streams.mix", Phase.FORWARD].flops == 32 * 16 * 2 * 4 * 5
    assert by_name["mlp.streams.mix", Phase.FORWARD].num_bytes == 4 * 32 * 16 * 9
    assert by_name["mlp.streams.read", Phase.FORWARD].num_bytes == 4 * 32 * 16 * 5
    assert by_name["mlp.streams.sinkhorn", Phase.FORWARD].flops == 32 * 16 * (2 * 20 * 3 + 1)
    ends = [{work.name for work in layer_work(spec, f"layer.{i}", size, 4)} for i in range(4)]
    assert ["streams.open" in names for names in ends] == [True, False, False, False]
    assert ["streams.close" in names for names in ends] == [False, False, False, True]


def test_computed_times_know_the_streams():
    def times(model):
        plan = subject(model=model, topology={"pp": 4}, cost={"analytic": "h200"}).plan
        return plan.spec.cost.forward_us

    one, several = times({}), times({"hyper_connections": {"streams": 4}})
    assert all(b > a for a, b in zip(one, several, strict=True))
    by_token = {"moe": {**MOE, "dense_layers": 1, "hash_layers": 1}}  # three kinds of blocks
    dense, hashed, *scored = times(by_token)
    assert hashed == scored[0]
    assert list(times({"moe": {**MOE, "dense_layers": 1}})) == [dense, hashed, *scored]


def test_modules_that_send_tokens_by_magic_go_with_streams():
    mtp = {"num_modules": 1, "magic_send": True}
    assert check(plan_from_dict(plan_dict(model={"hyper_connections": {"streams": 2}, "mtp": mtp}))).certificate


def test_the_last_block_and_modules_have_a_gate_for_the_learned_contraction():
    model = {
        "mtp": {"num_modules": 1, "magic_send": True},
        "hyper_connections": {"streams": 4, "contraction": "learned"},
    }
    own = [p for layer in describe_gpt(spec_of(4, model)) for p in layer.parameters if ".out_streams." in p.name]
    assert {p.name: p.shape for p in own} == {
        f"{block}.out_streams.{end}": shape
        for block in ("layer.3", "mtp.0")
        for end, shape in {"weight": (4 * 16, 4), "scale": (1,), "bias": (4,)}.items()
    }


def test_right_ones_stay_what_they_are():
    loaded = plan_from_dict(plan_dict(model={"hyper_connections": {"streams": 4}}))
    assert plan_from_dict(loaded.spec.model_dump(mode="json")).spec == loaded.spec
    assert loaded.spec.model.num_streams == 4
    assert jsonschema.Draft202012Validator(plan_json_schema()).is_valid(
        plan_dict(model={"hyper_connections": {"streams": 4}})
    )
    assert plan_spec().model.num_streams == 1
    assert check(loaded).certificate is not None
