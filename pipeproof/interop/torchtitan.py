"""A plan from a TOML job configuration of torchtitan.

What the keys mean is as torchtitan's torchtitan/distributed/pipeline_parallel.py
and config/job_config.py have it (the releases that are configured by TOML);
older names of the sections ``experimental`` and ``training`` are read too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from pipeproof.interop.codes import REFUSED
from pipeproof.interop.counts import count
from pipeproof.interop.draft import Draft
from pipeproof.interop.imported import Flags, Imported
from pipeproof.interop.model_sizes import Needs, assume_model
from pipeproof.interop.toml_file import TomlFile, read_toml
from pipeproof.specs.finding import Finding, Severity
from pipeproof.specs.load import PlanFileError
from pipeproof.specs.problems import listed, nearest_name

_SCHEDULES: Final[Mapping[str, tuple[str, int]]] = MappingProxyType(
    {
        "1F1B": ("1f1b", 1),
        "GPipe": ("gpipe", 1),
        "Interleaved1F1B": ("interleaved", 2),
        "LoopedBFS": ("looped_bfs", 2),
        "InterleavedZeroBubble": ("interleaved_zb", 2),
        "ZBVZeroBubble": ("zb_v", 2),
        "DualPipeV": ("dualpipe_v", 2),
    }
)
"""PyTorch's names, ours, and the stages of a rank where nothing says how many."""

_MODULES: Final[Mapping[str, str]] = MappingProxyType(
    {"tok_embeddings": "embed", "norm": "norm", "output": "head", "lm_head": "head"}
)
_MAX_LAYERS: Final = 100_000
"""Most blocks of a model, as in plans."""

_PARALLELISM: Final = ("parallelism", "experimental", "training")
_READ: Final = frozenset(
    {
        "pipeline_parallel_degree", "pipeline_parallel_schedule", "pipeline_parallel_schedule_csv",
        "pipeline_parallel_microbatch_size", "pipeline_parallel_layers_per_stage", "module_fqns_per_model_part",
        "pipeline_parallel_first_stage_less_layers", "pipeline_parallel_last_stage_less_layers",
        "tensor_parallel_degree", "context_parallel_degree", "expert_parallel_degree", "expert_tensor_parallel_degree",
        "data_parallel_replicate_degree", "data_parallel_shard_degree",
    }
)  # fmt: skip
_WITHOUT_BEARING: Final = frozenset(
    {
        "fsdp_reshard_after_forward", "enable_async_tensor_parallel", "disable_loss_parallel",
        "enable_compiled_autograd", "context_parallel_rotate_method", "context_parallel_load_balancer",
    }
)  # fmt: skip


def import_torchtitan(files: Sequence[Path], flags: Flags) -> Imported:
    """Import one TOML file of torchtitan.

    Raises:
        PlanFileError: PP100 or PP170 where it cannot be read, PP171 for what torchtitan itself refuses.
    """
    if len(files) != 1:
        message = f"a job of torchtitan is one TOML file, found {len(files)}"
        raise PlanFileError(Finding("PP170", Severity.ERROR, message))
    job = _Job(read_toml(files[0]), Draft("torchtitan", flags))
    job.read()
    return job.draft.imported(job.file.name, job.file.lines)


