"""The digest of what was verified, and the certificate that carries it to the executor."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from pipeproof.comm.lower import LoweredPlan
from pipeproof.verify.subject import Subject

RULE_SET_VERSION = 1
"""Raised whenever a rule is added or begins to judge differently."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """Says that the plan with this digest passed every rule of this rule set."""

    digest: str
    rule_set: int


def plan_digest(subject: Subject) -> str:
    """SHA-256 (hex) over everything that the verdict depends on.

    That is: the op graph with its queues, layouts, shapes, dtypes and group
    order; layers, parameters and stages; loss normalization; the backend's
    table; the version of the rule set. Cost, seed, steps, learning rate and
    paths are not in it. The bytes are canonical, so that the digest is the
    same in every run and on every machine.
    """
    sha = hashlib.sha256()
    sha.update(json.dumps(_content(subject), sort_keys=True, separators=(",", ":")).encode())
    return sha.hexdigest()


def _content(subject: Subject) -> dict[str, Any]:
    plan: LoweredPlan = subject.plan
    graph = plan.graph
    rows = [
        [[str(row.op), row.peer, row.tensor, row.start, row.stop, row.group, row.reduction] for row in rank_rows]
        for rank_rows in graph.rows()
    ]
    return {
        "rule_set": RULE_SET_VERSION,
        "rows": rows,
        "tensors": [asdict(tensor) for tensor in graph.tensors],
        "channels": [asdict(channel) for channel in graph.channels],
        "groups": [asdict(group) for group in graph.groups],
        "mesh": asdict(plan.mesh),
        "model": plan.spec.model.model_dump(mode="json"),
        "layers": [asdict(layer) for layer in plan.layers],
        "stages": plan.stages,
        "loss": plan.spec.loss.model_dump(mode="json"),
        "backend": {"name": subject.backend.name, **subject.backend.values()},
    }
