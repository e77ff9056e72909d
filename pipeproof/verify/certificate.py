"""The identity of a plan, and the certificate of its check, which an executor compares."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, fields, is_dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeproof.comm.backend_rows import BackendTable
from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.schedule.columns import COLUMN_NAMES
from pipeproof.schedule.op_table import OpGraph, TensorSpec
from pipeproof.schedule.ops import COPY_KINDS, KINDS, PART_KINDS
from pipeproof.specs.model import model_content
from pipeproof.verify.subject import Subject

RULE_SET_VERSION = 11
"""Increased when a rule is added or its verdicts change. Part of certificates, not of digests."""
_OF_CUSTOM_LAYERS = {"kind": True, "activation_bytes": True}
_NO_PART_OF_A_GRAPH: Mapping[str, Any] = {
    "unpadded_vocab_size": True,
    "moe": {"hash_tables": {"path": True}},
    "layers": {"__all__": _OF_CUSTOM_LAYERS},
}
"""Keys of a model that change no operation: the tokens, the file of tables, unused parts of custom layers."""

_ADDED_FACTS = {"updates", "flat_start", "expert_routings"}
"""Later fields of facts: part of a digest only if stated."""


class Verdict(StrEnum):
    """The outcome of a check: no errors, errors, no errors by the rules that ran, or input not understood."""

    PROVED = "proved"
    REFUSED = "refused"
    INCOMPLETE = "incomplete"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Certificate:
    """The verdict on one graph, by one version of the rules and of the backend's table."""

    graph_digest: str
    rule_set_version: int
    backend_table_version: str
    verdict: Verdict


def certificate_of(subject: Subject, digest: str, verdict: Verdict) -> Certificate:
    """The certificate that this version of pipeproof gives to a subject whose graph digest is ``digest``."""
    return Certificate(digest, RULE_SET_VERSION, backend_table_version(subject.backend), verdict)


_ADDED_KINDS = (COPY_KINDS, PART_KINDS)
"""Later kinds: part of a digest only if used."""


def backend_table_version(table: BackendTable) -> str:
    """SHA-256 (hex) over a backend table's name and the values of its rows; sources are not in it."""
    return hashlib.sha256(_canonical({"name": table.name, **table.values()})).hexdigest()


def graph_digest(subject: Subject) -> str:
    """SHA-256 (hex) over the op graph and everything else that changes a run: the identity of a plan.

    That is: the op graph with its queues, layouts, shapes, dtypes and group
    order; layers, parameters and stages; loss normalization, whether gradients
    are clipped, and the type of weights; the backend and its device, which
    compute other bits; the queues that a plan declares, which order its
    transfers; the facts that are given along with a graph. Values that only
    change a verdict are in the certificate instead: the version of the rule set,
    and the rows of the backend's table. Cost, seed, steps, learning rate and
    paths are not in it either. The bytes are canonical: the digest is the same
    in every run and on every machine.
    """
    graph = subject.graph if subject.lowered is None else subject.lowered.canonical
    sha = hashlib.sha256()
    sha.update(_canonical(_content(subject, graph)))
    for column in (graph.offsets, graph.columns.accesses, *_columns(graph)):
        sha.update(column.astype("<i8", copy=False).tobytes())
    return sha.hexdigest()


def _canonical(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), default=_plain).encode()


def _columns(graph: OpGraph) -> Iterator[NDArray[np.int64]]:
    """The columns that rows fill, except the column of their origin."""
    return (graph.columns.values[name] for name in COLUMN_NAMES if name != "origin")


def _content(subject: Subject, graph: OpGraph) -> dict[str, Any]:
    """All but the columns: tables of the graph, and its plan; fields by position, which leaves their names free."""
    columns = graph.columns
    unused = {kind for kinds in _ADDED_KINDS if not graph.is_kind(kinds).any() for kind in kinds}
    return {
        "kinds": [kind for kind in KINDS if kind not in unused],
        "num_rows": columns.num_rows,
        "num_splits": columns.num_splits,
        "tables": [columns.reductions, columns.communicators, columns.queues, columns.scales, columns.buffers],
        "unusual": {str(op_id): str(op) for op_id, op in columns.unusual.items()},
        "tensors": [_by_value(tensor) for tensor in graph.tensors],
        "groups": [astuple(group) for group in graph.groups],
        "global_rank": graph.global_rank,
        "plan": None if subject.lowered is None else _plan_content(subject.lowered),
        "facts": _facts_content(subject.facts),
    }


def _facts_content(value: object) -> object:
    """Facts as in ``astuple``, without unstated later fields: older facts keep their digest."""
    if is_dataclass(value):
        pairs = [(field, getattr(value, field.name)) for field in fields(value)]
        return [_facts_content(one) for field, one in pairs if field.name not in _ADDED_FACTS or one != field.default]
    if isinstance(value, tuple | list):
        return [_facts_content(one) for one in value]
    if isinstance(value, Mapping):
        return {key: _facts_content(one) for key, one in value.items()}
    return value


def _by_value(tensor: TensorSpec) -> tuple[object, ...]:
    """The fields by which tensors are equal."""
    values = tuple(getattr(tensor, field.name) for field in fields(tensor) if field.compare and field.name != "parts")
    parts = tuple(tuple(getattr(part, field.name) for field in fields(part) if field.compare) for part in tensor.parts)
    return (*values, parts) if parts else values


def _plain(value: object) -> list[Any]:
    """JSON form of a value in facts that JSON does not know, in a fixed order."""
    if isinstance(value, np.ndarray):
        return list(value.tolist())
    assert isinstance(value, frozenset), f"a fact holds a {type(value).__name__}"
    return sorted(value)


def _plan_content(plan: LoweredPlan) -> dict[str, Any]:
    return {
        "backend": plan.spec.run.backend,
        "device": plan.spec.run.device,
        "queue": plan.spec.transport.queue or "directed_edge",
        "mesh": astuple(plan.mesh),
        "model": model_content(plan.spec.model, _NO_PART_OF_A_GRAPH),
        "layers": [(*astuple(layer), ()) for layer in plan.layers],  # a former field, in the digests of saved states
        "stages": plan.stages,
        "loss": plan.spec.loss.model_dump(mode="json"),
        "clips": plan.spec.run.clip_norm is not None,
        "weights": plan.spec.run.weight_dtype,
        "buffers": [*plan.spec.buffers.model_dump(mode="json").values()],
        "connections": plan.spec.transport.connections,
        **({"modules": [module.model_dump(mode="json") for module in plan.spec.modules]} if plan.spec.modules else {}),
        **({"edges": [edge.model_dump(mode="json") for edge in plan.spec.edges]} if plan.spec.edges else {}),
    }
