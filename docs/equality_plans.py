"""The plans of ``docs/equality.md``: what a model has, on which ranks, in which order; tiny, two steps each."""  # noqa: INP001 - a directory of scripts, not a package

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pipeproof.schedule.kinds import SCHEDULE_KINDS

NUM_STEPS = 2
CLIP_NORM = 0.05
"""Well below the norm of these models' gradients at the start."""
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
        "tied embedding": {"model": {"tied_embedding": True}},
        "clipping": {"run": {"clip_norm": CLIP_NORM}},
        "all together": {
            "model": {"moe": {**_MOE, "score": "sigmoid"}, "mla": _MLA, "tied_embedding": True},
            "run": {"clip_norm": CLIP_NORM},
        },
    }
)
"""What a plan has beyond the plain GPT, by the name that the page gives it."""

TOPOLOGIES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "pp 2": {"pp": 2},
        "pp 4": {"pp": 4},
        "pp 2, tp 2": {"pp": 2, "tp": 2},
        "pp 2, tp 2, SP": {"pp": 2, "tp": 2, "sequence_parallel": True},
        "pp 2, dp 2": {"pp": 2, "dp": 2},
        "pp 2, ep 2": {"pp": 2, "ep": 2},
        "tp 2, SP, ep 2": {"tp": 2, "ep": 2, "sequence_parallel": True},
    }
)
"""Two to four ranks; SP is sequence parallelism."""


@dataclass(frozen=True)
class Cell:
    """One run: names in ``FEATURES`` and ``TOPOLOGIES``, and a kind of schedule."""

    feature: str
    topology: str
    kind: str

    @property
    def name(self) -> str:
        """As the results name it, and the command line."""
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
            "schedule": {**schedule, **({"num_chunks": chunks} if chunks > 1 else {}), **splits},
            "run": {"steps": NUM_STEPS, "seed": 7, "learning_rate": 0.01, **feature.get("run", {})},
        }


_WITH_TWO_STAGES = frozenset({"looped_bfs", "optimal"})
"""Kinds that take any number of stages for a rank, and show more with two."""

EACH_FEATURE_WITH = ("1f1b", "interleaved", "zb_v", "dualpipe")
"""Kinds that every feature is run with: stages in a line, in turn, in a V, and in two copies."""
_TOPOLOGIES_OF = {
    "GPT": ("pp 4", "pp 2", "pp 2, tp 2, SP", "pp 2, dp 2"),
    "grouped queries": ("pp 2, tp 2", "pp 2, dp 2", "pp 2", "pp 4"),
    "head size": ("pp 2, tp 2, SP", "pp 2", "pp 2, dp 2", "pp 2, tp 2"),
    "latent attention": ("pp 2, dp 2", "pp 2, tp 2, SP", "pp 2, tp 2", "pp 2"),
    "experts": ("pp 4", "pp 2, tp 2, SP", "pp 2, ep 2", "pp 2, ep 2"),
    "tied embedding": ("pp 4", "pp 2, tp 2, SP", "pp 2, dp 2", "pp 2, tp 2"),
    "clipping": ("pp 2, tp 2", "pp 2, dp 2", "pp 2", "pp 2, tp 2, SP"),
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
    Cell("tied embedding", "pp 2, tp 2", "v_min"),
    Cell("experts", "pp 2, ep 2", "dualpipe_v"),
    Cell("latent attention", "pp 2, dp 2", "chimera"),
    Cell("GPT", "pp 2, tp 2, SP", "seq1f1b"),
    Cell("clipping", "pp 2, dp 2", "optimal"),
    Cell("experts", "tp 2, SP, ep 2", "1f1b"),
    Cell("all together", "pp 2, ep 2", "1f1b"),
)
"""Every feature with each of four kinds, every kind once, every topology; not the whole product."""
