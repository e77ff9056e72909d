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
from typing import Any

from pipeproof.diagnostics.finding import Finding, RuleDoc
from pipeproof.diagnostics.problems import KeyPath, describe_value
from pipeproof.diagnostics.source import PlanFileError, SourceMap
from pipeproof.interop.importers.draft import Draft, count, misspelt
from pipeproof.interop.importers.import_codes import NOT_SHOWN, REFUSED, UNREADABLE
from pipeproof.interop.importers.imported import Flags, Imported
from pipeproof.interop.importers.model_sizes import Needs, assume_model, read_mapping
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
    if len(files) != 1:
        message = f"a configuration of DeepSpeed is one JSON file, found {len(files)}"
        raise PlanFileError(UNREADABLE.finding(message))
    name = str(files[0])
    data, source = read_mapping(name)
    job = DeepSpeedJob(data, source, Draft("deepspeed", flags))
    job.require_known_keys()
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


class DeepSpeedJob:
    """A configuration of DeepSpeed, and the draft of its plan."""

    def __init__(self, data: dict[str, Any], source: SourceMap, draft: Draft, section: str = "`pipeline`") -> None:
        self._data = data
        self._source = source
        self._section = section
        self.draft = draft

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
        return draft.imported(self._source.file, self._source.lines, partial(_rephrase, self._section))

    def require_known_keys(self) -> None:
        """Refuse misspelt keys, and a file without any that is known.

        Raises:
            PlanFileError: PP170; with the default of a misspelt key the verdict would be about another job.
        """
        for section, known in _READ.items():
            keys = self._get(section) if section else self._data
            for key in keys if isinstance(keys, dict) else ():
                near = None if key in known else misspelt(key, sorted(known))
                if near is not None:
                    place = (section, key) if section else (key,)
                    raise self._refused(f"`{key}` is no key of DeepSpeed", *place, help=f"did you mean `{near}`?")
        if not self._data.keys() & _READ[""]:
            raise self._refused(
                "no key here is one of DeepSpeed that a plan needs",
                help="give the JSON configuration of DeepSpeed, or the kind of file that this is: "
                "`pipeproof import --help` lists the kinds",
            )

    def _get(self, *path: str) -> Any:
        value: Any = self._data
        for part in path:
            value = value.get(part) if isinstance(value, dict) else None
        return None if value == "auto" else value

    def _refused(self, message: str, *path: str, code: RuleDoc = UNREADABLE, help: str | None = None) -> PlanFileError:
        location = self._source.locate(path)
        return PlanFileError(code.finding(message, location, help), source=self._source)

    def _take(self, key: KeyPath, value: object, *path: str) -> None:
        self.draft.set(key, value, ".".join(path), self._source.locate(path))

    def _count(self, *path: str) -> int | None:
        value = self._get(*path)
        if value is None:
            return None
        if type(value) is not int or value < 1:
            raise self._refused(
                f"`{'.'.join(path)}` must be an integer of at least 1, found {describe_value(value)}", *path
            )
        return value

    def _stages(self) -> int:
        if ("topology", "pp") in self.draft:
            return count(self.draft, "topology", "pp")
        stages = self._count("pipeline", "stages")
        if stages is None:
            raise self._refused(
                "the configuration does not have the number of pipeline stages: it is in the program",
                "pipeline",
                help="give it with `--set topology.pp=N`, and `--set topology.tp=N` for tensor-parallel ranks",
            )
        self._take(("topology", "pp"), stages, "pipeline", "stages")
        return stages

    def _transport(self, tp: int) -> None:
        for key, name in (("forward", "pipe_partitioned"), ("backward", "grad_partitioned")):
            value = self._get("pipeline", name)
            if value is not None and not isinstance(value, bool):
                raise self._refused(f"`{name}` must be true or false, found {describe_value(value)}", "pipeline", name)
            partial = tp > 1 and value is not False
            self._take(("transport", key), "partial" if partial else "full", "pipeline", name)
        self.draft.set(("transport", "connections"), "lazy", "the pipeline engine sends nothing before the first step")

    def _data_parallel(self, ranks: int) -> int:
        draft = self.draft
        world = draft.flags.world_size
        if ("topology", "dp") in draft:
            return count(draft, "topology", "dp")
        if world is None:
            stated = self._stated_ranks()
            if stated is not None:
                self._take(("topology", "dp"), stated, "train_batch_size")
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
        total, size, steps = (self._count(name) for name in names)
        return total // (size * steps) if total and size and steps and total % (size * steps) == 0 else None

    def _batches(self, data_parallel: int) -> None:
        """Set batch, micro-batch and accumulation; two of them give the third."""
        size, steps = self._count("train_micro_batch_size_per_gpu"), self._count("gradient_accumulation_steps")
        total = self._count("train_batch_size")
        if total is not None and size is not None and steps is not None and total != size * steps * data_parallel:
            raise self._refused(
                f"DeepSpeed refuses this: train_batch_size {total} is not train_micro_batch_size_per_gpu {size} x "
                f"gradient_accumulation_steps {steps} x {data_parallel} data-parallel ranks",
                "train_batch_size", code=REFUSED, help="give the number of processes with `--world-size N`",
            )  # fmt: skip
        if total is not None:
            size, steps = self._completed(total, size, steps, data_parallel)
        if size is not None:
            self._take(("schedule", "micro_batch_size"), size, "train_micro_batch_size_per_gpu")
        if steps is not None:
            self._take(("schedule", "num_micro_batches"), steps, "gradient_accumulation_steps")
        self.draft.assume(("schedule", "micro_batch_size"), 1, "the configuration leaves it to the program")
        pp = count(self.draft, "topology", "pp")
        self.draft.assume(("schedule", "num_micro_batches"), 2 * pp, "the configuration leaves it to the program")

    def _completed(self, total: int, size: int | None, steps: int | None, data_parallel: int) -> tuple[int, int]:
        known = (size or 1) * (steps or 1) * data_parallel
        if total % known:
            message = f"DeepSpeed refuses this: train_batch_size {total} does not divide by {known}"
            raise self._refused(message, "train_batch_size", code=REFUSED)
        if size is not None:
            return size, steps or total // known
        return total // known, steps or 1

    def _rest(self) -> None:
        draft = self.draft
        draft.set(("run", "backend"), "torch", "a job of DeepSpeed")
        draft.set(("run", "device"), "gpu", "a job of DeepSpeed")
        if self._get("bf16", "enabled") is True and self._get("fp16", "enabled") is True:
            message = "DeepSpeed refuses this: bf16 and fp16 are both enabled"
            raise self._refused(message, "fp16", "enabled", code=REFUSED, help="disable one of the two")
        for name, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
            if self._get(name, "enabled") is True:
                self._take(("run", "dtype"), dtype, name, "enabled")
                self._take(("run", "main_grad_dtype"), "float32", name, "enabled")
        norm = self._get("gradient_clipping")
        if isinstance(norm, int | float) and not isinstance(norm, bool) and norm > 0:
            self._take(("run", "clip_norm"), float(norm), "gradient_clipping")
        stage = self._get("zero_optimization", "stage")
        if type(stage) is int and stage >= _SHARDED_GRADIENTS:
            message = f"DeepSpeed refuses this: its pipeline engine does not run with ZeRO stage {stage}"
            raise self._refused(message, "zero_optimization", "stage", code=REFUSED, help="use stage 1")
        if stage == 1:
            self._take(("memory", "shard_optimizer"), "dp", "zero_optimization", "stage")
        interval = self._get("pipeline", "activation_checkpoint_interval")
        if type(interval) is int and interval > 0:
            self._take(("memory", "recompute"), "full", "pipeline", "activation_checkpoint_interval")
        partition = self._get("pipeline", "partition")
        if partition not in (None, "best", "uniform"):
            location = self._source.locate(("pipeline", "partition"))
            message = f"`partition`: {partition} depends on the program; the partition is even here"
            draft.find(NOT_SHOWN.finding(message, location))
