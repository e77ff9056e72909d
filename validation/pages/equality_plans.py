"""Plans of ``validation/results/equality.md``: model features, topologies and schedules; tiny, two steps each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pipeproof.schedule.kinds import SCHEDULE_KINDS

NUM_STEPS = 2
SWIGLU_LIMIT = 0.05
"""Limit that only some of the initial gates and factors exceed."""
CLIP_NORM = 0.05
"""Norm well below the norm of these models' initial gradients."""
_MODEL = {
    "kind": "gpt", "num_layers": 4, "hidden_size": 32, "num_heads": 4, "ffn_size": 64, "vocab_size": 64,
    "seq_length": 16,
}  # fmt: skip
_MOE = {"num_experts": 12, "top_k": 3, "ffn_size": 16, "num_shared_experts": 1, "dense_layers": 1}
_MLA = {"q_rank": 12, "kv_rank": 8, "nope_head_size": 6, "rope_head_size": 4, "value_head_size": 8}

FEATURES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "GPT": {},
        "grouped queries": {"model": {"num_kv_heads": 2}},
        "head size": {"model": {"head_size": 6}},
        "latent attention": {"model": {"mla": _MLA}},
        "experts": {"model": {"moe": _MOE}},
        "router losses, expert biases": {
            "model": {"moe": {**_MOE, "score": "sigmoid", "aux_loss": 0.1, "z_loss": 0.01, "expert_bias_rate": 0.003}}
        },
        "hyper-connections": {"model": {"hyper_connections": {"streams": 4}}},
        "MTP": {"model": {"mtp": {"num_modules": 2}, "moe": _MOE}},
        "MTP, magic send": {"model": {"mtp": {"num_modules": 2, "magic_send": True}, "tied_embedding": True}},
        "tied embedding": {"model": {"tied_embedding": True}},
        "clipping": {"run": {"clip_norm": CLIP_NORM}},
        "sharded optimizer": {"memory": {"shard_optimizer": "dp"}, "run": {"clip_norm": CLIP_NORM}},
        "gradient reductions when ready": {"schedule": {"reduce_gradients": "when_ready"}},
        "experts, sharded optimizer, reductions when ready": {
            "model": {"moe": _MOE},
            "memory": {"shard_optimizer": "dp"},
            "schedule": {"reduce_gradients": "when_ready"},
        },
        "dropout": {"model": {"dropout": 0.1}},
        "clamped SwiGLU": {"model": {"swiglu_limit": SWIGLU_LIMIT, "moe": _MOE}},
        "main gradients": {"run": {"main_grad_dtype": "float64", "clip_norm": CLIP_NORM}},
        "empty layers": {
            "model": {"empty_layers": {"head": 1, "tail": 3}, "final_norm": "before_tail_empty"},
            "stages": "layer:TransformerLayer|EmptyLayer",
        },
        "regathered activations": {"memory": {"sequence_parallel_activations": "regather"}},
        "recomputation": {"model": {"moe": _MOE}, "memory": {"recompute": "full"}},
        "token batches across boundaries": {
            "boundaries": [
                {"name": "hidden", "dims": "sbh"},
                {"name": "tokens", "dims": "bs", "dtype": "int64"},
                {"name": "labels", "dims": "sb", "dtype": "int32"},
                {"name": "mask", "dims": "bs", "dtype": "bool"},
            ],
            "transport": "partial",
        },
        "all together": {
            "model": {"moe": {**_MOE, "score": "sigmoid"}, "mla": _MLA, "tied_embedding": True},
            "run": {"clip_norm": CLIP_NORM},
        },
        "more together": {
            "model": {
                "moe": {**_MOE, "score": "sigmoid", "aux_loss": 0.1, "z_loss": 0.01, "expert_bias_rate": 0.003},
                "mtp": {"num_modules": 1, "magic_send": True},
                "mla": _MLA,
                "tied_embedding": True,
                "dropout": 0.1,
                "swiglu_limit": SWIGLU_LIMIT,
                "empty_layers": {"head": 1, "tail": 1},
            },
            "memory": {"shard_optimizer": "dp", "recompute": "selective", "sequence_parallel_activations": "regather"},
            "schedule": {"reduce_gradients": "when_ready"},
            "run": {"clip_norm": CLIP_NORM, "main_grad_dtype": "float64"},
        },
    }
)
"""Features beyond the plain GPT, by their names on the page."""

