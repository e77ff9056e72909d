"""Bound on the difference that rounding alone makes between a parallel run and the unpartitioned model, in one step."""

from __future__ import annotations

import math

import numpy as np

from pipeproof.specs.compressed_attention import CompressedAttentionSpec
from pipeproof.specs.model import MlaSpec, ModelSpec
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.layer import Layer
from pipeproof.stages.describe.layers.layer_operations import layer_operations
from pipeproof.stages.describe.layers.operations import Norm
from pipeproof.stages.describe.mtp_streams import num_modules

FAILURE_PROBABILITY = 1e-9
"""The maximum probability that a correct step is outside the bound."""


def parallel_bound(plan: PlanSpec) -> float:
    """A first-order bound of max|a - b| / max|b| for every gradient, and the loss, of one step from equal weights.

    ``a`` is added in the plan's order, ``b`` in the order of the unpartitioned model. The bound is for plans whose two
    orders differ.

    Derivation. To first order in the unit roundoff u, a computed gradient is the exact one plus a sum over all
    roundings on the paths to it: (rounding error) x (derivative of the gradient by the rounded value). Assume that
    this derivative is at most one, in units of max|b|. This holds for sums without cancellation, and for layers that
    neither reduce nor amplify relative errors (approximately true for a pre-norm block: the norm makes the scale of
    its input irrelevant). Then a gradient has the error of one sum with N additions, where N is the number of additions
    on the longest path through the model:

        forward, per block:   two norms 2H, qkv H, scores D, softmax S, mix S, out Q, gate or up H, down F
        backward, per block:  the same products transposed: down H, gate and up 2F, out H, mix D and G S,
                              softmax S, scores G S, qkv Q + 2K, and two norms 2H
        LayerNorm:            a mean H before each norm, forward and backward
        norms of heads:       D forward and 2D backward, twice for LayerNorm
        latent attention:     compress H, norm 2R, expand R, then as above with heads of their sizes; backward
                              the heads A of the shared key, expand Q + V, norm 2R, compress 2R
        experts, forward:     router H, scores E, their sum k, gate or up H, down M, visits k
        experts, backward:    down H, gate and up 2M, scores H, k and 2E, visits k, three readers 3
        compressed attention: compress H, norm 2R, expand R, softmax over slots m, then as above over N tokens and
                              entries, out of a group and all groups; backward keys that A heads share, 2 A S
        streams, forward:     norm n H, gates n H, Sinkhorn 2 t n, read n, mix n and 1, for each sub-layer
        streams, backward:    mix n, gates H, Sinkhorn 2 t n, gates n (n + 2), norm n H, three readers 3
        learned contraction:  norm n H, gates n H, read n, and back H and H
        a module (MTP):       two norms 2H, joined 2H, and back H and 2H, in addition to its block
        ends:                 two final norms 2H, head H forward and V back, softmax V
        the weight gradient:  the tokens S B of a micro-batch, then all micro-batches

    A token has Q elements of queries and K of keys, and a key has G queries. In a block with experts, k of E experts of
    inner size M (or of all shared experts, if that is more) replace the MLP. R is the larger compressed size, V the
    elements of keys without positions and of values. There are n streams, mixed by t iterations.

    The worst case is N u. But rounding errors have both signs: if each error has mean zero given the errors before it,
    Hoeffding's inequality for martingales bounds their sum by lambda sqrt(N) u, except with a probability of 2
    exp(-lambda^2 / 2) (Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019; Connolly, Higham and Mary, 43(1), 2021). The
    errors of the two orders add up to 2 N such terms. With the chosen lambda all elements of all gradients together are
    within the bound, except with ``FAILURE_PROBABILITY``.

    Without tensor or expert parallelism and sequence splits, only the additions of micro-batches differ. A tied weight
    has two addends of each, and weights that MTP streams share have one per stream. Clipped gradients are multiplied by
    a factor that has the error of the gradients again, and the error of a sum of the squares of all elements.

    The derivative of at most one is an assumption, not a theorem. A token whose choice of experts depends on rounding
    violates it: gradients jump. If the addends of a gradient nearly cancel, max|b| is small compared with them and the
    assumption is weaker. So the few scales and biases of residual streams are measured in the largest element of the
    gradients of their sub-layer's streams and of the last norm (``describe.layers.measured_with``, which also has the
    bias of the keys' norm), and biases start far apart. Measured over seeds, sizes, dtypes and both optimizers: close
    to the initial weights, differences are 9 to 100 times below the bound; with a vocabulary of two tokens, 1.4 times;
    after 60 steps of AdamW at rate 0.01, 5 times; at rate 0.1, a little above it.
    So the bound is only a scale for differences: the verdict on a run is bitwise equality with the ordered reference.

    The bound is for one step. Over several steps, AdamW divides by the size of each gradient element, so an element
    that is only rounding error moves its weight by a full learning rate in either direction, and no bound in u holds
    after an update. Compare each step from equal weights (``unpartitioned_step``).
    """
    topology, schedule = plan.topology, plan.schedule
    num_uses = _most_uses(plan)
    num_splits = topology.cp * schedule.num_sequence_splits
    num_sums = topology.dp * topology.ep * schedule.num_micro_batches * num_splits * num_uses
    if topology.tp > 1 or topology.ep > 1 or num_splits > 1:
        num_sums += _path_length(plan)
    num_elements = sum(math.prod(p.shape) for layer in _layers(plan) for p in layer.parameters)
    deviation = math.sqrt(2.0 * math.log(2.0 * num_elements / FAILURE_PROBABILITY))
    unit_roundoff = _unit_roundoff(plan.run.dtype)
    bound = deviation * math.sqrt(2.0 * num_sums) * unit_roundoff
    if plan.run.clip_norm is not None:
        bound = 2.0 * bound + deviation * math.sqrt(2.0 * num_elements) * unit_roundoff
    return bound


