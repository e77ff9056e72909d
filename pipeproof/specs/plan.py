"""The plan: every key with its type, bounds, default and meaning, and the checks across sections.

Values are strict: a quoted number is not a number and ``true`` is not 1. A
spec is frozen and consistent: sizes divide where they must, and lists have the
length that the topology needs. ``pipeproof.specs.load_plan`` reads a plan from
a file or a dict, with findings in place of pydantic's errors.
"""

from __future__ import annotations

from typing import Any, Self

from pydantic import ConfigDict, model_validator

from pipeproof.specs.checks.batch_checks import check_global_batch, with_micro_batches
from pipeproof.specs.checks.boundary_checks import check_boundaries
from pipeproof.specs.checks.cost_checks import check_activations, check_analytic, check_buckets, check_network
from pipeproof.specs.checks.custom_layer_checks import check_custom_layers
from pipeproof.specs.checks.model_checks import check_expert_parallel, check_mtp, check_splits, check_tensor_parallel
from pipeproof.specs.checks.overlap_checks import check_overlap
from pipeproof.specs.checks.run_checks import check_main_grad, check_run
from pipeproof.specs.checks.stage_checks import check_cut, check_lengths, check_placed_ranks
from pipeproof.specs.plan_sections import PlanSections
from pipeproof.specs.section import refuse


class PlanSpec(PlanSections):
    """A whole plan."""

    model_config = ConfigDict(defer_build=False)

    @model_validator(mode="before")
    @classmethod
    def _with_micro_batches(cls, data: object) -> object:
        """Add ``schedule.num_micro_batches`` where the global batch gives it."""
        return with_micro_batches(data)

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        if self.is_custom:
            refuse(
                [
                    *check_custom_layers(self, self.custom),
                    *check_placed_ranks(self),
                    *check_lengths(self),
                    *check_global_batch(self),
                    *check_network(self),
                    *check_buckets(self),
                    *check_run(self),
                    *check_overlap(self),
                ]
            )
            return self
        refuse(
            [
                *check_tensor_parallel(self),
                *check_expert_parallel(self),
                *check_mtp(self),
                *check_placed_ranks(self),
                *check_lengths(self),
                *check_global_batch(self),
                *check_cut(self),
                *check_splits(self),
                *check_analytic(self),
                *check_activations(self),
                *check_network(self),
                *check_buckets(self),
                *check_boundaries(self),
                *check_main_grad(self),
                *check_run(self),
                *check_overlap(self),
            ]
        )
        return self


def plan_json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a plan file, with every key's description, for editors.

    It accepts every plan that loads. Checks across keys (sizes that divide,
    lengths that fit the topology) are left to loading.
    """
    schema = PlanSpec.model_json_schema(mode="validation")
    schedule = schema["$defs"]["ScheduleSpec"]
    schedule["required"].remove("num_micro_batches")
    schedule["anyOf"] = [{"required": ["num_micro_batches"]}, {"required": ["global_batch_size"]}]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "pipeproof plan",
        "description": "A pipeline-parallel training plan.",
    }