TOPOLOGIES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "pp 2": {"pp": 2},
        "pp 4": {"pp": 4},
        "pp 2, tp 2": {"pp": 2, "tp": 2},
        "pp 2, tp 2, SP": {"pp": 2, "tp": 2, "sequence_parallel": True},
        "pp 2, dp 2": {"pp": 2, "dp": 2},
        "pp 2, ep 2": {"pp": 2, "ep": 2},
        "tp 2, SP, ep 2": {"tp": 2, "ep": 2, "sequence_parallel": True},
        "pp 2, cp 2": {"pp": 2, "cp": 2},
        "tp 2, SP, cp 2": {"tp": 2, "cp": 2, "sequence_parallel": True},
        "ep 2, dp 2": {"ep": 2, "dp": 2},
    }
)
"""Two to four ranks; SP is sequence parallelism."""


@dataclass(frozen=True)
class Cell:
    """One run: a name in ``FEATURES``, a name in ``TOPOLOGIES`` and a kind of schedule."""

    feature: str
    topology: str
    kind: str

    @property
    def name(self) -> str:
        """Name in the results and on the command line."""
        return f"{self.feature}; {self.topology}; {self.kind}"

    @property
    def plan(self) -> dict[str, Any]:
        """The plan, as data that can be written as JSON."""
        feature = FEATURES[self.feature]
        chunks = max(SCHEDULE_KINDS[self.kind].min_chunks, 2 if self.kind in _WITH_TWO_STAGES else 1)
        schedule = {"kind": self.kind, "num_micro_batches": 8 if "pp 4" in self.topology else 4, "micro_batch_size": 2}
        splits = {"num_sequence_splits": 2} if SCHEDULE_KINDS[self.kind].splits_sequences else {}
        return {
            "pipeproof": 1,
            "model": {**_MODEL, **feature.get("model", {})},
            "topology": dict(TOPOLOGIES[self.topology]),
            **{key: feature[key] for key in ("stages", "memory", "boundaries", "transport") if key in feature},
            "schedule": {
                **schedule,
                **({"num_chunks": chunks} if chunks > 1 else {}),
                **splits,
                **feature.get("schedule", {}),
            },
            "run": {"steps": NUM_STEPS, "seed": 7, "learning_rate": 0.01, **feature.get("run", {})},
        }


_WITH_TWO_STAGES = frozenset({"looped_bfs", "optimal"})
"""Kinds that allow any number of stages per rank and are run with two."""

