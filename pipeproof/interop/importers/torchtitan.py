"""Importer of job configurations of torchtitan: TOML files, and the sections of a configuration in Python.

The keys have the meaning of torchtitan/distributed/pipeline_parallel.py and
config/job_config.py (the releases that are configured by TOML); older names of
the sections ``experimental`` and ``training`` are read too. The sections of
the releases that are configured by Python have other names for batches
(commit b5bcd76: torchtitan/config/configs.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from pipeproof.diagnostics.problems import describe_value
from pipeproof.diagnostics.source import PlanFileError
from pipeproof.interop.importers.draft import MAX_LAYERS, Draft, count, misspelt, stages_of
from pipeproof.interop.importers.import_codes import REFUSED, UNREADABLE
from pipeproof.interop.importers.imported import Flags, Imported
from pipeproof.interop.importers.model_parts import take_parts_of_type
from pipeproof.interop.importers.model_sizes import Needs, assume_model
from pipeproof.interop.importers.sectioned_file import SectionedFile, read_toml
from pipeproof.interop.importers.torch_pipelining import known_schedules, module_named, schedule_named

TOKENS: Final = "num_tokens_per_microbatch_per_dp_rank"
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
_READ_ELSEWHERE: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "training": frozenset(
            {"local_batch_size", "batch_size", "global_batch_size", "seq_len", "max_norm", "max_context_length", TOKENS}
        ),
        "activation_checkpoint": frozenset({"mode"}),
        "model": frozenset({"name", "flavor", "num_layers"}),
    }
)
"""Keys that are read from other sections than those of parallelism."""
_WITHOUT_BEARING: Final = frozenset(
    {
        "fsdp_reshard_after_forward", "enable_async_tensor_parallel", "disable_loss_parallel",
        "enable_compiled_autograd", "context_parallel_rotate_method", "context_parallel_load_balancer",
        "context_parallel_ptrr_mask_key", "enable_fsdp_symm_mem", "spmd_backend",
    }
)  # fmt: skip


def import_torchtitan(files: Sequence[Path], flags: Flags) -> Imported:
    """Import one TOML file of torchtitan.

    Raises:
        PlanFileError: PP100 or PP170 if it cannot be read, PP171 if torchtitan refuses the settings.
    """
    if len(files) != 1:
        message = f"a job of torchtitan is one TOML file, found {len(files)}"
        raise PlanFileError(UNREADABLE.finding(message))
    return import_sections(read_toml(files[0]), flags)


def import_sections(file: SectionedFile, flags: Flags) -> Imported:
    """Import a configuration of torchtitan by its sections.

    Raises:
        PlanFileError: PP170 if a value cannot be read, PP171 if torchtitan refuses the settings.
    """
    job = _Job(file, Draft("torchtitan", flags))
    job.read()
    return job.draft.imported(job.file.name, job.file.lines)


class _Job:
    """The file, and the draft of its plan."""

    def __init__(self, file: SectionedFile, draft: Draft) -> None:
        self.file = file
        self.draft = draft

    def read(self) -> None:
        """Set the keys of the plan."""
        self._require_known_keys()
        pp = self._degree("pipeline_parallel_degree", "pp")
        tp = self._degree("tensor_parallel_degree", "tp")
        self._degree("context_parallel_degree", "cp")
        ep = self._degree("expert_parallel_degree", "ep")
        has_sequences = self.file.get("parallelism", "enable_sequence_parallel", True) is not False
        if tp > 1 and has_sequences:
            self._take("tensor_parallel_degree", ("topology", "sequence_parallel"), value=True)
        if self.file.has("model", "num_layers"):
            layers = self._number("model", "num_layers", 1)
            self.draft.set(("model", "num_layers"), layers, "num_layers", self.file.location("model", "num_layers"))
        self._data_parallel(pp, tp, ep)
        num_chunks, csv = self._schedule(pp)
        num_stages = num_chunks * pp
        self._batches()
        self._model(num_stages)
        self._stages(pp, num_stages, csv=csv)
        if num_chunks == 1 and not csv:
            self._require_micro_batches(num_stages)
        self._rest()

    def _require_known_keys(self) -> None:
        """Refuse misspelt keys and sections, and a file without any section that is known.

        Raises:
            PlanFileError: PP170; with the default of a misspelt key the verdict would be about another job.
        """
        file = self.file
        known = {*_PARALLELISM, *_READ_ELSEWHERE}
        for section in file.sections:
            near = None if section in known else misspelt(section, sorted(known))
            if near is not None:
                raise file.refused(
                    f"`{section}` is no section of torchtitan", section, "", help=f"did you mean `{near}`?"
                )
            read = _READ_ELSEWHERE.get(section, frozenset()) | (_READ if section in _PARALLELISM else frozenset())
            for key in file.names(section) if section in known else ():
                near = None if key in read | _WITHOUT_BEARING else misspelt(key, sorted(read))
                if near is not None:
                    message = f"`{key}` is no key of torchtitan's section `{section}`"
                    raise file.refused(message, section, key, help=f"did you mean `{near}`?")
        if not known.intersection(file.sections):
            raise file.refused(
                "no section here is one of torchtitan that a plan needs", "", "",
                help="give the TOML job configuration, or the kind of file that this is: `pipeproof import --help` "
                "lists the kinds",
            )  # fmt: skip

    def _setting(self, name: str) -> tuple[str, str] | None:
        """Return the section and key of a setting, in any release."""
        return next(((section, name) for section in _PARALLELISM if self.file.has(section, name)), None)

    def _number(self, section: str, name: str, default: int, *, at_least: int = 1) -> int:
        value = self.file.get(section, name, default)
        if type(value) is not int or value < at_least:
            found = describe_value(value)
            raise self.file.refused(f"{name} needs an integer of at least {at_least}, found {found}", section, name)
        return value

    def _take(self, name: str, key: tuple[str, ...], value: object) -> None:
        source = self._setting(name)
        self.draft.set(key, value, name, None if source is None else self.file.location(*source))

    def _degree(self, name: str, axis: str) -> int:
        if ("topology", axis) in self.draft:
            return count(self.draft, "topology", axis)
        source = self._setting(name)
        if source is None:
            return 1
        value = self._number(*source, 1)
        self._take(name, ("topology", axis), value)
        return value

    def _data_parallel(self, pp: int, tp: int, ep: int) -> None:
        """Set ``dp``: replicas times shards; ep is a part of the shards there, and a separate axis here."""
        draft, cp = self.draft, count(self.draft, "topology", "cp")
        shard_key = self._setting("data_parallel_shard_degree") or ("parallelism", "data_parallel_shard_degree")
        replica_key = self._setting("data_parallel_replicate_degree") or (
            "parallelism",
            "data_parallel_replicate_degree",
        )
        shard, replicas = self._number(*shard_key, -1, at_least=-1), self._number(*replica_key, 1)
        world = draft.flags.world_size
        if shard == -1 and world is None:
            draft.assume(
                ("topology", "dp"), 1, "all other processes are data parallel: `--world-size` gives their number"
            )
            return
        if shard == -1:
            others = replicas * cp * tp * pp
            if world is None or world % others:
                raise self.file.refused(
                    f"{world} processes do not divide by dp_replicate x cp x tp x pp = {others}",
                    *shard_key,
                    code=REFUSED,
                )
            shard = world // others
        if shard * replicas % ep:
            raise self.file.refused(
                f"expert parallelism over {ep} of {shard * replicas} data-parallel ranks cannot be described: experts "
                "are on ranks with one tensor-parallel and context-parallel index here", *shard_key,
            )  # fmt: skip
        draft.set(
            ("topology", "dp"), shard * replicas // ep, "data_parallel_shard_degree", self.file.key_location(*shard_key)
        )
        if shard > 1:
            if replicas == 1:
                sharded = self.file.location(*shard_key)
                draft.set(("memory", "shard_optimizer"), "dp", "data_parallel_shard_degree", sharded)
            draft.ignore(
                "data_parallel_shard_degree",
                "parameters and gradients are whole on each rank here",
                self.file.location(*shard_key),
            )

    def _schedule(self, pp: int) -> tuple[int, bool]:
        """Set ``schedule.kind``, and return the stages of a rank and True if a file gives the order."""
        name = "pipeline_parallel_schedule"
        source = self._setting(name) or ("parallelism", name)
        given = str(self.file.get(*source, "1F1B"))
        csv_key = self._setting("pipeline_parallel_schedule_csv")
        path = self.file.get(*csv_key, "") if csv_key is not None else ""
        if path:
            self._take("pipeline_parallel_schedule_csv", ("schedule", "kind"), "file")
            self._take("pipeline_parallel_schedule_csv", ("schedule", "path"), str(Path(path).resolve()))
        schedule = schedule_named(given)
        single = given.lower() == "pipelineschedulesingle"
        if schedule is None and not path:
            raise self.file.refused(f"`{given}` is no schedule of PyTorch", *source, help=known_schedules(given))
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
        """Return the weights of the embedding, and of the norm with the head, in layers."""
        names = ("pipeline_parallel_first_stage_less_layers", "pipeline_parallel_last_stage_less_layers")
        first, last = (self._number(*(self._setting(name) or ("parallelism", name)), 1, at_least=0) for name in names)
        return first, last

    def _model(self, num_stages: int) -> None:
        for section, name, key in (("training", "seq_len", "seq_length"), ("model", "vocab_size", "vocab_size")):
            if self.file.has(section, name):
                value = self._number(section, name, 1)
                self.draft.set(("model", key), value, name, self.file.location(section, name))
        kind = str(self.file.get("model", "name", ""))
        take_parts_of_type(self.draft, kind, "name", self.file.location("model", "name"))
        if self.draft.flags.model_config is None and count(self.draft, "topology", "pp") > 1:
            self._layers_of_parts()
        assume_model(self.draft, Needs(num_stages))

    def _layers_of_parts(self) -> None:
        """Set the number of blocks from the modules of all stages, where they are listed."""
        name = "module_fqns_per_model_part"
        source = self._setting(name)
        parts = None if source is None else self.file.get(*source, None)
        if source is None or not parts:
            return
        blocks = {module for part in parts for module in self._named(part, source) if module.startswith("layer.")}
        if blocks:
            self._take(name, ("model", "num_layers"), len(blocks))

    def _stages(self, pp: int, num_stages: int, *, csv: bool) -> None:
        source = self._setting("module_fqns_per_model_part")
        parts = None if source is None else self.file.get(*source, None)
        if pp == 1:
            return
        if source is not None and parts:
            self._take("module_fqns_per_model_part", ("stages",), [self._named(part, source) for part in parts])
            return
        num_layers = count(self.draft, "model", "num_layers")
        if num_layers > MAX_LAYERS or num_stages > MAX_LAYERS:
            source = self._setting("pipeline_parallel_degree") or ("parallelism", "pipeline_parallel_degree")
            raise self.file.refused(
                f"{num_layers} layers in {num_stages} stages are more than a plan can have", *source
            )
        sizes = self._cut(num_stages, num_layers)
        stages = stages_of(sizes)
        if all(stages) and sum(sizes) == num_layers and not csv:
            self._take("pipeline_parallel_degree", ("stages",), stages)

    def _cut(self, num_stages: int, num_layers: int) -> list[int]:
        """Return the blocks of each stage: even, with embedding and head as layers; the first stages have one more."""
        first, last = self._weights()
        blocks_each, more = divmod(num_layers + first + last, num_stages)
        if max(first, last) > blocks_each:
            source = self._setting("pipeline_parallel_degree") or ("parallelism", "pipeline_parallel_degree")
            raise self.file.refused(
                f"torchtitan refuses this: {num_layers} layers on {num_stages} stages leave {blocks_each} for each; "
                f"the embedding counts for {first}, the head for {last}", *source, code=REFUSED,
            )  # fmt: skip
        sizes = [blocks_each + (stage < more) for stage in range(num_stages)]
        sizes[0] -= first
        sizes[-1] -= last
        return sizes

    def _named(self, part: Any, source: tuple[str, str]) -> list[str]:
        names = []
        for module in part if isinstance(part, list) else [part]:
            name = module_named(str(module), "tok_embeddings")
            if name is None:
                raise self.file.refused(
                    f"`{module}` is none of tok_embeddings, layers.N, norm and output", *source,
                    help="other modules are not described",
                )  # fmt: skip
            names.append(name)
        return names

    def _batches(self) -> None:
        """Set the micro-batches of a step's local batch; a larger global batch repeats the whole schedule."""
        draft = self.draft
        if self.file.has("training", TOKENS):
            self._batches_of_tokens()
            return
        local = ("training", "local_batch_size" if self.file.has("training", "local_batch_size") else "batch_size")
        total = self._number(*local, 8)
        name = "pipeline_parallel_microbatch_size"
        size = self._number(*(self._setting(name) or ("parallelism", name)), 1)
        if total % size:
            raise self.file.refused(
                f"torchtitan refuses this: {local[1]} {total} does not divide by {name} {size}",
                *local,
                code=REFUSED,
            )
        self._take(name, ("schedule", "micro_batch_size"), size)
        if self.file.has(*local):
            draft.set(("schedule", "num_micro_batches"), total // size, local[1], self.file.location(*local))
        draft.assume(("schedule", "num_micro_batches"), total // size, "torchtitan's own local_batch_size is 8")
        if self.file.has("training", "global_batch_size"):
            location = self.file.location("training", "global_batch_size")
            draft.ignore(
                "global_batch_size", "one run of the schedule is checked, which accumulation repeats", location
            )

    def _batches_of_tokens(self) -> None:
        """Set the micro-batches of the releases whose batches are counted in tokens; sequences are packed there."""
        draft, file = self.draft, self.file
        tokens, length = self._number("training", TOKENS, 1), self._number("training", "max_context_length", 2048)
        if tokens % length:
            length = tokens
        location = file.location("training", TOKENS)
        draft.set(("model", "seq_length"), length, TOKENS, location)
        draft.set(("schedule", "micro_batch_size"), tokens // length, TOKENS, location)
        name = "num_pp_microbatches"
        number = self._number(*(self._setting(name) or ("parallelism", name)), 1)
        self._take(name, ("schedule", "num_micro_batches"), number)

    def _require_micro_batches(self, num_stages: int) -> None:
        """Refuse fewer micro-batches than stages, as ``PipelineScheduleSingle`` does; schedules from a file run so."""
        num_micro_batches = count(self.draft, "schedule", "num_micro_batches")
        if num_micro_batches < num_stages:
            name = "local_batch_size" if self.file.has("training", "local_batch_size") else "batch_size"
            place, fix = ("training", name), f"raise `{name}`, or lower `pipeline_parallel_microbatch_size`"
            if self.file.has("training", TOKENS):
                place, fix = ("parallelism", "num_pp_microbatches"), "raise `num_pp_microbatches`"
            raise self.file.refused(
                f"PyTorch refuses this: {num_micro_batches} micro-batches on {num_stages} stages, and a schedule with "
                "one stage on each rank (1F1B, GPipe) needs as many micro-batches as stages",
                *place, code=REFUSED, help=fix,
            )  # fmt: skip

    def _rest(self) -> None:
        draft, file = self.draft, self.file
        draft.set(("run", "backend"), "torch", "a job of torchtitan")
        draft.set(("run", "device"), "gpu", "a job of torchtitan")
        draft.set(("run", "dtype"), "bfloat16", "torchtitan's mixed precision")
        draft.set(("run", "main_grad_dtype"), "float32", "torchtitan's mixed precision")
        norm = file.get("training", "max_norm", 1.0)
        if isinstance(norm, int | float) and norm > 0:
            draft.set(("run", "clip_norm"), float(norm), "max_norm", file.key_location("training", "max_norm"))
        mode = file.get("activation_checkpoint", "mode", "selective")
        if mode not in ("none", "selective", "full", "memory_budget"):
            message = f"`mode` must be none, selective, full or memory_budget, found {describe_value(mode)}"
            raise file.refused(message, "activation_checkpoint", "mode")
        if mode in ("selective", "full"):
            draft.set(("memory", "recompute"), mode, "mode", file.key_location("activation_checkpoint", "mode"))
        unknown = [name for name in file.names("parallelism") if name not in _READ | _WITHOUT_BEARING]
        if unknown:
            draft.ignore(", ".join(unknown), "not known here", file.location("parallelism", unknown[0]))
