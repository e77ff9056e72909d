"""A plan from a DeepSpeed JSON configuration, for jobs on DeepSpeed's pipeline engine.

The file has batches, precision and the sends of the pipeline engine; the
numbers of stages and of tensor-parallel ranks are in the program, or come from
``--set topology.pp=N``. The engine runs 1F1B, and by default splits activations
and their gradients over the tensor-parallel ranks (deepspeed/runtime/config.py,
``pipe_partitioned`` and ``grad_partitioned``; runtime/pipe/engine.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

from pipeproof.diagnostics.finding import Finding
from pipeproof.diagnostics.problems import describe_value
from pipeproof.diagnostics.source import PlanFileError
from pipeproof.interop.importers.draft import Draft, count
from pipeproof.interop.importers.import_codes import NOT_SHOWN, REFUSED, one_file
from pipeproof.interop.importers.imported import Flags, Imported
from pipeproof.interop.importers.model_sizes import Needs, assume_model, read_mapping
from pipeproof.interop.importers.settings import Settings
from pipeproof.interop.importers.tree import Tree, tree_of_data
from pipeproof.specs.plan import PlanSpec

_READ = MappingProxyType(
    {
        "": frozenset(
            {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
             "bf16", "fp16", "zero_optimization", "pipeline"}
        ),
        "pipeline": frozenset(
            {"stages", "partition", "pipe_partitioned", "grad_partitioned", "activation_checkpoint_interval"}
        ),
        "zero_optimization": frozenset({"stage"}),
        "bf16": frozenset({"enabled"}),
        "fp16": frozenset({"enabled"}),
    }
)  # fmt: skip
"""Keys that are read, by section; the first are those outside of sections."""
_SHARDED_GRADIENTS = 2
"""First ZeRO stage that shards gradients, which the pipeline engine refuses."""


def import_deepspeed(files: Sequence[Path], flags: Flags) -> Imported:
    """Import one JSON configuration of DeepSpeed.

    Raises:
        PlanFileError: PP100 or PP170 where it cannot be read, PP171 if DeepSpeed refuses the settings.
    """
    data, source = read_mapping(str(one_file(files, "a configuration of DeepSpeed is one JSON file")))
    job = DeepSpeedJob(tree_of_data(data, source), Draft("deepspeed", flags))
    job.require_known(_READ)
    return job.imported()


def _rephrase(section: str, plan: PlanSpec, findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """Rewrite suggested fixes with DeepSpeed's keys, which are in a section."""
    keys = {"`transport.forward: full`": "pipe_partitioned", "`transport.backward: full`": "grad_partitioned"}
    rephrased = []
    for finding in findings:
        text = finding.help
        for plan_key, key in keys.items():
            text = text and text.replace(plan_key, f'`"{key}": false` in {section}')
        rephrased.append(replace(finding, help=text))
    return tuple(rephrased)