EACH_FEATURE_WITH = ("1f1b", "interleaved", "zb_v", "dualpipe")
"""Kinds that every feature is run with: stages in a line, round-robin, in a V, and in two copies."""
_TOPOLOGIES_OF = {
    "GPT": ("pp 4", "pp 2", "pp 2, tp 2, SP", "pp 2, dp 2"),
    "grouped queries": ("pp 2, tp 2", "pp 2, dp 2", "pp 2", "pp 4"),
    "head size": ("pp 2, tp 2, SP", "pp 2", "pp 2, dp 2", "pp 2, tp 2"),
    "latent attention": ("pp 2, dp 2", "pp 2, tp 2, SP", "pp 2, tp 2", "pp 2"),
    "experts": ("pp 4", "pp 2, tp 2, SP", "pp 2, ep 2", "pp 2, ep 2"),
    "router losses, expert biases": ("pp 4", "pp 2, tp 2, SP", "pp 2, dp 2", "pp 2, ep 2"),
    "hyper-connections": ("pp 4", "pp 2, tp 2, SP", "pp 2", "pp 2, dp 2"),
    "MTP": ("pp 4", "pp 2, tp 2, SP", "pp 2, ep 2", "pp 2, dp 2"),
    "MTP, magic send": ("pp 4", "pp 2, dp 2", "pp 2, tp 2, SP", "pp 2"),
    "tied embedding": ("pp 4", "pp 2, tp 2, SP", "pp 2, dp 2", "pp 2, tp 2"),
    "clipping": ("pp 2, tp 2", "pp 2, dp 2", "pp 2", "pp 2, tp 2, SP"),
    "sharded optimizer": ("pp 2, dp 2",) * 4,
    "dropout": ("pp 4", "pp 2, tp 2, SP", "pp 2, dp 2", "pp 2, tp 2"),
    "clamped SwiGLU": ("pp 4", "pp 2, ep 2", "pp 2", "pp 2, tp 2, SP"),
    "main gradients": ("pp 4", "pp 2, dp 2", "pp 2, tp 2, SP", "pp 2, tp 2"),
    "empty layers": ("pp 4", "pp 2", "pp 2, tp 2, SP", "pp 2, dp 2"),
    "regathered activations": ("pp 2, tp 2, SP",) * 4,
    "recomputation": ("pp 4", "pp 2, ep 2", "pp 2, tp 2, SP", "pp 2, dp 2"),
    "token batches across boundaries": ("pp 4", "pp 2", "pp 2, tp 2", "pp 2, dp 2"),
}
CELLS = (
    *(
        Cell(feature, topology, kind)
        for feature, topologies in _TOPOLOGIES_OF.items()
        for topology, kind in zip(topologies, EACH_FEATURE_WITH, strict=True)
    ),
    Cell("GPT", "pp 2", "zb_v"),
    Cell("GPT", "pp 2", "v_half"),
    Cell("GPT", "pp 2, tp 2", "gpipe"),
    Cell("GPT", "pp 4", "eager_1f1b"),
    Cell("grouped queries", "pp 2, dp 2", "looped_bfs"),
    Cell("experts", "pp 2, ep 2", "zb_h1"),
    Cell("latent attention", "pp 2, tp 2, SP", "zb_h2"),
    Cell("head size", "pp 2, tp 2", "interleaved_zb"),
    Cell("experts", "pp 2", "v_half"),
    Cell("router losses, expert biases", "pp 2", "zb_v"),
    Cell("router losses, expert biases", "tp 2, SP, ep 2", "1f1b"),
    Cell("router losses, expert biases", "pp 2, ep 2", "seq1f1b"),
    Cell("MTP", "pp 2, tp 2, SP", "seq1f1b"),
    Cell("tied embedding", "pp 2, tp 2", "v_min"),
    Cell("experts", "pp 2, ep 2", "dualpipe_v"),
    Cell("latent attention", "pp 2, dp 2", "chimera"),
    Cell("GPT", "pp 2, tp 2, SP", "seq1f1b"),
    Cell("clipping", "pp 2, dp 2", "optimal"),
    Cell("dropout", "pp 2, tp 2, SP", "seq1f1b"),
    Cell("experts", "tp 2, SP, ep 2", "1f1b"),
    Cell("hyper-connections", "pp 2, tp 2, SP", "seq1f1b"),
    Cell("hyper-connections", "pp 2, tp 2", "zb_h1"),
    Cell("gradient reductions when ready", "pp 2, dp 2", "interleaved"),
    Cell("gradient reductions when ready", "pp 2, dp 2", "zb_v"),
    Cell("experts, sharded optimizer, reductions when ready", "ep 2, dp 2", "looped_bfs"),
    Cell("experts, sharded optimizer, reductions when ready", "pp 2, dp 2", "interleaved"),
    Cell("all together", "pp 2, ep 2", "1f1b"),
    Cell("more together", "pp 2, tp 2, SP", "zb_v"),
    Cell("more together", "pp 2, ep 2", "interleaved"),
    Cell("more together", "ep 2, dp 2", "1f1b"),
    Cell("recomputation", "pp 2, cp 2", "zb_h1"),
    Cell("tied embedding", "pp 2, cp 2", "looped_bfs"),
    Cell("GPT", "pp 2, cp 2", "1f1b"),
    Cell("GPT", "tp 2, SP, cp 2", "1f1b"),
    Cell("experts", "pp 2, cp 2", "zb_v"),
    Cell("MTP", "pp 2, cp 2", "interleaved"),
    Cell("hyper-connections", "pp 2, cp 2", "dualpipe"),
)
"""Every feature with each of four kinds, every kind at least once, every topology; not the full product."""
