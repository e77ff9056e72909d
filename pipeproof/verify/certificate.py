"""The digest of what was verified, and the certificate that carries it to the executor."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeproof.comm.lowered import LoweredPlan
from pipeproof.schedule.columns import COLUMN_NAMES
from pipeproof.schedule.ops import KINDS
from pipeproof.schedule.optable import OpGraph
from pipeproof.verify.subject import Subject

RULE_SET_VERSION = 7
"""Raised whenever a rule is added or begins to judge differently."""
_OF_OWN_LAYERS = {"kind": True, "buffers": True}
_NO_PART_OF_A_GRAPH: Mapping[str, Any] = {
    "build": True,
    "unpadded_vocab_size": True,
    "layers": {"__all__": _OF_OWN_LAYERS},
}
"""Keys of a model: a path, which tokens are drawn, and of own layers what no operation reads or reduces."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """Says that the plan with this digest passed every rule of this rule set."""

    digest: str
    rule_set: int


def plan_digest(subject: Subject) -> str:
    """SHA-256 (hex) over everything that the verdict depends on.

    That is: the op graph with its queues, layouts, shapes, dtypes and group
    order; layers, parameters and stages; loss normalization, whether gradients
    are clipped, and the type of weights; the backend's table; the facts said beside the graph;
    the version of the rule set. Cost, seed, steps, learning rate and paths are
    not in it. The bytes are canonical, so that the digest is the same in every
    run and on every machine.
    """
    graph = subject.graph if subject.lowered is None else subject.lowered.canonical
    sha = hashlib.sha256()
    sha.update(json.dumps(_content(subject, graph), sort_keys=True, separators=(",", ":"), default=_plain).encode())
    for column in (graph.offsets, graph.columns.accesses, *_columns(graph)):
        sha.update(column.astype("<i8", copy=False).tobytes())
    return sha.hexdigest()


def _columns(graph: OpGraph) -> Iterator[NDArray[np.int64]]:
    """The columns that rows fill; where a row was read from does not change what it is."""
    return (graph.columns.values[name] for name in COLUMN_NAMES if name != "origin")


def _content(subject: Subject, graph: OpGraph) -> dict[str, Any]:
    """All but the columns: tables of the graph, the plan around it, the backend."""
    columns = graph.columns
    return {
        "rule_set": RULE_SET_VERSION,
        "kinds": KINDS,
        "num_rows": columns.num_rows,
        "num_splits": columns.num_splits,
        "tables": [columns.reductions, columns.communicators, columns.queues, columns.scales, columns.buffers],
        "unusual": {str(op_id): str(op) for op_id, op in columns.unusual.items()},
        "tensors": [asdict(tensor) for tensor in graph.tensors],
        "groups": [asdict(group) for group in graph.groups],
        "global_rank": graph.global_rank,
        "plan": None if subject.lowered is None else _plan_content(subject.lowered),
        "backend": {"name": subject.backend.name, **subject.backend.values()},
        "facts": asdict(subject.facts),
    }


def _plain(value: object) -> list[Any]:
    """What facts hold that JSON has no form for, in a fixed order."""
    if isinstance(value, np.ndarray):
        return list(value.tolist())
    assert isinstance(value, frozenset), f"a fact holds a {type(value).__name__}"
    return sorted(value)


def _plan_content(plan: LoweredPlan) -> dict[str, Any]:
    return {
        "mesh": asdict(plan.mesh),
        "model": plan.spec.model.model_dump(mode="json", exclude=_NO_PART_OF_A_GRAPH),
        "layers": [{key: value for key, value in asdict(layer).items() if key != "buffers"} for layer in plan.layers],
        "stages": plan.stages,
        "loss": plan.spec.loss.model_dump(mode="json"),
        "clips": plan.spec.run.clip_norm is not None,
        "weights": plan.spec.run.weight_dtype,
        "buffers": plan.spec.buffers.model_dump(mode="json"),
        "connections": plan.spec.transport.connections,
    }
