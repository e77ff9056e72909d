"""Importer of job configurations of torchtitan: TOML files, and the sections of a configuration in Python.

The keys have the meaning of torchtitan/distributed/pipeline_parallel.py and
config/job_config.py (the releases that are configured by TOML); the older
sections ``experimental`` and ``training`` are read too. Releases that are
configured by Python have other names for batches (commit b5bcd76:
torchtitan/config/configs.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

from pipeproof.diagnostics.finding import Location, RuleDoc
from pipeproof.diagnostics.problems import KeyPath, describe_value, listed, nearest_name
from pipeproof.diagnostics.source import PlanFileError
from pipeproof.interop.importers.import_codes import REFUSED, UNDECIDED, UNREADABLE, one_file
from pipeproof.interop.importers.imported import Flags, Imported
from pipeproof.interop.importers.model_parts import take_parts_of_type
from pipeproof.interop.importers.model_sizes import assume_model
from pipeproof.interop.importers.names import other_parts
from pipeproof.interop.importers.plan_builder import MAX_LAYERS, MAX_NUMBER, PlanBuilder, misspelt, stages_of
from pipeproof.interop.importers.tree import Placed, Tree, Unknown, read_toml

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
"""PyTorch's names, ours, and the default number of stages of a rank."""


_MODULE_NAMES: Final = MappingProxyType(
    {"tok_embeddings": "embed", "norm": "norm", "output": "head", "lm_head": "head"}
)
TOKENS: Final = "num_tokens_per_microbatch_per_dp_rank"
_MODULES: Final = "module_fqns_per_model_part"
_PARALLELISM: Final = ("parallelism", "experimental", "training")
_READ: Final = frozenset(
    {
        "pipeline_parallel_degree", "pipeline_parallel_schedule", "pipeline_parallel_schedule_csv",
        "pipeline_parallel_microbatch_size", "pipeline_parallel_layers_per_stage", "module_fqns_per_model_part",
        "pipeline_parallel_first_stage_less_layers", "pipeline_parallel_last_stage_less_layers",
        "tensor_parallel_degree", "context_parallel_degree", "expert_parallel_degree", "expert_tensor_parallel_degree",
        "data_parallel_replicate_degree", "data_parallel_shard_degree", "enable_sequence_parallel",
        "num_pp_microbatches",
    }
)  # fmt: skip
_WITHOUT_BEARING: Final = frozenset(
    {
        "fsdp_reshard_after_forward", "enable_async_tensor_parallel", "disable_loss_parallel",
        "enable_compiled_autograd", "context_parallel_rotate_method", "context_parallel_load_balancer",
        "context_parallel_ptrr_mask_key", "enable_fsdp_symm_mem", "spmd_backend",
    }
)  # fmt: skip
_ENCODER: Final = re.compile(r"(vision|image|video|audio|\w*encoder|mm)(_\w+)?$")
"""Finds sections of encoders."""
_KEYS: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "": frozenset({*_PARALLELISM, "activation_checkpoint", "model"}),
        "parallelism": _READ | _WITHOUT_BEARING,
        "experimental": _READ | _WITHOUT_BEARING,
        "training": _READ | _WITHOUT_BEARING | {
            "local_batch_size", "batch_size", "global_batch_size", "seq_len", "max_norm", "max_context_length", TOKENS,
        },
        "activation_checkpoint": frozenset({"mode"}),
        "model": frozenset({"name", "flavor", "num_layers"}),
    }
)  # fmt: skip
"""Keys by section; the first row has the sections."""


def import_torchtitan(files: Sequence[Path], flags: Flags) -> Imported:
    """Import one TOML file of torchtitan.

    Raises:
        PlanFileError: PP100 or PP170 if it cannot be read, PP171 if torchtitan refuses the settings.
    """
    return import_sections(read_toml(one_file(files, "a job of torchtitan is one TOML file")), flags)