def _unit_roundoff(dtype: str) -> float:
    """Half the distance from 1 to the next number. numpy has no bfloat16."""
    return 2.0**-8 if dtype == "bfloat16" else float(np.finfo(dtype).eps) / 2.0


def _layers(plan: PlanSpec) -> tuple[Layer, ...]:
    return describe_gpt(plan)


def _most_uses(plan: PlanSpec) -> int:
    """The maximum number of addends of one micro-batch for a weight: one for each layer that computes with it."""
    return (1 + num_modules(plan.gpt)) * (2 if plan.gpt.tied_embedding else 1)


def _path_length(plan: PlanSpec) -> int:
    """Additions on the longest path to a weight gradient of one micro-batch."""
    model = plan.gpt
    hidden, ffn, length, vocab = model.hidden_size, model.ffn_size, model.seq_length, model.vocab_size
    head, group = model.size_of_head, model.num_heads // model.kv_heads
    queries, keys = model.num_heads * head, model.kv_heads * head
    if model.compressed_attention is not None:
        attention = _compressed_attention(model, model.compressed_attention)
    elif model.mla is None:
        attention = 2 * hidden + 2 * queries + 2 * keys + 2 * head + (3 + 2 * group) * length
    else:
        attention = _latent_attention(plan, model.mla)
    dense = 2 * hidden + 3 * ffn
    kinds = [*range(model.num_layers), *[model.num_layers - 1] * num_modules(model)]  # a module has the last block's
    blocks = sum(_experts(plan) if model.has_experts(i) else dense for i in kinds)
    blocks += (
        len(kinds) * (attention + _norms(model, "layer.0") + 2 * _streams(model)) + num_modules(model) * 7 * hidden
    )
    if model.hyper_connections is not None and model.hyper_connections.contraction == "learned":
        blocks += (1 + num_modules(model)) * (2 * model.num_streams * hidden + 2 * hidden + model.num_streams)
    return blocks + hidden + _norms(model, "norm") + 2 * vocab + length * plan.schedule.micro_batch_size


def _norms(model: ModelSpec, layer: str) -> int:
    """Additions in the norms of a layer, both ways, without those inside of latent attention.

    A norm of ``factors`` means adds as many times. Norms of heads are next to each other on the forward path.
    """
    norms = [operation for operation in layer_operations(model, layer) if isinstance(operation, Norm)]
    of_heads = [norm.factors * norm.size for norm in norms if norm.heads]
    between = sum(norm.factors * norm.size for norm in norms if not norm.name.startswith("attn."))
    return 2 * between + max(of_heads, default=0) + sum(of_heads)


def _streams(model: ModelSpec) -> int:
    """Additions on the longest path through the streams around a sub-layer, both ways."""
    spec, hidden, count = model.hyper_connections, model.hidden_size, model.num_streams
    if spec is None:
        return 0
    sinkhorn = 2 * spec.sinkhorn_iterations * count
    forward = 2 * count * hidden + sinkhorn + 2 * count + 1
    return forward + count + hidden + sinkhorn + spec.num_gates + count * hidden + 3


def _latent_attention(plan: PlanSpec, mla: MlaSpec) -> int:
    """Additions on the longest path through the attention of a block, both ways."""
    model, heads = plan.gpt, plan.gpt.num_heads
    rank, size = max(mla.q_rank or 0, mla.kv_rank), mla.nope_head_size + mla.rope_head_size
    forward = model.hidden_size + 3 * rank + size + 2 * model.seq_length + heads * mla.value_head_size
    backward = model.hidden_size + 4 * rank + heads * (size + 1) + heads * (mla.nope_head_size + mla.value_head_size)
    return forward + backward + mla.rope_head_size + size + 3 * model.seq_length


def _compressed_attention(model: ModelSpec, spec: CompressedAttentionSpec) -> int:
    """Additions on the longest path through the attention of a block of any type, both ways."""
    hidden, low, size, keys = model.hidden_size, spec.q_lora_rank, model.size_of_head, 2 * model.seq_length
    rates = spec.compress_rates
    slots = max(2 * rates.compressed_sparse_attention, rates.heavily_compressed_attention)
    heads, inner = model.num_heads, model.num_heads // spec.o_groups * size
    to_keys = max(low + low + size, slots + size)  # queries, or entries, from the products of the input on
    forward = hidden + to_keys + size + 2 * keys + inner + spec.o_groups * spec.o_lora_rank
    of_keys = 2 * heads * model.seq_length + 2 * size + 2 * slots + 2 * size
    of_queries = keys + 2 * size + heads * size + 3 * low
    return forward + hidden + spec.o_lora_rank + size + keys + max(of_keys, of_queries) + 4


def _experts(plan: PlanSpec) -> int:
    """Additions on the longest path through the experts of a block, both ways."""
    moe, hidden = plan.gpt.moe, plan.gpt.hidden_size
    assert moe is not None
    inner = moe.ffn_size * max(1, moe.num_shared_experts)
    forward = 2 * hidden + moe.num_experts + 2 * moe.top_k + inner
    return forward + 2 * hidden + 2 * inner + 2 * moe.num_experts + 2 * moe.top_k + 3
