"""The smallest plan that runs a schedule: to look at a schedule by itself, with its communication."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import lcm

from pipeproof.specs.load_plan import LoadedPlan, plan_from_dict

CostKeys = Mapping[str, Fraction | tuple[Fraction, ...]]
"""Keys of the plan's ``cost`` section and their times, one for all stages or one for each."""


def sample_plan(
    kind: str,
    num_ranks: int,
    num_micro_batches: int,
    *,
    num_chunks: int = 1,
    cost: CostKeys | None = None,
    **schedule: str | int | None,
) -> LoadedPlan:
    """A GPT with one small layer for each stage, on pipeline ranks alone.

    ``cost`` is in any unit; F, I and W take 1 by default.

    ``schedule`` are further keys of the plan's schedule section; those that are None are left out.

    Raises:
        PlanFileError: a value is out of its range.
    """
    num_splits = schedule.get("num_sequence_splits")
    further = {key: value for key, value in schedule.items() if value is not None}
    return plan_from_dict(
        {
            "pipeproof": 1,
            "model": {
                "kind": "gpt",
                "num_layers": num_ranks * num_chunks,
                "hidden_size": 2,
                "num_heads": 1,
                "ffn_size": 1,
                "vocab_size": 2,
                "seq_length": lcm(2, num_splits if isinstance(num_splits, int) else 1),
            },
            "topology": {"pp": num_ranks},
            "schedule": {
                "kind": kind,
                "num_micro_batches": num_micro_batches,
                "micro_batch_size": 1,
                "num_chunks": num_chunks,
                **further,
            },
            "cost": {**_UNIT_COSTS, **(cost or {})},
        }
    )


_UNIT_COSTS = {"forward_us": 1, "backward_input_us": 1, "backward_weight_us": 1}