class DeepSpeedJob(Settings):
    """A configuration of DeepSpeed, and the draft of its plan; ``section`` has the settings of its pipeline."""

    def __init__(self, tree: Tree, draft: Draft, section: str = "`pipeline`") -> None:
        super().__init__("DeepSpeed", tree, draft, ("auto",))
        self._section = section

    def imported(self) -> Imported:
        """Set the keys of the plan, and return it.

        Raises:
            PlanFileError: PP170 where a value cannot be read, PP171 if DeepSpeed refuses the settings.
        """
        draft = self.draft
        pp = self._stages()
        tp = count(draft, "topology", "tp")
        self._transport(tp)
        data_parallel = self._data_parallel(pp * tp)
        draft.set(("schedule", "kind"), "1f1b", "the pipeline engine's schedule")
        self._batches(data_parallel)
        self._rest()
        assume_model(draft, Needs(pp))
        return draft.imported(self.tree.source.file, self.tree.source.lines, partial(_rephrase, self._section))

    def _stages(self) -> int:
        if ("topology", "pp") in self.draft:
            return count(self.draft, "topology", "pp")
        stages = self.number("pipeline", "stages", default=None)
        if stages is None:
            raise self.refused(
                "the configuration does not have the number of pipeline stages: it is in the program",
                "pipeline",
                help="give it with `--set topology.pp=N`, and `--set topology.tp=N` for tensor-parallel ranks",
            )
        self.take(("pipeline", "stages"), ("topology", "pp"), stages)
        return stages

    def _transport(self, tp: int) -> None:
        for key, name in (("forward", "pipe_partitioned"), ("backward", "grad_partitioned")):
            value = self.value("pipeline", name)
            if value is not None and not isinstance(value, bool):
                raise self.refused(f"`{name}` must be true or false, found {describe_value(value)}", "pipeline", name)
            partial = tp > 1 and value is not False
            self.take(("pipeline", name), ("transport", key), "partial" if partial else "full")
        self.draft.set(("transport", "connections"), "lazy", "the pipeline engine sends nothing before the first step")

    def _data_parallel(self, ranks: int) -> int:
        draft = self.draft
        world = draft.flags.world_size
        if ("topology", "dp") in draft:
            return count(draft, "topology", "dp")
        if world is None:
            stated = self._stated_ranks()
            if stated is not None:
                self.take(("train_batch_size",), ("topology", "dp"), stated)
                return stated
            draft.assume(("topology", "dp"), 1, "the launcher has the number of processes: `--world-size`")
            return 1
        if world % ranks:
            message = f"{world} processes do not divide by pp x tp = {ranks}"
            raise PlanFileError(REFUSED.finding(message))
        draft.set(("topology", "dp"), world // ranks, f"{world} processes")
        return world // ranks

    def _stated_ranks(self) -> int | None:
        """Return the data-parallel ranks that three stated batch sizes need; None where these do not have them."""
        names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        total, size, steps = (self.number(name, default=None) for name in names)
        return total // (size * steps) if total and size and steps and total % (size * steps) == 0 else None

    def _batches(self, data_parallel: int) -> None:
        """Set batch, micro-batch and accumulation; two of them give the third."""
        size, steps = (
            self.number("train_micro_batch_size_per_gpu", default=None),
            self.number("gradient_accumulation_steps", default=None),
        )
        total = self.number("train_batch_size", default=None)
        if total is not None and size is not None and steps is not None and total != size * steps * data_parallel:
            raise self.refused_by_tool(
                f"train_batch_size {total} is not train_micro_batch_size_per_gpu {size} x "
                f"gradient_accumulation_steps {steps} x {data_parallel} data-parallel ranks",
                "train_batch_size", help="give the number of processes with `--world-size N`",
            )  # fmt: skip
        if total is not None:
            size, steps = self._completed(total, size, steps, data_parallel)
        if size is not None:
            self.take(("train_micro_batch_size_per_gpu",), ("schedule", "micro_batch_size"), size)
        if steps is not None:
            self.take(("gradient_accumulation_steps",), ("schedule", "num_micro_batches"), steps)
        self.draft.assume(("schedule", "micro_batch_size"), 1, "the configuration leaves it to the program")
        pp = count(self.draft, "topology", "pp")
        self.draft.assume(("schedule", "num_micro_batches"), 2 * pp, "the configuration leaves it to the program")

    def _completed(self, total: int, size: int | None, steps: int | None, data_parallel: int) -> tuple[int, int]:
        known = (size or 1) * (steps or 1) * data_parallel
        if total % known:
            message = f"train_batch_size {total} does not divide by {known}"
            raise self.refused_by_tool(message, "train_batch_size")
        if size is not None:
            return size, steps or total // known
        return total // known, steps or 1

    def _rest(self) -> None:
        draft = self.draft
        draft.set(("run", "backend"), "torch", "a job of DeepSpeed")
        draft.set(("run", "device"), "gpu", "a job of DeepSpeed")
        if self.value("bf16", "enabled") is True and self.value("fp16", "enabled") is True:
            message = "bf16 and fp16 are both enabled"
            raise self.refused_by_tool(message, "fp16", "enabled", help="disable one of the two")
        for name, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
            if self.value(name, "enabled") is True:
                self.take((name, "enabled"), ("run", "dtype"), dtype)
                self.take((name, "enabled"), ("run", "main_grad_dtype"), "float32")
        norm = self.value("gradient_clipping")
        if isinstance(norm, int | float) and not isinstance(norm, bool) and norm > 0:
            self.take(("gradient_clipping",), ("run", "clip_norm"), float(norm))
        stage = self.value("zero_optimization", "stage")
        if type(stage) is int and stage >= _SHARDED_GRADIENTS:
            message = f"its pipeline engine does not run with ZeRO stage {stage}"
            raise self.refused_by_tool(message, "zero_optimization", "stage", help="use stage 1")
        if stage == 1:
            self.take(("zero_optimization", "stage"), ("memory", "shard_optimizer"), "dp")
        interval = self.value("pipeline", "activation_checkpoint_interval")
        if type(interval) is int and interval > 0:
            self.take(("pipeline", "activation_checkpoint_interval"), ("memory", "recompute"), "full")
        partition = self.value("pipeline", "partition")
        if partition not in (None, "best", "uniform"):
            location = self.location("pipeline", "partition")
            message = f"`partition`: {partition} depends on the program; the partition is even here"
            draft.find(NOT_SHOWN.finding(message, location))
