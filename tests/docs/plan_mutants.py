"""Mutants of small plans as people write them: misspelt and misplaced keys, other types, sizes that do not fit."""

import copy
import random
from typing import Literal, get_args, get_origin

from pipeproof.specs.model import ModelSpec
from pipeproof.specs.plan import PlanSpec
from pipeproof.specs.section import sections_in
from tests.plans import plan_dict

MOE = {"num_experts": 4, "top_k": 2, "ffn_size": 16}
SEEDS = (
    plan_dict(),
    plan_dict(topology={"pp": 2, "tp": 2, "sequence_parallel": True}, transport={"forward": "full"}),
    plan_dict(schedule={"kind": "interleaved", "num_chunks": 2, "variant": "megatron"}),
    plan_dict(schedule={"kind": "zb_v", "num_chunks": 2}, memory={"budget_gib": 1}),
    plan_dict(
        model={"moe": MOE},
        topology={"pp": 2, "ep": 2},
        schedule={"kind": "dualpipe_v", "num_chunks": 2, "overlap": "pairs"},
    ),
    plan_dict(cost={"forward_us": [100, 90], "backward_us": 200, "p2p_latency_us": 5}),
    plan_dict(cost={"analytic": {"device": "h100", "dtype": "bfloat16"}}, memory={"recompute": "full"}),
    plan_dict(run={"backend": "torch", "dtype": "float32", "seed": 7, "learning_rate": 0.01, "clip_norm": 1.0}),
    plan_dict(stages=[["embed", "layer.0", "layer.1"], ["layer.2", "layer.3", "norm", "head"]]),
    plan_dict(schedule={"kind": "seq1f1b", "num_sequence_splits": 2}, buffers={"receive_slots": 4}),
    plan_dict(model={"num_kv_heads": 2, "head_size": 4}, schedule={"kind": "looped_bfs", "num_chunks": 2}),
)
HABITS = (
    ("topology", "sp", True),
    ("topology", "tensor_parallel", 2),
    ("topology", "pipeline_model_parallel_size", 2),
    ("schedule", "mbs", 2),
    ("schedule", "gbs", 16),
    ("schedule", "micro_batches", 4),
    ("cost", "forward", 100),
    ("cost", "backward", 100),
    ("cost", "device", "h100"),
    ("cost", "analytic", "H100-SXM"),
    ("run", "dtype", "fp16"),
    ("run", "dtype", "bf16"),
    ("run", "backend", "pytorch"),
    ("model", "layers", 4),
    ("model", "heads", 4),
    ("model", "vocab", 64),
    ("model", "seq_len", 8),
    ("memory", "recompute", True),
    ("transport", "forward", "whole"),
    ("schedule", "kind", "1F1B"),
    ("schedule", "kind", "zero_bubble"),
    ("schedule", "kind", "vpp"),
)
"""Keys and values that people bring from other tools, or from other sections."""


def leaves(data, path=()):
    """The paths of all values that are not sections."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield from leaves(value, (*path, key)) if isinstance(value, dict | list) else [(*path, key)]


def mutant(draw):
    """One mutant of one seed, with its change."""
    plan = copy.deepcopy(draw.choice(SEEDS))
    path = draw.choice(list(leaves(plan)))
    section = plan
    for part in path[:-1]:
        section = section[part]
    key, value = path[-1], section[path[-1]]
    choice = draw.randrange(10)
    if choice == 0 and isinstance(key, str):
        section[misspelt(key, draw)] = section.pop(key)
    elif choice == 1 and isinstance(key, str):
        del section[key]
        draw.choice([part for part in plan.values() if isinstance(part, dict)])[key] = value
    elif choice == 2:
        section[key] = misspelt(value, draw) if isinstance(value, str) else f"{value}"
    elif choice == 3 and isinstance(value, int):
        section[key] = draw.choice((0, -1, 1.5, float(value), "yes", None))
    elif choice == 4 and isinstance(value, int) and key != "pipeproof":
        section[key] = draw.choice((value + 1, value * 3, value * 2, 7, max(1, value - 1)))
    elif choice == 5 and isinstance(key, str):
        del section[key]
    elif choice == 6:
        name, key, value = draw.choice(HABITS)
        plan.setdefault(name, {})[key] = value
    elif choice == 7:
        *sections, key, values = draw.choice(OPTIONAL)
        at = plan
        for part in sections:
            at = at.setdefault(part, {})
            if not isinstance(at, dict):
                return mutant(draw)
        at[key] = draw.choice(values)
    elif choice == 8:
        plan["schedule"]["kind"] = draw.choice(
            ("1f1b", "gpipe", "interleaved", "zb_v", "dualpipe", "dualpipe_v", "chimera", "seq1f1b", "v_half")
        )
    else:
        other = draw.choice(SEEDS)
        name = draw.choice([name for name in other if isinstance(other[name], dict)])
        name_of_key = draw.choice(list(other[name]))
        plan.setdefault(name, {})[name_of_key] = copy.deepcopy(other[name][name_of_key])
    return plan


def optional_keys(section=PlanSpec, path=()):
    """``(*path, key, values)`` for each key of a plan whose values can be drawn: choices, switches and numbers."""
    for name, field in section.model_fields.items():
        kinds = {field.annotation, *get_args(field.annotation)}
        choices = [value for kind in kinds for value in (get_args(kind) if get_origin(kind) is Literal else ())]
        values = [*choices, *([True, False] if bool in kinds else ()), *([1, 2, 3] if kinds & {int, float} else ())]
        if values:
            yield (*path, name, values)
        nested = sections_in(field.annotation)
        if len(nested) == 1 and get_origin(field.annotation) is not tuple:
            yield from optional_keys(nested[0], (*path, name))
        elif ModelSpec in nested:
            yield from optional_keys(ModelSpec, (*path, name))


OPTIONAL = tuple(optional_keys())


def misspelt(word, draw):
    """A word with a slip of the fingers: a letter lost, two exchanged, or hyphens."""
    at = draw.randrange(len(word))
    return draw.choice((
        word[:at] + word[at + 1 :],
        word[:at] + word[at : at + 2][::-1] + word[at + 2 :],
        word.replace("_", "-"),
        word.upper(),
    ))  # fmt: skip


def mutants(number, seed=1):
    """This number of mutants."""
    draw = random.Random(seed)
    return [mutant(draw) for _ in range(number)]
