"""Importer of NeMo Automodel's YAML recipes, which train on torch.distributed.pipelining.

``distributed`` has the degrees, and below ``pipeline`` the fields of one class, so that Automodel refuses every other
key there (Automodel, commit 36044ad: nemo_automodel/recipes/_dist_utils.py and
nemo_automodel/components/distributed/pipelining/functional.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from pipeproof.interop.importers.draft import MAX_LAYERS, Draft, count, misspelt, stages_of
from pipeproof.interop.importers.import_codes import REFUSED, one_file
from pipeproof.interop.importers.imported import Flags, Imported
from pipeproof.interop.importers.model_sizes import Needs, assume_model, read_model_config
from pipeproof.interop.importers.names import depth_of, is_public
from pipeproof.interop.importers.settings import Settings
from pipeproof.interop.importers.torch_pipelining import known_schedules, module_named, schedule_named
from pipeproof.interop.importers.tree import Placed, read_tree

_TOP: Final = "distributed"
_PIPELINE: Final = (_TOP, "pipeline")
_PP: Final = (_TOP, "pp_size")
_BATCH: Final = ("step_scheduler", "local_batch_size")
_GLOBAL: Final = ("step_scheduler", "global_batch_size")
_MICRO: Final = (*_PIPELINE, "pp_microbatch_size")
_PER_STAGE: Final = (*_PIPELINE, "layers_per_stage")
_ROUND: Final = (*_PIPELINE, "round_virtual_stages_to_pp_multiple")
_PARTS: Final = (*_PIPELINE, "module_fqns_per_model_part")
_SCHEDULE: Final = (*_PIPELINE, "pp_schedule")
_CSV: Final = (*_PIPELINE, "pp_schedule_csv")
_AXES: Final = ("pp", "tp", "cp", "ep")
_OF_PIPELINE: Final = frozenset(
    {
        "pp_schedule", "pp_schedule_csv", "pp_microbatch_size", "pp_batch_size", "layers_per_stage",
        "round_virtual_stages_to_pp_multiple", "module_fqns_per_model_part", "patch_inner_model",
        "patch_causal_lm_model", "patch_stage_backward_maybe_with_nosync", "dtype", "scale_grads_in_schedule",
        "loss_fn", "pp_seq_len",
    }
)  # fmt: skip
_OF_DISTRIBUTED: Final = frozenset(
    {
        "strategy", "dp_size", "dp_replicate_size", "tp_size", "pp_size", "cp_size", "ep_size", "pipeline", "moe",
        "sequence_parallel", "activation_checkpointing", "activation_checkpointing_scope", "defer_fsdp_grad_sync",
        "reshard_after_forward", "mp_policy", "offload_policy", "autocast_dtype", "tp_plan",
        "patch_is_packed_sequence", "enable_async_tensor_parallel", "enable_compile", "multimodal",
    }
)  # fmt: skip
_STRATEGIES: Final = ("fsdp2", "megatron_fsdp", "ddp")
_NAMES: Final = (
    ("model", "pretrained_model_name_or_path"),
    ("model", "config", "pretrained_model_name_or_path"),
)
_DEPTHS: Final = (("model", "config", "num_hidden_layers"), ("model", "num_hidden_layers"))
_LENGTHS: Final = (
    (*_PIPELINE, "pp_seq_len"),
    ("packed_sequence", "packed_sequence_size"),
    ("dataset", "seq_length"),
    ("dataset", "seq_len"),
)
_OFF: Final = ("false", "off", "none", "disabled", "no")


def import_automodel(files: Sequence[Path], flags: Flags) -> Imported:
    """Import one YAML recipe of Automodel.

    Raises:
        PlanFileError: PP100 or PP170 if it cannot be read, or its number of blocks is not known, PP171 if Automodel or
            PyTorch refuses the settings.
    """
    file = one_file(files, "a recipe of Automodel is one YAML file")
    recipe = _Recipe("Automodel", read_tree(file), Draft("automodel", flags), ("none", "None"))
    recipe.read()
    return recipe.draft.imported(recipe.tree.source.file, recipe.tree.source.lines)


class _Recipe(Settings):
    def read(self) -> None:
        """Set the keys of the plan."""
        self._require_keys()
        for axis in _AXES:
            self._degree(axis)
        pp = count(self.draft, "topology", "pp")
        if self.value(_TOP, "sequence_parallel") is True and count(self.draft, "topology", "tp") > 1:
            self.take((_TOP, "sequence_parallel"), ("topology", "sequence_parallel"), value=True)
        self._strategy(pp)
        self._data_parallel()
        self._sizes(pp)
        self._pipeline(pp)
        self._batches(pp)
        self._rest()

    def _require_keys(self) -> None:
        """Refuse a file of another kind, and keys that Automodel does not have."""
        if not _OF_DISTRIBUTED.intersection(self.tree.names(_TOP)):
            raise self.refused(
                "`distributed`, which has the degrees of parallelism, is not in the file",
                help="give the YAML recipe of Automodel, or the kind of file that this is",
            )
        self.require_known({_TOP: _OF_DISTRIBUTED})
        for name in self.tree.names(*_PIPELINE):
            if name not in _OF_PIPELINE:
                near = misspelt(name, sorted(_OF_PIPELINE))
                suggestion = f"did you mean `{near}`?" if near else None
                raise self.refused_by_tool(f"`pipeline` has no key `{name}`", *_PIPELINE, name, help=suggestion)

    def _degree(self, axis: str) -> None:
        path = (_TOP, f"{axis}_size")
        self.take(path, ("topology", axis), self.number(*path, default=1))

    def _strategy(self, pp: int) -> None:
        """Refuse the strategies that train without a pipeline, and a pipeline without its section."""
        placed = self.placed(_TOP, "strategy")
        strategy = "fsdp2" if placed is None else str(placed.value).lower()
        if strategy not in _STRATEGIES:
            raise self.refused_by_tool(f"`strategy: {strategy}` is none of {', '.join(_STRATEGIES)}", _TOP, "strategy")
        if pp > 1 and strategy != "fsdp2":
            raise self.refused_by_tool(
                f"`strategy: {strategy}` with pp_size {pp}", _TOP, "strategy", help="pipelines need `fsdp2`"
            )
        if pp > 1 and "pipeline" not in self.tree.names(_TOP):
            raise self.refused_by_tool(
                f"pp_size {pp} without `distributed.pipeline`",
                *_PP,
                help="add the section; `pipeline: {}` has the defaults",
            )

    def _data_parallel(self) -> None:
        """Set ``dp``: all data-parallel ranks, of which ep is a part there; it is a separate axis here."""
        draft, path = self.draft, (_TOP, "dp_size")
        pp, tp, cp, ep = (count(draft, "topology", axis) for axis in _AXES)
        others, world, placed = tp * cp * pp, draft.flags.world_size, self.placed(*path)
        replicas = self.number(_TOP, "dp_replicate_size", default=1)
        total = self.number(*path, default=1)
        if placed is None and world is None:
            why = "all other processes are data parallel: `--world-size` gives their number"
            draft.assume(("topology", "dp"), max(-(-2 * replicas // ep), 1) if replicas > 1 else 1, why)
            total = count(draft, "topology", "dp") * ep
        elif placed is None and world is not None:
            if world % others:
                raise self.refused_by_tool(f"{world} processes do not divide by tp x cp x pp = {others}", *_PP)
            total = world // others
        elif world is not None and world != total * others:
            raise self.refused_by_tool(f"{world} processes are not dp x tp x cp x pp = {total * others}", *path)
        if total % replicas or (replicas >= total and replicas != 1):
            raise self.refused_by_tool(
                f"dp_replicate_size {replicas} is no proper divisor of the data-parallel size {total}",
                _TOP,
                "dp_replicate_size",
            )
        if total * cp * tp % ep:
            raise self.refused_by_tool(
                f"{total * cp * tp} ranks of a stage do not divide by ep_size {ep}", _TOP, "ep_size"
            )
        if total % ep:
            raise self.refused(
                f"expert parallelism over {ep} of {total} data-parallel ranks cannot be described: experts are on "
                "ranks with one tensor-parallel and context-parallel index here",
                _TOP,
                "ep_size",
            )
        self.take(path, ("topology", "dp"), total // ep)
        if total > 1:
            sharded = self.location(_TOP, "strategy")
            if replicas == 1:
                draft.set(("memory", "shard_optimizer"), "dp", "distributed.strategy", sharded)
            draft.ignore("distributed.strategy", "parameters and gradients are whole on each rank here", sharded)

    def _sizes(self, pp: int) -> None:
        """Set the number of blocks and the length of sequences, and assume the other sizes."""
        draft = self.draft
        for path in _LENGTHS:
            placed = self.placed(*path)
            if placed is not None and placed.value != 0:  # packing of length 0 is none
                self.take(path, ("model", "seq_length"), self.number(*path, default=1))
        if draft.flags.model_config is not None:
            read_model_config(draft, draft.flags.model_config)
        for path in _DEPTHS:
            if self.placed(*path) is not None:
                self.take(path, ("model", "num_layers"), self.number(*path, default=1))
        named = next((placed for path in _NAMES if (placed := self.placed(*path)) is not None), None)
        name = str(named.value) if named is not None else ""
        depth = depth_of(name)
        if named is not None and depth is not None and ("model", "num_layers") not in draft:
            draft.set(("model", "num_layers"), depth, "model", named.location)
            if not is_public(name):
                note = "the directory is taken for the public checkpoint of that name"
                draft.ignore(name, note, named.location)
        if pp > 1 and ("model", "num_layers") not in draft:
            of_model = f"of `{name}` " if name else ""
            raise self.refused(
                f"the number of blocks {of_model}is not in the file, and decides the stages",
                *(next((path for path in _NAMES if self.placed(*path) is not None), _PP)),
                help="give it with `--set model.num_layers=N`, or `--model-config FILE`",
            )
        assume_model(draft, Needs(1))

    def _pipeline(self, pp: int) -> None:
        """Set the schedule and the stages."""
        if pp == 1:
            self.draft.set(("schedule", "kind"), "1f1b", ".".join(_PP), self.location(*_PP))
            return
        kind, default = self._schedule()
        parts = self.placed(*_PARTS)
        stages = self._cut(pp, default) if parts is None else self._named(parts, pp)
        chunks = len(stages) // pp
        if (default == 1) != (chunks == 1) and kind != "file":
            raise self.refused_by_tool(
                f"{len(stages)} stages on {pp} ranks with `{self._named_schedule()}`", *_PER_STAGE
            )
        if kind in ("zb_v", "dualpipe_v") and chunks != 2:
            raise self.refused_by_tool(
                f"{chunks} stages on each rank with `{self._named_schedule()}`, which has 2", *_SCHEDULE
            )
        if chunks > 1:
            self.take(_SCHEDULE, ("schedule", "num_chunks"), chunks)
        if kind != "file":
            self.take(_PER_STAGE if parts is None else _PARTS, ("stages",), stages)

    def _named_schedule(self) -> str:
        placed = self.placed(*_SCHEDULE)
        return "1f1b" if placed is None else str(placed.value)

    def _schedule(self) -> tuple[str, int]:
        """Set ``schedule.kind``, and return it with the default number of stages of a rank."""
        csv = self.placed(*_CSV)
        given = self._named_schedule()
        found = schedule_named(given)
        if found is None:
            raise self.refused(
                f"`{given}` is no schedule of PyTorch", *_SCHEDULE, help=known_schedules(given), code=REFUSED
            )
        kind, default = found
        if kind == "dualpipe_v":
            raise self.refused(
                f"`{given}`: Automodel places its stages in a loop, and PyTorch's schedule has them in a V",
                *_SCHEDULE,
                help="`ZBVZeroBubble` has two stages on each rank in a V",
            )
        if csv is not None:
            self.take(_CSV, ("schedule", "path"), str(Path(str(csv.value)).resolve()))
            kind = "file"
        self.take(_CSV if csv is not None else _SCHEDULE, ("schedule", "kind"), kind)
        if kind == "interleaved":
            self.take(_SCHEDULE, ("schedule", "variant"), "torch")
        return kind, default

    def _cut(self, pp: int, default: int) -> list[list[str]]:
        """Return the stages of Automodel's own cut: as many blocks each, and one more on the first ones."""
        layers = count(self.draft, "model", "num_layers")
        per_stage = self.placed(*_PER_STAGE)
        number = pp * default
        if layers > MAX_LAYERS or pp > MAX_LAYERS:
            raise self.refused(f"{layers} layers on {pp} ranks are more than a plan can have", *_PP)
        if per_stage is not None:
            number = -(-layers // self.number(*_PER_STAGE, default=1))
            number = self._rounded(number, pp)
        if number > layers or number < 1:
            raise self.refused_by_tool(
                f"{number} stages of {layers} blocks", *(_PP if per_stage is None else _PER_STAGE)
            )
        each, more = divmod(layers, number)
        return stages_of([each + (stage < more) for stage in range(number)])

    def _rounded(self, number: int, pp: int) -> int:
        """Return a multiple of the ranks near a number of stages, in the direction that the file names."""
        if number % pp == 0:
            return number
        placed = self.placed(*_ROUND)
        direction = None if placed is None else placed.value
        if direction not in ("up", "down"):
            per_stage = self.number(*_PER_STAGE, default=1)
            raise self.refused_by_tool(
                f"layers_per_stage {per_stage} makes {number} stages, which do not divide by pp_size {pp}",
                *_PER_STAGE,
                help=f"`{_ROUND[-1]}: up` or `down` rounds them",
            )
        return number - number % pp + (pp if direction == "up" else 0)

    def _named(self, parts: Placed, pp: int) -> list[list[str]]:
        """Return the stages that the file lists by the names of modules; rotary embeddings have no weights."""
        lists: Any = parts.value
        if not isinstance(lists, list) or not all(isinstance(part, list) for part in lists) or len(lists) % pp:
            raise self.refused_by_tool(f"`{_PARTS[-1]}` is no list of a multiple of {pp} lists", *_PARTS)
        stages = []
        for part in lists:
            names = [str(name).removeprefix("model.").removeprefix("language_model.") for name in part]
            known = {name: module_named(name, "embed_tokens") for name in names if name != "rotary_emb"}
            unknown = next((name for name, ours in known.items() if ours is None), None)
            if unknown is not None:
                raise self.refused(f"`{unknown}` is none of embed_tokens, layers.N, norm and lm_head", *_PARTS)
            stages.append([ours for ours in known.values() if ours is not None])
        return stages

    def _batches(self, pp: int) -> None:
        """Set the micro-batches of a local batch; accumulation of gradients repeats the whole schedule."""
        draft = self.draft
        batch, size = self.number(*_BATCH, default=1), self.number(*_MICRO, default=1)
        if pp == 1:
            size = batch
        elif batch % size:
            raise self.refused_by_tool(
                f"local_batch_size {batch} does not divide by pp_microbatch_size {size}", *_BATCH
            )
        self.take(_MICRO, ("schedule", "micro_batch_size"), size)
        self.take(_BATCH, ("schedule", "num_micro_batches"), batch // size)
        if batch // size < pp:
            raise self.refused_by_tool(
                f"local_batch_size {batch} of pp_microbatch_size {size} is less than a micro-batch for each of {pp} "
                "ranks",
                *_BATCH,
                help="raise `local_batch_size`",
            )
        total = self.placed(*_GLOBAL)
        if total is None:
            return
        known = self.placed(_TOP, "dp_size") is not None or draft.flags.world_size is not None
        ranks = count(draft, "topology", "dp") * count(draft, "topology", "ep") if known else 1
        if self.number(*_GLOBAL, default=1) % (batch * ranks):
            times = f"local_batch_size x dp = {batch * ranks}" if known else f"local_batch_size {batch}"
            raise self.refused_by_tool(f"global_batch_size {total.value} does not divide by {times}", *_GLOBAL)
        draft.ignore("global_batch_size", "one run of the schedule is checked, which accumulation repeats",
                     total.location)  # fmt: skip

    def _rest(self) -> None:
        draft = self.draft
        draft.set(("run", "backend"), "torch", "a recipe of Automodel")
        draft.set(("run", "device"), "gpu", "a recipe of Automodel")
        draft.set(("run", "dtype"), "bfloat16", "Automodel's mixed precision")
        draft.set(("run", "main_grad_dtype"), "float32", "Automodel's mixed precision")
        norm = self.placed("clip_grad_norm", "max_norm")
        value = 1.0 if norm is None else norm.value
        if isinstance(value, int | float) and value > 0:
            self.take(("clip_grad_norm", "max_norm"), ("run", "clip_norm"), float(value))
        mode = self.placed(_TOP, "activation_checkpointing")
        if mode is not None and str(mode.value).lower() not in _OFF:
            recompute = "selective" if mode.value == "selective" else "full"
            self.take((_TOP, "activation_checkpointing"), ("memory", "recompute"), recompute)
        teacher = self.placed("teacher_distributed", "pp_size")
        if teacher is not None and teacher.value != 1:
            draft.ignore("teacher_distributed", "the teacher's pipeline is not checked", teacher.location)
        if "peft" in self.tree.names():
            draft.ignore("peft", "adapters are not described: all weights train here")
        unknown = [name for name in self.tree.names(_TOP) if name not in _OF_DISTRIBUTED and name[:1] != "_"]
        if unknown:
            draft.ignore(", ".join(unknown), "not known here", self.tree.source.locate((_TOP, unknown[0]), key=True))
