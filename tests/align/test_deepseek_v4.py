"""Faults planted into each layer of DeepSeek-V4: an alignment finds every one, and names its layer and direction."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import paddle
import pytest
from paddle.nn import functional as F

from pipeproof.stages.common import compressed_attention, stage
from pipeproof.stages.common.compressed_attention import CompressedAttention
from pipeproof.stages.common.embedding_and_head import EmbeddingAndHead
from pipeproof.stages.paddle.backend_ops import OPS
from pipeproof.stages.paddle.experts import PaddleBalance, PaddleExperts
from pipeproof.stages.paddle.stage import PaddleStage
from pipeproof.stages.paddle.weights import SplitWeights
from tests.align.recorded_plan import record, reference_run
from tests.cli.commands import invoke
from tests.features import FEATURES
from tests.plans import subject

pytestmark = [pytest.mark.needs_paddle, pytest.mark.usefixtures("paddle_started")]

SPARSE, SLIDING, HEAVY = "compressed_sparse_attention", "sliding_attention", "heavily_compressed_attention"
LIMIT = 0.05
MODEL = {
    "num_layers": 3, "head_size": 8, "seq_length": 16,
    "compressed_attention": {
        **FEATURES["packed documents"]["model"]["compressed_attention"], "documents": [10, 1, 5],
    },
    "hyper_connections": {
        **FEATURES["hyper-connections of DeepSeek-V4"]["model"]["hyper_connections"], "epsilon": 1e-3,
    },
    "moe": {
        "num_experts": 6, "top_k": 2, "ffn_size": 8, "num_shared_experts": 1, "score": "sqrtsoftplus",
        "hash_layers": 1, "routed_scale": 1.5, "expert_bias_rate": 0.3,
    },
    "swiglu_limit": LIMIT, "swiglu_formula": "silu",
    "mtp": {"num_modules": 1, "reads": "after_norm", "embedding": "own"},
}  # fmt: skip
"""Blocks with sparse entries and a table of experts, with a window alone, with all entries; then a module."""


@pytest.fixture(scope="module")
def trained():
    plan = subject(
        model=MODEL, topology={"pp": 1}, schedule={"num_micro_batches": 1, "micro_batch_size": 2},
        run={"steps": 2, "seed": 3},
    ).plan  # fmt: skip
    return plan, reference_run(plan)


class Fault(NamedTuple):
    """In ``block`` alone, call ``change`` with a function, its attribute of ``owner``, and with its arguments.

    Outside of all blocks, as where tables are made, it is called, too. The first output that differs is in this
    ``direction``, or else the first difference is the gradient of ``parameter``. Biases of routers are zero before
    ``step`` 1.
    """

    block: str
    owner: Any
    attribute: str
    change: Callable[..., Any]
    direction: str = "forward"
    parameter: str | None = None
    step: int = 0

    def plant(self, patch):
        """Plant it into all stages that are made until ``patch`` ends."""
        running = [None]

        def within(right):
            def wrapper(*args, name, **rest):
                running.append(name)
                try:
                    args[0].latest = right(*args, name=name, **rest)
                    return args[0].latest
                finally:
                    running.pop()

            return wrapper

        right = getattr(self.owner, self.attribute)

        def planted(*args, **rest):
            if running[-1] in (None, self.block):
                return self.change(right, *args, **rest)
            return right(*args, **rest)

        is_static = isinstance(vars(self.owner).get(self.attribute), staticmethod)
        patch.setattr(self.owner, self.attribute, staticmethod(planted) if is_static else planted)
        for method in ("_block", "_module"):
            patch.setattr(PaddleStage, method, within(getattr(PaddleStage, method)))

    @property
    def tensor(self):
        """The name of the first tensor that differs."""
        if self.parameter:
            return {"kind": "gradient", "layer": self.block, "parameter": self.parameter}
        return {"layer": self.block, "direction": self.direction, "side": "output"}


def unnormed(block, norm):
    """Leave out a norm."""
    return Fault(
        block, PaddleStage, "_norm",
        lambda right, self, x, name: x if name == f"{block}.{norm}" else right(self, x, name),
    )  # fmt: skip


def attention_of(block, kind, **keys):
    """Make the tables of a type of attention for another one."""

    def change(right, ops, spec, of, *sizes):
        return right(ops, spec.model_copy(update=keys) if of == kind else spec, of, *sizes)

    return Fault(block, compressed_attention, "_tables", change)  # fmt: skip


def tables_of(block, kind, change):
    """Change the tables of a type of attention."""

    def changed(right, ops, spec, of, *sizes):
        tables = right(ops, spec, of, *sizes)
        return tables._replace(**change(tables)) if of == kind else tables

    return Fault(block, compressed_attention, "_tables", changed)


def method(block, name, change, direction="forward"):
    return Fault(block, CompressedAttention, name, change, direction)


def streams_of(block, **keys):
    """Connect by another formula."""
    return Fault(
        block, stage, "with_streams",
        lambda right, ops, x, sub, spec, *weights: right(ops, x, sub, spec.model_copy(update=keys), *weights),
    )  # fmt: skip


def choice(block, change, step=0):
    return Fault(block, PaddleExperts, "_choose", change, step=step)


def routed(block, **keys):
    """Choose experts by another formula."""
    return choice(block, lambda right, x, moe, *given: right(x, moe.model_copy(update=keys), *given))


def activation(block, change):
    return Fault(block, PaddleExperts, "_activation", change)


def seen_early(tables):
    near, far = paddle.split(tables.unseen, [16, tables.unseen.shape[-1] - 16], -1)
    return {"unseen": paddle.concat([near, paddle.concat([far[:, 1:], far[:, -1:]], 1)], -1)}


def rotated_first(right, self, heads, cos, sin):
    size = 2 * cos.shape[-1]
    return paddle.roll(right(self, paddle.roll(heads, size, -1), cos, sin), -size, -1)


def rotated_halves(right, self, heads, cos, sin):
    if heads.shape[-1] > 2 * cos.shape[-1]:
        return right(self, heads, cos, sin)
    a, b = paddle.chunk(heads, 2, -1)
    return paddle.concat([a * cos - b * sin, b * cos + a * sin], -1)


def rotated_output(right, self, mixed, name):
    tables = self._tables[SLIDING, 16]
    return right(self, self._rotated(mixed, tables.cos, tables.sin), name)


def without_sinks(right, self, query, keys, *, sinks, unseen):
    return right(self, query, keys, sinks=paddle.zeros_like(sinks) - np.inf, unseen=unseen)


def sinkless_backward(right, self, query, keys, **rest):
    """Forward is right; backward takes probabilities that add up to one without the sink."""
    value, other = right(self, query, keys, **rest), without_sinks(right, self, query, keys, **rest)
    return other - other.detach() + value.detach()


def without_overlap(right, self, windows, missing, *begins):
    first, second = paddle.chunk(right(self, windows, missing, *begins), 2, 2)
    return paddle.concat([paddle.zeros_like(first) + missing, second], 2)


def index_of_another_document(right, self, x, low, name, tables):
    """The indexer chooses among all earlier entries, whatever their document."""
    rows, length = tables.unseen.shape[:2]
    tokens = tables.tokens.reshape([rows, -1, 2]).numpy()
    ends = tokens[:, None, :, -1] - np.arange(rows)[:, None, None] * length
    far = paddle.to_tensor(np.where(ends <= np.arange(length)[None, :, None], 0.0, -np.inf).astype("f4"))
    return right(self, x, low, name, tables._replace(unseen=paddle.concat([tables.unseen[:, :, :length], far], -1)))


def biased_weights(right, logits, moe, bias=None, fixed=None):
    chosen, gains = right(logits, moe, bias, fixed)
    return chosen, gains if bias is None else gains + paddle.to_tensor(bias[chosen])


def before_the_norm(right, self, hidden, *embedding, **rest):
    """The module reads the last block, and not the norm behind it."""
    return right(self, self.latest, *embedding, **rest)


FAULTS = {
    # a window of near tokens, and the sink
    "window off by one": attention_of("layer.1", SLIDING, sliding_window=4),
    "sink left out": method("layer.1", "_mixed", without_sinks),
    "sink left out of the backward": method("layer.1", "_mixed", sinkless_backward, "backward"),
    "sinks without a gradient": Fault(
        "layer.1", SplitWeights, "deferred",
        lambda right, self, w: right(self, w) if len(w.shape) > 1 else self.fixed(w),
        parameter="layer.1.attn.sinks.weight",
    ),
    "scale of scores applied twice": method(
        "layer.1", "_mixed", lambda right, self, query, keys, **rest: right(self, query * 8**-0.5, keys, **rest)
    ),
    # queries of low rank, the one head of keys and values, positions
    "compressed query not normed": unnormed("layer.1", "attn.q_norm"),
    "heads of queries not normed": Fault(
        "layer.1", type(OPS), "rms_norm", lambda right, x: x if len(x.shape) == 4 else right(x)
    ),
    "key not normed": unnormed("layer.1", "attn.kv_norm"),
    "half a gradient of the shared head": method(
        "layer.1", "_mixed",
        lambda right, self, query, keys, **rest: right(self, query, (keys + keys.detach()) * 0.5, **rest), "backward",
    ),
    "first elements rotated": method("layer.1", "_rotated", rotated_first),
    "halves rotated in place of neighbours": method("layer.1", "_rotated", rotated_halves),
    "output left rotated": method("layer.1", "_compressed", rotated_output),
    "base of the other blocks": attention_of("layer.1", SLIDING, rope_theta=160_000.0),
    "rotation not stretched": attention_of("layer.2", HEAVY, rope_scaling=None),
    # compressors
    "compressor without overlap": method("layer.0", "_overlapped", without_overlap),
    "window of another document": method(
        "layer.0", "_overlapped", lambda right, self, windows, missing, *begins: right(self, windows, missing)
    ),
    "entries not normed": unnormed("layer.2", "attn.compressor.norm"),
    "positions of slots left out": Fault(
        "layer.2", SplitWeights, "deferred", lambda right, self, w: right(self, w) * (len(w.shape) == 1)
    ),
    "gates and values exchanged": method(
        "layer.2", "_entries", lambda right, self, kv, gate, *args, **rest: right(self, gate, kv, *args, **rest)
    ),
    "entry seen before its window ends": tables_of("layer.2", HEAVY, seen_early),
    "entries rotated the wrong way": tables_of("layer.2", HEAVY, lambda tables: {"entry_sin": -tables.entry_sin}),
    # the indexer
    "index of another document": method("layer.0", "_unseen", index_of_another_document),
    "one entry fewer chosen": Fault(
        "layer.0", type(OPS), "unchosen", lambda right, scores, top: right(scores, top - 1)
    ),
    "scores of the indexer without relu": Fault("layer.0", type(OPS), "relu", lambda right, x: x),
    # output
    "groups exchanged": method(
        "layer.1", "_compressed", lambda right, self, mixed, name: right(self, mixed.flip(1), name)
    ),
    # experts
    "experts of the token before": Fault(
        "layer.0", PaddleBalance, "_rows", lambda right, *args: np.roll(right(*args), 1, axis=0)
    ),
    "sigmoid in place of sqrtsoftplus": routed("layer.0", score="sigmoid"),
    "weights not over their sum": routed("layer.1", normalize=False),
    "routed scale applied twice": routed("layer.1", routed_scale=2.25),
    "bias left out of the choice": choice("layer.1", lambda right, x, moe, *given: right(x, moe), step=1),
    "bias added to the weights": choice("layer.1", biased_weights, step=1),
    "gate clamped from below": activation(
        "layer.1", lambda right, self, gate, up, groups: right(self, paddle.clip(gate, min=-LIMIT), up, groups)
    ),
    "gate not clamped": activation(
        "layer.1", lambda right, self, gate, up, _: F.silu(gate) * paddle.clip(up, -LIMIT, LIMIT)
    ),
    "up not clamped": activation(
        "layer.1", lambda right, self, gate, up, _: F.silu(paddle.clip(gate, max=LIMIT)) * up
    ),
    "shared expert left out": Fault("layer.1", PaddleExperts, "_shared", lambda right, *args: 0 * right(*args)),
    # residual streams
    "untransposed residual matrix": streams_of("layer.1", transposed=False),
    "one iteration of Sinkhorn fewer": streams_of("layer.1", sinkhorn_iterations=2),
    "epsilon left out": streams_of("layer.1", epsilon=0.0),
    "streams not normed": Fault(
        "layer.1", type(OPS), "rms_norm", lambda right, x: x if len(x.shape) == 3 else right(x)
    ),
    "streams read in the other order": Fault(
        "layer.1", stage, "_read_streams", lambda right, gates, *rest: right(gates.flip(-1), *rest)
    ),
    "streams written once": Fault(
        "layer.1", stage, "with_streams",
        lambda right, ops, x, sub, *rest: right(ops, x, lambda inner: 0.5 * sub(inner), *rest),
    ),
    "one stream at the beginning": Fault(
        "layer.0", stage, "expand_streams",
        lambda right, ops, x, count: paddle.concat([x, *[paddle.zeros_like(x)] * (count - 1)], -1),
    ),
    "sum in place of the contraction": Fault(
        "layer.2", stage, "gated_sum_of_streams",
        lambda right, ops, x, spec, *rest: stage.contract_streams(ops, x, spec.streams),
    ),
    # the module
    "hidden state of the module not normed": unnormed("mtp.0", "hidden_norm"),
    "embedding of the module not normed": unnormed("mtp.0", "embed_norm"),
    "result of the module not normed": unnormed("mtp.0", "norm"),
    "embedding of the main model": Fault(
        "mtp.0", EmbeddingAndHead, "_lookup",
        lambda right, self, layer, label, streams: right(self, "embed", label, streams),
    ),
    "position of the module off by one": Fault(
        "mtp.0", EmbeddingAndHead, "embed_for_module",
        lambda right, self, layer, stream, dropouts: right(
            self, layer, replace(stream, tokens=paddle.roll(stream.tokens, 1, 0)), dropouts
        ),
    ),
    "state before the last norm": Fault("mtp.0", PaddleStage, "_module", before_the_norm),
    "embedding before the hidden state": Fault(
        "mtp.0", PaddleStage, "_product",
        lambda right, self, x, name: right(self, paddle.roll(x, 16, -1) if name == "mtp.0.proj" else x, name),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [None, *FAULTS])
def test_a_fault_is_found_in_its_layer_and_nothing_without_one(trained, tmp_path, monkeypatch, name):
    if name is not None:
        FAULTS[name].plant(monkeypatch)
    record(*trained, tmp_path, values=False)
    aligned = invoke("state", "align", tmp_path / "run", tmp_path / "reference", "--format", "json")
    first = json.loads(aligned.stdout)["tensors"]["first_difference"]
    if name is None:
        assert (aligned.exit_code, first) == (0, None)
    else:
        assert (aligned.exit_code, first["step"]) == (1, FAULTS[name].step)
        assert first["tensor"].items() >= FAULTS[name].tensor.items()
