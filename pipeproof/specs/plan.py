"""The plan: every key with its type, bounds, default and meaning, and the checks across sections.

Values are strict: a quoted number is not a number and ``true`` is not 1. A
spec is frozen and consistent: sizes divide where they must, and lists have the
length that the topology needs. ``pipeproof.specs.load_plan`` reads a plan from
a file or a dict, with findings in place of pydantic's errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pydantic import ConfigDict, model_validator

from pipeproof.diagnostics.finding import ExampleKind, RuleDoc
from pipeproof.diagnostics.problems import Problem
from pipeproof.specs import model_checks, pipeline_checks, run_checks
from pipeproof.specs.plan_sections import PlanSections


class PlanSpec(PlanSections):
    """A whole plan."""

    model_config = ConfigDict(defer_build=False)

    @model_validator(mode="before")
    @classmethod
    def _with_micro_batches(cls, data: object) -> object:
        """Add ``schedule.num_micro_batches`` if the global batch gives it, and ``num_chunks`` if the kind does."""
        return pipeline_checks.with_micro_batches(pipeline_checks.with_chunks(data))

    def _problems(self) -> Iterator[Problem]:
        if self.is_custom:
            yield from model_checks.check_custom_layers(self, self.custom)
        for check in (*(() if self.is_custom else _OF_GPT), *_OF_EVERY_MODEL):
            yield from check(self)


_OF_GPT: tuple[Callable[[PlanSections], Iterable[Problem]], ...] = (
    model_checks.check_tensor_parallel,
    model_checks.check_expert_parallel,
    model_checks.check_mtp,
    model_checks.check_compressed_attention,
    pipeline_checks.check_cut,
    model_checks.check_splits,
    run_checks.check_analytic,
    run_checks.check_activations,
    pipeline_checks.check_boundaries,
    run_checks.check_main_grad,
)
_OF_EVERY_MODEL: tuple[Callable[[PlanSections], Iterable[Problem]], ...] = (
    pipeline_checks.check_placed_ranks,
    pipeline_checks.check_lengths,
    pipeline_checks.check_global_batch,
    run_checks.check_network,
    run_checks.check_buckets,
    run_checks.check_run,
    run_checks.check_sharding,
    pipeline_checks.check_overlap,
)


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


PLAN_FILE_CODES: tuple[RuleDoc, ...] = (
    RuleDoc(
        code="PP100",
        title="the plan file cannot be read",
        explanation=(
            "The file does not exist, is a directory, may not be read, is larger than any plan, or is "
            "not UTF-8 text. Its content was not checked."
        ),
        wrong="pipeproof check plans/   # a directory",
        right="pipeproof check plans/gpt.yaml",
        kind=ExampleKind.COMMAND,
    ),
    RuleDoc(
        code="PP101",
        title="the plan file is not valid YAML",
        explanation=(
            "Plans are YAML 1.2 or JSON. The usual causes are a tab in the indentation, a missing space"
            " after a colon, an unclosed bracket or quote, and two documents in one file. Aliases may "
            "be used, but an alias must not contain itself, and the whole plan must stay within bounds "
            "of size and depth. Tags such as `!!int` have no meaning in a plan."
        ),
        wrong="topology: {pp: 2, tp: 2",
        right="topology: {pp: 2, tp: 2}",
    ),
    RuleDoc(
        code="PP102",
        title="unknown key",
        explanation=(
            "The key is not part of the plan format, or not of this section. Unknown keys are never "
            "ignored: with a misspelt key, the default would silently apply, and a different plan from the "
            "intended one would be proved."
        ),
        wrong="topology: {pp: 2, tensor_parallel: 2}",
        right="topology: {pp: 2, tp: 2}",
    ),
    RuleDoc(
        code="PP103",
        title="duplicate key",
        explanation=(
            "The same key is given twice in one mapping. Most YAML readers silently keep the last value; here "
            "it is an error, because one of the two values has no effect."
        ),
        wrong="topology: {pp: 2, pp: 4}",
        right="topology: {pp: 4}",
    ),
    RuleDoc(
        code="PP104",
        title="missing key",
        explanation=(
            "A key without a default is missing: the format's version, the sizes of the model, the schedule "
            "and its micro-batches must be given. A backward time in two parts needs both of them."
        ),
        wrong="schedule: {kind: 1f1b, num_micro_batches: 4}",
        right="schedule: {kind: 1f1b, num_micro_batches: 4, micro_batch_size: 2}",
    ),
    RuleDoc(
        code="PP105",
        title="wrong type",
        explanation=(
            "The value has another type than its key needs. Nothing is converted: a quoted number is a "
            "string, 4.0 is not an integer, and by YAML 1.2 `yes` and `on` are strings (booleans are "
            "`true` and `false`)."
        ),
        wrong="topology: {pp: 2, sequence_parallel: yes}",
        right="topology: {pp: 2, sequence_parallel: true}",
    ),
    RuleDoc(
        code="PP106",
        title="value out of bounds or not allowed",
        explanation=(
            "The value has the right type, but it is below or above what its key allows, is none of the"
            " listed names, or contradicts another key of the plan."
        ),
        wrong="topology: {pp: 0}",
        right="topology: {pp: 1}",
    ),
    RuleDoc(
        code="PP108",
        title="sizes do not divide",
        explanation=(
            "Attention heads share the hidden size evenly, and each needs an even size, because rotary "
            "embedding rotates pairs of elements. Tensor parallelism shards heads, the MLP and the "
            "vocabulary evenly over its ranks; with sequence parallelism the sequence too."
        ),
        wrong="topology: {pp: 2, tp: 3}\nmodel: {kind: gpt, num_layers: 4, hidden_size: 64, num_heads: 4, "
        "ffn_size: 128, vocab_size: 256, seq_length: 32}",
        right="topology: {pp: 2, tp: 4}\nmodel: {kind: gpt, num_layers: 4, hidden_size: 64, num_heads: 4, "
        "ffn_size: 128, vocab_size: 256, seq_length: 32}",
    ),
    RuleDoc(
        code="PP109",
        title="a list does not fit the topology",
        explanation=(
            "A list by global stage needs one entry for each stage: the layers of each stage under "
            "`stages`, and times under `cost` where they are not one number for all."
        ),
        wrong="topology: {pp: 2}\ncost: {forward_us: [100, 100, 140]}",
        right="topology: {pp: 2}\ncost: {forward_us: [100, 140]}",
    ),
)
