"""Compressed attention against the DeepSeek-V4 of transformers, in float64: outputs and all gradients.

transformers computes norms, rotations and softmaxes in float32 at least. Here its float32 is float64: both then differ
by the rounding of float64 alone.
"""

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from pipeproof.stages.common.dropout import Dropouts
from pipeproof.stages.describe.boundary import MicroBatchSize
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.layers.layer_operations import layer_operations
from pipeproof.stages.describe.layers.operations import CompressedCore, Weight, weights_of
from pipeproof.stages.describe.op_work import ComputeUnit, Phase, layer_work
from pipeproof.stages.describe.synthetic import DropoutKeys
from pipeproof.stages.torch import weights as torch_weights
from pipeproof.stages.torch.backend_ops import OPS
from pipeproof.stages.torch.stage import TorchStage
from tests.stages.torch.features import make_plan
from tests.stages.torch.staged_run import CPU

pytestmark = pytest.mark.needs_torch

TYPES = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
ROUNDING = 1e-12
"""Bound of the largest difference, in units of the largest element of each tensor; 2.7e-15 was the most."""

SIZES = {
    "small": (
        {"hidden_size": 16, "num_heads": 4, "head_size": 6, "seq_length": 13},
        {"q_lora_rank": 5, "qk_rope_head_dim": 4, "sliding_window": 3, "o_groups": 2, "o_lora_rank": 3,
         "index_n_heads": 5, "index_head_dim": 4, "index_topk": 2,
         "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 5}},
    ),
    "as released, smaller": (
        {"hidden_size": 32, "num_heads": 8, "head_size": 16, "seq_length": 40},
        {"q_lora_rank": 12, "qk_rope_head_dim": 4, "sliding_window": 8, "o_groups": 4, "o_lora_rank": 6,
         "index_n_heads": 8, "index_head_dim": 8, "index_topk": 3,
         "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16}},
    ),
    "whole heads are rotated, all entries are chosen": (
        {"hidden_size": 24, "num_heads": 6, "head_size": 8, "seq_length": 21},
        {"q_lora_rank": 7, "qk_rope_head_dim": 8, "sliding_window": 50, "o_groups": 6, "o_lora_rank": 5,
         "index_n_heads": 6, "index_head_dim": 8, "index_topk": 30,
         "compress_rates": {"compressed_sparse_attention": 3, "heavily_compressed_attention": 7}},
    ),
    "packed documents, YaRN": (
        {"hidden_size": 24, "num_heads": 4, "head_size": 12, "seq_length": 31},
        {"q_lora_rank": 7, "qk_rope_head_dim": 8, "sliding_window": 6, "o_groups": 2, "o_lora_rank": 5,
         "index_n_heads": 9, "index_head_dim": 8, "index_topk": 2, "documents": [11, 1, 14, 5],
         "rope_scaling": {"factor": 16.0, "original_max_position_embeddings": 400, "beta_fast": 32, "beta_slow": 0.1},
         "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 5}},
    ),
}  # fmt: skip

NAMES = {
    "q_down.weight": "q_a_proj.weight", "q_norm.weight": "q_a_norm.weight", "q_up.weight": "q_b_proj.weight",
    "kv.weight": "kv_proj.weight", "kv_norm.weight": "kv_norm.weight", "sinks.weight": "sinks",
    "groups.weight": "o_a_proj.weight", "out.weight": "o_b_proj.weight",
    "compressor.kv.weight": "compressor.kv_proj.weight", "compressor.gate.weight": "compressor.gate_proj.weight",
    "compressor.positions.weight": "compressor.position_bias", "compressor.norm.weight": "compressor.kv_norm.weight",
    "indexer.kv.weight": "compressor.indexer.kv_proj.weight",
    "indexer.gate.weight": "compressor.indexer.gate_proj.weight",
    "indexer.positions.weight": "compressor.indexer.position_bias",
    "indexer.norm.weight": "compressor.indexer.kv_norm.weight",
    "indexer.q.weight": "compressor.indexer.q_b_proj.weight",
    "indexer.heads.weight": "compressor.indexer.scorer.weights_proj.weight",
}  # fmt: skip


class Wide:
    """PyTorch, whose float32 is float64."""

    float = float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@pytest.fixture(name="oracle")
def oracle_():
    """Return transformers' modules, in float64 throughout."""
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    rotations = pytest.importorskip("transformers.modeling_rope_utils")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling, "torch", Wide())
        patch.setattr(rotations, "torch", Wide())
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield modeling


def config_of(oracle, model, spec):
    yarn = spec.get("rope_scaling")
    return oracle.DeepseekV4Config(
        num_hidden_layers=3, layer_types=list(TYPES), hidden_size=model["hidden_size"], vocab_size=11,
        num_attention_heads=model["num_heads"], head_dim=model["head_size"], attn_implementation="eager",
        partial_rotary_factor=spec["qk_rope_head_dim"] / model["head_size"],
        **({} if yarn is None else {"rope_parameters": {"rope_type": "yarn", **yarn}}),
        **{key: value for key, value in spec.items() if key not in {"qk_rope_head_dim", "documents", "rope_scaling"}},
    )  # fmt: skip


def index_rotary(oracle, config, spec):
    """The indexer rotates as many elements as a head does, whatever its size."""
    rotary = oracle.DeepseekV4RotaryEmbedding(config)
    assert 2 * len(rotary.compress_inv_freq) == spec["qk_rope_head_dim"]
    return rotary


def theirs(oracle, model, spec, kind, weights, x, gradient):
    """Output and gradients of transformers' attention; weights of the plan's names and shapes."""
    config = config_of(oracle, model, spec)
    layer = oracle.DeepseekV4Attention(config, TYPES.index(kind)).double()
    shapes = {name: value.shape for name, value in layer.named_parameters()}
    assert {NAMES[name] for name in weights} == shapes.keys()
    layer.load_state_dict(
        {NAMES[name]: as_theirs(name, value).reshape(shapes[NAMES[name]]) for name, value in weights.items()}
    )
    rotary = index_rotary(oracle, config, spec)

    def alone(x):
        positions = torch.arange(x.shape[1]).unsqueeze(0)
        tables = {label: rotary(x, position_ids=positions, layer_type=label) for label in ("main", "compress")}
        mask = oracle.create_sliding_window_causal_mask(
            config=config, inputs_embeds=x, attention_mask=None, past_key_values=None, position_ids=positions,
            allow_is_causal_skip=False,
        )  # fmt: skip
        return layer(x, tables, positions, mask)[0]

    leaf = x.clone().requires_grad_()
    if (documents := spec.get("documents")) is None:
        output = alone(leaf)
    else:
        rows = [own.split(documents[r:] + documents[:r], 1) for r, own in enumerate(leaf.split(1))]
        output = torch.cat([torch.cat([alone(document) for document in row], 1) for row in rows])
    output.backward(gradient)
    by_name = dict(layer.named_parameters())
    gradients = {name: by_name[NAMES[name]].grad for name in weights}
    back = {name: None if g is None else as_ours(name, g, weights[name].shape) for name, g in gradients.items()}
    return output.detach(), leaf.grad, back


def as_theirs(name, value):
    return value.transpose(-2, -1) if value.dim() > 1 and "positions" not in name else value


def as_ours(name, value, shape):
    if value.dim() < 2 or "positions" in name:
        return value
    transposed = (*shape[:-2], shape[-1], shape[-2])
    return value.reshape(transposed).transpose(-2, -1)


def stage_of(model, spec, kind, weights, order):
    plan = make_plan(
        "plain",
        model={
            **model,
            "num_layers": 1,
            "activation_order": order,
            "compressed_attention": {**spec, "layer_types": [kind]},
        },
    )
    stage = TorchStage(plan, describe_gpt(plan), CPU)
    for name, value in weights.items():
        stage.parameters[f"layer.0.attn.{name}"].main.copy_(value)
    return plan, stage


def ours(plan, stage, x, gradient):
    is_first = plan.gpt.activation_order == "sbh"
    leaf = (x.transpose(0, 1) if is_first else x).clone(memory_format=torch.contiguous_format).requires_grad_()
    dropouts = Dropouts(OPS, DropoutKeys(plan, 0, 0), 0, stage._region)
    output = stage._attention(leaf, "layer.0.attn", 0, 0, dropouts)
    stage.backward_input(output, gradient.transpose(0, 1) if is_first else gradient).accumulate()
    output, back = (y.transpose(0, 1) if is_first else y for y in (output.detach(), leaf.grad))
    prefix = "layer.0.attn."
    return (
        output,
        back,
        {n.removeprefix(prefix): w.gradient for n, w in stage.parameters.items() if n.startswith(prefix)},
    )


def drawn(model, spec, kind, seed):
    """Weights that all matter: norms near one, sinks and biases of positions that differ."""
    _, stage = stage_of(model, spec, kind, {}, "bsh")
    random = torch.Generator().manual_seed(seed)

    def draw(shape):
        return torch.randn(shape, dtype=torch.float64, generator=random)

    prefix, weights = "layer.0.attn.", {}
    for name, weight in stage.parameters.items():
        if name.startswith(prefix):
            scale = 1.0 if "sinks" in name or "positions" in name else 0.4
            weights[name.removeprefix(prefix)] = draw(weight.main.shape) * scale + ("norm" in name)
    x = draw((2, model["seq_length"], model["hidden_size"]))
    return weights, x, draw(x.shape)


def assert_near(made, expected, what):
    assert made.shape == expected.shape
    worst = (made - expected).abs().max() / expected.abs().max()
    assert worst < ROUNDING, f"{what}: {worst:.3g}"


@pytest.mark.parametrize("kind", TYPES)
def test_the_sinks_have_the_slopes_of_the_loss(kind):
    """Both halves of the heads have sinks and slopes that differ."""
    model, spec = SIZES["small"]
    weights, x, gradient = drawn(model, spec, kind, seed=7)
    sinks = weights["sinks.weight"] = torch.tensor([-2.0, 0.5, 1.5, 3.0], dtype=torch.float64)

    def loss_at(moved):
        plan, stage = stage_of(model, spec, kind, {**weights, "sinks.weight": moved}, "bsh")
        return float((ours(plan, stage, x, gradient)[0] * gradient).sum())

    found = ours(*stage_of(model, spec, kind, weights, "bsh"), x, gradient)[2]["sinks.weight"]
    step = 1e-5
    units = torch.eye(4, dtype=torch.float64) * step
    slopes = [(loss_at(sinks + unit) - loss_at(sinks - unit)) / (2 * step) for unit in units]
    slopes = torch.tensor(slopes, dtype=torch.float64)
    assert torch.allclose(found, slopes, rtol=1e-6, atol=1e-8)
    largest = slopes.abs().max()
    assert ((slopes[:2] - slopes[2:]).abs() > 0.02 * largest).all()  # halves in another order would be seen,
    assert (slopes.abs() > 0.005 * largest).all()  # as would none


@pytest.mark.parametrize("kind", TYPES)
def test_flops_are_those_that_pytorch_counts(kind, monkeypatch):
    """FLOPs of products, in F, I and W. Forward and backward compute all pairs, as counted for unfused attention."""
    monkeypatch.setattr(torch_weights, "add_product", lambda buffer, left, right: buffer.add_(left @ right))
    model, spec = SIZES["as released, smaller"]
    weights, x, gradient = drawn(model, spec, kind, seed=5)
    plan, stage = stage_of(model, spec, kind, weights, "bsh")
    dropouts = Dropouts(OPS, DropoutKeys(plan, 0, 0), 0, stage._region)
    counters = {phase: FlopCounterMode(display=False) for phase in Phase}
    with counters[Phase.FORWARD]:
        output = stage._attention(x.requires_grad_(), "layer.0.attn", 0, 0, dropouts)
    with counters[Phase.INPUT]:
        deferred = stage.backward_input(output, gradient)
    with counters[Phase.WEIGHT]:
        deferred.accumulate()
    works = layer_work(plan, "layer.0", MicroBatchSize(model["seq_length"], 2), 8, flash=False)
    products = [work for work in works if work.name.startswith("attn.") and work.unit is not ComputeUnit.VECTOR]
    for phase, counter in counters.items():
        assert counter.get_total_flops() == sum(work.flops for work in products if work.phase is phase) > 0, phase


def test_flash_attention_counts_the_pairs_that_queries_see():
    sizes = itertools.product(range(1, 14), (1, 3, 20), (None, 1, 2, 4), (None, 1, 2, 50))
    for length, window, rate, top_k in sizes:
        pairs = 0
        for query in range(length):
            entries = 0 if rate is None else (query + 1) // rate
            pairs += min(query + 1, window) + min(entries, entries if top_k is None else top_k)
        core = CompressedCore("core", 1, 1, window, Weight("sinks", (1,)), rate, top_k)
        assert core.seen(length) == pairs
        assert core._replace(documents=(5, length)).seen(length + 5) == core.seen(5) + pairs


@pytest.mark.needs("transformers")
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kind", TYPES)
def test_outputs_and_gradients_are_those_of_transformers(sizes, kind, oracle):
    model, spec = SIZES[sizes]
    weights, x, gradient = drawn(model, spec, kind, seed=5)
    expected, of_input, of_weights = theirs(oracle, model, spec, kind, weights, x, gradient)
    for order in ("bsh", "sbh"):
        plan, stage = stage_of(model, spec, kind, weights, order)
        made, back, gradients = ours(plan, stage, x, gradient)
        assert_near(made, expected, "output")
        assert_near(back, of_input, "gradient of the input")
        operations = layer_operations(plan.gpt, "layer.0")
        trained = {f"layer.0.{weight.name}" for one in operations for weight in weights_of(one)[0] if weight.trained}
        for name, value in of_weights.items():
            assert (value is not None) == (f"layer.0.attn.{name}" in trained), name
            if value is None:
                assert not gradients[name].any(), name
            else:
                assert_near(gradients[name], value, name)