class _Job:
    """The file, and the plan that is made of it."""

    def __init__(self, file: TomlFile, draft: Draft) -> None:
        self.file = file
        self.draft = draft

    def read(self) -> None:
        """Set the keys of the plan."""
        pp = self._degree("pipeline_parallel_degree", "pp")
        tp = self._degree("tensor_parallel_degree", "tp")
        self._degree("context_parallel_degree", "cp")
        ep = self._degree("expert_parallel_degree", "ep")
        if tp > 1:
            self._take("tensor_parallel_degree", ("topology", "sequence_parallel"), value=True)
        self._data_parallel(pp, tp, ep)
        num_chunks, csv = self._schedule(pp)
        num_stages = num_chunks * pp
        self._model(num_stages)
        self._stages(pp, num_stages, csv=csv)
        self._batches()
        self._rest()

    def _setting(self, name: str) -> tuple[str, str] | None:
        """The section and key of a setting, wherever its release had it."""
        return next(((section, name) for section in _PARALLELISM if self.file.has(section, name)), None)

    def _number(self, section: str, name: str, default: int, *, at_least: int = 1) -> int:
        value = self.file.get(section, name, default)
        if type(value) is not int or value < at_least:
            raise self.file.refused(f"{name} needs an integer of at least {at_least}, found `{value}`", section, name)
        return value

    def _take(self, name: str, key: tuple[str, ...], value: object) -> None:
        at = self._setting(name)
        self.draft.set(key, value, name, None if at is None else self.file.place(*at))

    def _degree(self, name: str, axis: str) -> int:
        if ("topology", axis) in self.draft:
            return count(self.draft, "topology", axis)
        at = self._setting(name)
        if at is None:
            return 1
        value = self._number(*at, 1)
        self._take(name, ("topology", axis), value)
        return value

    def _data_parallel(self, pp: int, tp: int, ep: int) -> None:
        """Replicas times shards; ep is a part of the shards there, and an axis of its own here."""
        draft, cp = self.draft, count(self.draft, "topology", "cp")
        at_shard = self._setting("data_parallel_shard_degree") or ("parallelism", "data_parallel_shard_degree")
        at_copy = self._setting("data_parallel_replicate_degree") or ("parallelism", "data_parallel_replicate_degree")
        shard, copies = self._number(*at_shard, -1, at_least=-1), self._number(*at_copy, 1)
        world = draft.flags.world_size
        if shard == -1 and world is None:
            draft.assume(("topology", "dp"), 1, "all other processes are data parallel: `--world-size` says how many")
            return
        if shard == -1:
            others = copies * cp * tp * pp
            if world is None or world % others:
                raise self.file.refused(
                    f"{world} processes do not divide by dp_replicate x cp x tp x pp = {others}",
                    *at_shard,
                    code=REFUSED.code,
                )
            shard = world // others
        if shard * copies % ep:
            raise self.file.refused(
                f"expert parallelism over {ep} of {shard * copies} data-parallel ranks cannot be described: experts "
                "lie on ranks of one tensor-parallel and context-parallel place here", *at_shard,
            )  # fmt: skip
        draft.set(("topology", "dp"), shard * copies // ep, "data_parallel_shard_degree", self.file.given(*at_shard))
        if shard > 1:
            draft.ignore(
                "data_parallel_shard_degree", "parameters are whole on each rank here", self.file.place(*at_shard)
            )

    def _schedule(self, pp: int) -> tuple[int, bool]:
        """Set ``schedule.kind``; the stages of a rank, and whether a file gives the order."""
        name = "pipeline_parallel_schedule"
        at = self._setting(name) or ("parallelism", name)
        given = str(self.file.get(*at, "1F1B"))
        at_file = self._setting("pipeline_parallel_schedule_csv")
        path = self.file.get(*at_file, "") if at_file is not None else ""
        if path:
            self._take("pipeline_parallel_schedule_csv", ("schedule", "kind"), "file")
            self._take("pipeline_parallel_schedule_csv", ("schedule", "path"), str(Path(path).resolve()))
        known = {pytorch.lower(): pytorch for pytorch in _SCHEDULES}
        schedule = _SCHEDULES.get(known.get(given.lower(), ""))
        single = given.lower() == "pipelineschedulesingle"
        if schedule is None and not path:
            near = nearest_name(given, _SCHEDULES)
            mend = f"did you mean {near}?" if near else f"known are {listed(list(_SCHEDULES), 'and')}"
            raise self.file.refused(f"`{given}` is no schedule of PyTorch", *at, help=mend)
        kind, chunks = schedule or ("file", 1 if single else 2)
        if pp == 1:
            kind, chunks = "1f1b", 1
        self._take(name, ("schedule", "kind"), kind)
        if kind == "interleaved":
            self._take(name, ("schedule", "variant"), "torch")
        parts, per_stage = (
            self._setting("module_fqns_per_model_part"),
            self._setting("pipeline_parallel_layers_per_stage"),
        )
        if pp > 1 and parts is not None and self.file.get(*parts, None):
            chunks = max(len(self.file.get(*parts, ())) // pp, 1)
        elif pp > 1 and per_stage is not None and ("model", "num_layers") in self.draft:
            layers = count(self.draft, "model", "num_layers") + sum(self._weights())
            chunks = max(-(-layers // self._number(*per_stage, 1)) // pp, 1)
        if chunks > 1:
            self._take(name, ("schedule", "num_chunks"), chunks)
        return chunks, bool(path)

    def _weights(self) -> tuple[int, int]:
        """For how many layers the embedding, and the norm with the head, count in the cut."""
        names = ("pipeline_parallel_first_stage_less_layers", "pipeline_parallel_last_stage_less_layers")
        first, last = (self._number(*(self._setting(name) or ("parallelism", name)), 1, at_least=0) for name in names)
        return first, last

    def _model(self, num_stages: int) -> None:
        for section, name, key in (("training", "seq_len", "seq_length"), ("model", "vocab_size", "vocab_size")):
            if self.file.has(section, name):
                value = self._number(section, name, 1)
                self.draft.set(("model", key), value, name, self.file.place(section, name))
        assume_model(self.draft, Needs(num_stages))

    def _stages(self, pp: int, num_stages: int, *, csv: bool) -> None:
        at = self._setting("module_fqns_per_model_part")
        parts = None if at is None else self.file.get(*at, None)
        if pp == 1:
            return
        if at is not None and parts:
            self._take("module_fqns_per_model_part", ("stages",), [self._named(part, at) for part in parts])
            return
        num_layers = count(self.draft, "model", "num_layers")
        if num_layers > _MAX_LAYERS or num_stages > _MAX_LAYERS:
            at = self._setting("pipeline_parallel_degree") or ("parallelism", "pipeline_parallel_degree")
            raise self.file.refused(f"{num_layers} layers in {num_stages} stages are more than a plan has", *at)
        sizes = self._cut(num_stages, num_layers)
        stages, block = [], 0
        for size in sizes:
            stages.append([f"layer.{index}" for index in range(block, block + size)])
            block += size
        stages[0].insert(0, "embed")
        stages[-1] += ["norm", "head"]
        if all(stages) and block == num_layers and not csv:
            self._take("pipeline_parallel_degree", ("stages",), stages)

    def _cut(self, num_stages: int, num_layers: int) -> list[int]:
        """Blocks of each stage: even, where embedding and head count as layers, the first stages taking one more."""
        first, last = self._weights()
        each, more = divmod(num_layers + first + last, num_stages)
        if max(first, last) > each:
            at = self._setting("pipeline_parallel_degree") or ("parallelism", "pipeline_parallel_degree")
            raise self.file.refused(
                f"torchtitan refuses this: {num_layers} layers on {num_stages} stages leave {each} for one, and the "
                f"embedding counts for {first}, the head for {last}", *at, code=REFUSED.code,
            )  # fmt: skip
        sizes = [each + (stage < more) for stage in range(num_stages)]
        sizes[0] -= first
        sizes[-1] -= last
        return sizes

    def _named(self, part: Any, at: tuple[str, str]) -> list[str]:
        names = []
        for module in part if isinstance(part, list) else [part]:
            kind, _, number = str(module).partition(".")
            if kind == "layers" and number.isdecimal():
                names.append(f"layer.{number}")
            elif module in _MODULES:
                names.append(_MODULES[module])
            else:
                raise self.file.refused(
                    f"`{module}` is none of tok_embeddings, layers.N, norm and output", *at,
                    help="other modules are not described",
                )  # fmt: skip
        return names

    def _batches(self) -> None:
        """A step's local batch is cut into micro-batches; a larger global batch repeats the whole schedule."""
        draft = self.draft
        local = ("training", "local_batch_size" if self.file.has("training", "local_batch_size") else "batch_size")
        total = self._number(*local, 8)
        name = "pipeline_parallel_microbatch_size"
        size = self._number(*(self._setting(name) or ("parallelism", name)), 1)
        if total % size:
            raise self.file.refused(
                f"torchtitan refuses this: {local[1]} {total} does not divide by {name} {size}",
                *local,
                code=REFUSED.code,
            )
        self._take(name, ("schedule", "micro_batch_size"), size)
        if self.file.has(*local):
            draft.set(("schedule", "num_micro_batches"), total // size, local[1], self.file.place(*local))
        draft.assume(("schedule", "num_micro_batches"), total // size, "torchtitan's own local_batch_size is 8")
        if self.file.has("training", "global_batch_size"):
            place = self.file.place("training", "global_batch_size")
            draft.ignore("global_batch_size", "one run of the schedule is judged, which accumulation repeats", place)

    def _rest(self) -> None:
        draft, file = self.draft, self.file
        draft.set(("run", "backend"), "torch", "a job of torchtitan")
        draft.set(("run", "device"), "gpu", "a job of torchtitan")
        draft.set(("run", "dtype"), "bfloat16", "torchtitan's mixed precision")
        draft.set(("run", "main_grad_dtype"), "float32", "torchtitan's mixed precision")
        norm = file.get("training", "max_norm", 1.0)
        if isinstance(norm, int | float) and norm > 0:
            draft.set(("run", "clip_norm"), float(norm), "max_norm", file.given("training", "max_norm"))
        mode = file.get("activation_checkpoint", "mode", "selective")
        if mode in ("selective", "full"):
            draft.set(("memory", "recompute"), mode, "mode", file.given("activation_checkpoint", "mode"))
        for name in file.names("parallelism"):
            if name not in _READ and name not in _WITHOUT_BEARING:
                draft.ignore(name, "this key is not known here", file.place("parallelism", name))
