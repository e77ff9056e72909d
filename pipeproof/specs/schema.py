"""The JSON Schema of plan files, for completion and checks in editors."""

from __future__ import annotations

from typing import Any

from pipeproof.specs.plan import PlanSpec


def plan_json_schema() -> dict[str, Any]:
    """The schema (draft 2020-12) of a plan file, with every key's description.

    It accepts every plan that loads. What a schema cannot say (sizes that
    divide, lengths that fit the topology) is left to loading.
    """
    schema = PlanSpec.model_json_schema(mode="validation")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "pipeproof plan",
        "description": "A pipeline-parallel training plan.",
    }