def import_sections(tree: Tree, flags: Flags) -> Imported:
    """Import a configuration of torchtitan by its sections.

    Raises:
        PlanFileError: PP170 if a value cannot be read, PP171 if torchtitan refuses the settings.
    """
    job = _Job(tree, PlanBuilder("torchtitan", flags))
    job.read()
    return job.plan.imported(tree.source.file, tree.source.lines)


_Default = TypeVar("_Default", int, None, int | None)


class _Job:
    """The values of a configuration, and the builder of the plan that they set."""

    def __init__(self, tree: Tree, plan: PlanBuilder) -> None:
        self.tree, self.plan = tree, plan

    def placed(self, *path: str) -> Placed | None:
        """Return a value; None without one, or for null.

        Raises:
            PlanFileError: PP170, only a run determines it.
        """
        placed = self.tree.get(*path)
        if placed is None or placed.value is None:
            return None
        if isinstance(placed.value, Unknown):
            raise self.refused(f"`{'.'.join(path)}` is {placed.value.why}", *path)
        return placed

    def value(self, *path: str, default: Any = None) -> Any:
        """Return a value without its location; ``default`` without one."""
        placed = self.placed(*path)
        return default if placed is None else placed.value

    def number(self, *path: str, default: _Default, at_least: int = 1) -> int | _Default:
        """Return an integer; ``default`` without a value.

        Raises:
            PlanFileError: PP170, it is not an integer from ``at_least`` to the most that a plan can have.
        """
        placed = self.placed(*path)
        if placed is None:
            return default
        if type(placed.value) is not int or not at_least <= placed.value <= MAX_NUMBER:
            text = describe_value(placed.value)
            raise self.refused(f"`{'.'.join(path)}` needs an integer of at least {at_least}, found {text}", *path)
        return placed.value

    def location(self, *path: str) -> Location:
        """Return the location of a key, else of the nearest section around it."""
        placed = self.tree.get(*path)
        return self.tree.source.locate(path, key=True) if placed is None else placed.location

    def take(self, path: tuple[str, ...], key: KeyPath, value: object) -> None:
        """Set a plan key from the value at a path, or from its default."""
        placed = self.placed(*path)
        self.plan.set(key, value, ".".join(path), None if placed is None else placed.location)

    def refused(self, message: str, *path: str, help: str | None = None, code: RuleDoc = UNREADABLE) -> PlanFileError:
        """Return the error for a value."""
        return PlanFileError(code.finding(message, self.location(*path), help), source=self.tree.source)

    def refused_by_tool(self, message: str, *path: str, help: str | None = None) -> PlanFileError:
        """Return the error for settings that the trainer itself refuses (PP171)."""
        return self.refused(f"torchtitan refuses this: {message}", *path, help=help, code=REFUSED)

    def _require_known(self) -> None:
        """Refuse misspelt keys (their default would describe another job), and a file without any known key."""
        for section, names in _KEYS.items():
            for name in self.tree.names(section):
                near = None if name in names else misspelt(name, sorted(names))
                if near is not None:
                    shown = f"{section}.{name}" if section else name
                    path = (section, name) if section else (name,)
                    raise self.refused(f"`{shown}` is not a key of torchtitan", *path, help=f"did you mean `{near}`?")
        if not _KEYS[""].intersection(self.tree.names()):
            raise self.refused(
                "no key here is one of torchtitan that a plan needs",
                help="give the configuration of torchtitan, or the kind of file that this is: "
                "`pipeproof import plan --help` lists the kinds",
            )

    def read(self) -> None:
        self._require_known()
        pp = self._degree("pipeline_parallel_degree", "pp")
        tp = self._degree("tensor_parallel_degree", "tp")
        self._degree("context_parallel_degree", "cp")
        ep = self._degree("expert_parallel_degree", "ep")
        if tp > 1 and self.value("parallelism", "enable_sequence_parallel") is not False:
            self._take("tensor_parallel_degree", ("topology", "sequence_parallel"), value=True)
        if self.placed("model", "num_layers") is not None:
            self.take(("model", "num_layers"), ("model", "num_layers"), self.number("model", "num_layers", default=1))
        self._data_parallel(pp, tp, ep)
        num_chunks, csv = self._schedule(pp)
        num_stages = num_chunks * pp
        self._batches()
        self._model(num_stages)
        self._stages(pp, num_stages, csv=csv)
        if num_chunks == 1 and not csv:
            self._require_micro_batches(num_stages)
        self._rest()

    def _path(self, name: str) -> tuple[str, str]:
        """Return the section and key of a setting of parallelism, in any release."""
        sections = (section for section in _PARALLELISM if self.placed(section, name) is not None)
        return next(sections, _PARALLELISM[0]), name

    def _take(self, name: str, key: tuple[str, ...], value: object) -> None:
        self.take(self._path(name), key, value)

    def _degree(self, name: str, axis: str) -> int:
        if ("topology", axis) in self.plan:
            return self.plan.number("topology", axis)
        path = self._path(name)
        value = self.number(*path, default=1)
        if self.placed(*path) is not None:
            self.take(path, ("topology", axis), value)
        return value

    def _data_parallel(self, pp: int, tp: int, ep: int) -> None:
        """Set ``dp``: replicas times shards; ep is a part of the shards there, and a separate axis here."""
        plan, cp = self.plan, self.plan.number("topology", "cp")
        path = self._path("data_parallel_shard_degree")
        shard = self.number(*path, default=-1, at_least=-1)
        replicas = self.number(*self._path("data_parallel_replicate_degree"), default=1)
        world = plan.flags.world_size
        if shard == -1 and world is None:
            plan.assume(
                ("topology", "dp"), 1, "all other processes are data parallel: `--world-size` gives their number"
            )
            return
        if shard == -1:
            others = replicas * cp * tp * pp
            if world is None or world % others:
                message = f"{world} processes do not divide by dp_replicate x cp x tp x pp = {others}"
                raise self.refused(message, *path, code=REFUSED)
            shard = world // others
        if shard * replicas % ep:
            raise self.refused(
                f"expert parallelism over {ep} of {shard * replicas} data-parallel ranks cannot be described: experts "
                "are on ranks with one tensor-parallel and context-parallel index here", *path,
            )  # fmt: skip
        self.take(path, ("topology", "dp"), shard * replicas // ep)
        if shard > 1:
            if replicas == 1:
                plan.set(("memory", "shard_optimizer"), "dp", "data_parallel_shard_degree", self.location(*path))
            why = "parameters and gradients are whole on each rank here"
            plan.ignore("data_parallel_shard_degree", why, self.location(*path))

    def _schedule(self, pp: int) -> tuple[int, bool]:
        """Set ``schedule.kind``, and return the stages of a rank and True if a file gives the order."""
        name = "pipeline_parallel_schedule"
        schedule_name = str(self.value(*self._path(name), default="1F1B"))
        path = self.value(*self._path("pipeline_parallel_schedule_csv"))
        if path:
            self._take("pipeline_parallel_schedule_csv", ("schedule", "kind"), "file")
            self._take("pipeline_parallel_schedule_csv", ("schedule", "path"), str(Path(path).resolve()))
        kinds = {pytorch.lower(): kind for pytorch, kind in _SCHEDULES.items()}  # PyTorch ignores the case
        schedule = kinds.get(schedule_name.lower())
        if schedule is None and not path:
            near = nearest_name(schedule_name, _SCHEDULES)
            fix = f"did you mean {near}?" if near else f"known are {listed(list(_SCHEDULES), 'and')}"
            raise self.refused(f"`{schedule_name}` is not a schedule of PyTorch", *self._path(name), help=fix)
        kind, chunks = schedule or ("file", 1 if schedule_name.lower() == "pipelineschedulesingle" else 2)
        if pp == 1:
            kind, chunks = "1f1b", 1
        self._take(name, ("schedule", "kind"), kind)
        if kind == "interleaved":
            self._take(name, ("schedule", "variant"), "torch")
        parts, per_stage = self._parts(), self._path("pipeline_parallel_layers_per_stage")
        if pp > 1 and parts:
            chunks = max(len(parts) // pp, 1)
        elif pp > 1 and self.placed(*per_stage) is not None and ("model", "num_layers") in self.plan:
            layers = self.plan.number("model", "num_layers") + sum(self._weights())
            chunks = max(-(-layers // self.number(*per_stage, default=1)) // pp, 1)
        if chunks > 1:
            self._take(name, ("schedule", "num_chunks"), chunks)
        return chunks, bool(path)

    def _weights(self) -> tuple[int, int]:
        """Return the weights of the embedding, and of the norm with the head, in layers."""
        names = ("pipeline_parallel_first_stage_less_layers", "pipeline_parallel_last_stage_less_layers")
        first, last = (self.number(*self._path(name), default=1, at_least=0) for name in names)
        return first, last

    def _model(self, num_stages: int) -> None:
        for path, key in ((("training", "seq_len"), "seq_length"), (("model", "vocab_size"), "vocab_size")):
            if self.placed(*path) is not None:
                self.take(path, ("model", key), self.number(*path, default=1))
        kind = str(self.value("model", "name", default=""))
        take_parts_of_type(self.plan, kind, "name", self.location("model", "name"))
        self._find_other_parts(kind)
        if self.plan.flags.model_config is None and self.plan.number("topology", "pp") > 1:
            blocks = {module for part in self._parts() for module in self._named(part) if module.startswith("layer.")}
            if blocks:
                self._take(_MODULES, ("model", "num_layers"), len(blocks))
        assume_model(self.plan, num_stages)

    def _find_other_parts(self, kind: str) -> None:
        """Find PP177: the name of the model, or a section, names parts that a plan does not have."""
        why = other_parts(kind)
        if why is not None:
            self._leave_open(("model", "name"), f"`model.name` is `{kind}`: {why}")
        for path in ((), ("model",)):
            for name in self.tree.names(*path):
                if _ENCODER.match(name) and self.tree.names(*path, name):
                    shown = ".".join((*path, name))
                    self._leave_open((*path, name), f"`{shown}`: models with an encoder are not described")

    def _leave_open(self, path: tuple[str, ...], message: str) -> None:
        fix = "if it changes neither order, cut nor blocks, `--ignore PP177` gives the verdict without it"
        self.plan.find(UNDECIDED.finding(message, self.location(*path), fix))

    def _parts(self) -> Sequence[Any]:
        """Return the modules of all stages, where they are listed."""
        parts: Sequence[Any] = self.value(*self._path(_MODULES), default=())
        return parts

    def _stages(self, pp: int, num_stages: int, *, csv: bool) -> None:
        parts = self._parts()
        if pp == 1:
            return
        if parts:
            self._take(_MODULES, ("stages",), [self._named(part) for part in parts])
            return
        num_layers = self.plan.number("model", "num_layers")
        if num_layers > MAX_LAYERS or num_stages > MAX_LAYERS:
            message = f"{num_layers} layers in {num_stages} stages are more than a plan can have"
            raise self.refused(message, *self._path("pipeline_parallel_degree"))
        sizes = self._cut(num_stages, num_layers)
        stages = stages_of(sizes)
        if all(stages) and sum(sizes) == num_layers and not csv:
            self._take("pipeline_parallel_degree", ("stages",), stages)

    def _cut(self, num_stages: int, num_layers: int) -> list[int]:
        """Return the blocks of each stage: even, with embedding and head as layers; the first stages have one more."""
        first, last = self._weights()
        blocks_each, more = divmod(num_layers + first + last, num_stages)
        if max(first, last) > blocks_each:
            raise self.refused_by_tool(
                f"{num_layers} layers on {num_stages} stages leave {blocks_each} for each; the embedding counts for "
                f"{first}, the head for {last}", *self._path("pipeline_parallel_degree"),
            )  # fmt: skip
        sizes = [blocks_each + (stage < more) for stage in range(num_stages)]
        sizes[0] -= first
        sizes[-1] -= last
        return sizes

    def _named(self, part: Any) -> list[str]:
        names = []
        for module in part if isinstance(part, list) else [part]:
            kind, _, number = str(module).partition(".")
            name = f"layer.{number}" if kind == "layers" and number.isdecimal() else _MODULE_NAMES.get(str(module))
            if name is None:
                message = f"`{module}` is none of tok_embeddings, layers.N, norm and output"
                raise self.refused(message, *self._path(_MODULES), help="other modules are not described")
            names.append(name)
        return names

    def _batches(self) -> None:
        """Set the micro-batches of a step's local batch; a larger global batch repeats the whole schedule."""
        plan = self.plan
        if self.placed("training", TOKENS) is not None:
            self._batches_of_tokens()
            return
        local = self._local()
        total = self.number(*local, default=8)
        name = "pipeline_parallel_microbatch_size"
        size = self.number(*self._path(name), default=1)
        if total % size:
            raise self.refused_by_tool(f"{local[1]} {total} does not divide by {name} {size}", *local)
        self._take(name, ("schedule", "micro_batch_size"), size)
        if self.placed(*local) is not None:
            self.take(local, ("schedule", "num_micro_batches"), total // size)
        plan.assume(("schedule", "num_micro_batches"), total // size, "torchtitan's own local_batch_size is 8")
        if self.placed("training", "global_batch_size") is not None:
            why = "one run of the schedule is checked, which accumulation repeats"
            plan.ignore("global_batch_size", why, self.location("training", "global_batch_size"))

    def _local(self) -> tuple[str, str]:
        has_name = self.placed("training", "local_batch_size") is not None
        return "training", "local_batch_size" if has_name else "batch_size"

    def _batches_of_tokens(self) -> None:
        """Set the micro-batches of the releases whose batches are counted in tokens; sequences are packed there."""
        path = ("training", TOKENS)
        tokens, length = self.number(*path, default=1), self.number("training", "max_context_length", default=2048)
        if tokens % length:
            length = tokens
        self.take(path, ("model", "seq_length"), length)
        self.take(path, ("schedule", "micro_batch_size"), tokens // length)
        number = self.number(*self._path("num_pp_microbatches"), default=1)
        self._take("num_pp_microbatches", ("schedule", "num_micro_batches"), number)

    def _require_micro_batches(self, num_stages: int) -> None:
        """Refuse fewer micro-batches than stages, as ``PipelineScheduleSingle``; schedule files may have fewer."""
        num_micro_batches = self.plan.number("schedule", "num_micro_batches")
        if num_micro_batches < num_stages:
            path = self._local()
            fix = f"raise `{path[1]}`, or lower `pipeline_parallel_microbatch_size`"
            if self.placed("training", TOKENS) is not None:
                path, fix = ("parallelism", "num_pp_microbatches"), "raise `num_pp_microbatches`"
            raise self.refused(
                f"PyTorch refuses this: {num_micro_batches} micro-batches on {num_stages} stages, and a schedule with "
                "one stage on each rank (1F1B, GPipe) needs as many micro-batches as stages",
                *path, code=REFUSED, help=fix,
            )  # fmt: skip

    def _rest(self) -> None:
        plan = self.plan
        plan.set(("run", "backend"), "torch", "a job of torchtitan")
        plan.set(("run", "device"), "gpu", "a job of torchtitan")
        plan.set(("run", "dtype"), "bfloat16", "torchtitan's mixed precision")
        plan.set(("run", "main_grad_dtype"), "float32", "torchtitan's mixed precision")
        norm = self.value("training", "max_norm", default=1.0)
        if isinstance(norm, int | float) and norm > 0:
            self.take(("training", "max_norm"), ("run", "clip_norm"), float(norm))
        path = ("activation_checkpoint", "mode")
        mode = self.value(*path, default="selective")
        if mode not in ("none", "selective", "full", "memory_budget"):
            actual = describe_value(mode)
            raise self.refused(f"`mode` must be none, selective, full or memory_budget, found {actual}", *path)
        if mode in ("selective", "full"):
            self.take(path, ("memory", "recompute"), mode)
        unknown = [name for name in self.tree.names("parallelism") if name not in _KEYS["parallelism"]]
        if unknown:
            plan.ignore(", ".join(unknown), "not known here", self.location("parallelism", unknown[0]))
