"""Small plans for tests: a base with overrides, as a dict, a file, a loaded plan or a checked subject."""

from __future__ import annotations

import copy
import json

from pipeproof.diagnostics.finding import BadPlanError
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.verify.subject import make_subject

FLAT = {
    "matmul_efficiency": 0.7,
    "attention_efficiency": 0.5,
    "memory_efficiency": 0.8,
    "link_efficiency": 0.75,
    "host_us": 0,
}
"""Keys of ``cost.analytic`` without measured curves."""

BASE = {
    "pipeproof": 1,
    "model": {
        "kind": "gpt",
        "num_layers": 4,
        "hidden_size": 16,
        "num_heads": 4,
        "ffn_size": 32,
        "vocab_size": 32,
        "seq_length": 8,
    },
    "topology": {"pp": 2, "tp": 1},
    "schedule": {"kind": "1f1b", "num_micro_batches": 4, "micro_batch_size": 2},
}


def plan_dict(**sections):
    """The base plan, each section updated with the given keys (or replaced, where it is not a mapping)."""
    plan = copy.deepcopy(BASE)
    for name, value in sections.items():
        if isinstance(value, dict):
            plan.setdefault(name, {}).update(value)
        else:
            plan[name] = value
    return plan


def plan_file(path, **sections):
    """Write the base plan with these sections; the path."""
    path.write_text(json.dumps(plan_dict(**sections)))
    return path


def refusal(plan):
    """The one finding with which a plan, as a dict, is refused."""
    try:
        plan_from_dict(plan)
    except BadPlanError as refused:
        (finding,) = refused.findings
        return finding
    raise AssertionError("the plan is not refused")


def plan_spec(**sections):
    return plan_from_dict(plan_dict(**sections)).spec


def subject(**sections):
    return make_subject(plan_from_dict(plan_dict(**sections)))
