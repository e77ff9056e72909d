"""Importer of training arguments of PaddleFormers, PaddleNLP and ERNIE.

Two generations of names exist. PaddleFormers' present trainer
(``paddleformers/trainer/training_args.py``) has ``*_model_parallel_size`` and
a switch for each feature of Fleet's pipeline; it accepts the tokens of
``pipeline_parallel_config`` and warns that they have no effect. PaddleNLP's
trainer, and PaddleFormers' earlier one, have ``*_parallel_degree`` and apply
those tokens. Both turn partial sends off under sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from pipeproof.diagnostics.finding import Location
from pipeproof.diagnostics.problems import listed, nearest_name
from pipeproof.interop.importers.import_codes import unreadable
from pipeproof.interop.importers.imported import Flags, Imported
from pipeproof.interop.importers.model_sizes import CONFIG_NAMES, take_model
from pipeproof.interop.importers.paddle.fleet_job import FleetJob, SourcedValue
from pipeproof.interop.importers.paddle.fleet_plan import ineffective, lay_out, refuse, rephrasing
from pipeproof.interop.importers.paddle.training_file import Settings, read_settings
from pipeproof.interop.importers.plan_builder import PlanBuilder, misspelt

TOKENS = "pipeline_parallel_config"

DEGREES = {
    "tp": ("tensor_model_parallel_size", "tensor_parallel_degree"),
    "pp": ("pipeline_model_parallel_size", "pipeline_parallel_degree"),
    "chunks": ("virtual_pipeline_model_parallel_size", "virtual_pp_degree"),
    "ep": ("expert_model_parallel_size", "expert_parallel_degree"),
    "cp": ("context_parallel_size", "context_parallel_degree"),
    "sep": ("sep_parallel_size", "sep_parallel_degree"),
    "sharding": ("sharding_parallel_size", "sharding_parallel_degree", "sharding_degree"),
    "dp": ("data_parallel_size", "data_parallel_degree"),
}
"""The present name of each degree, and its earlier names."""

_SWITCHES = {
    "partial": ("partial_send_recv", "disable_partial_send_recv"),
    "overlapped": ("overlap_p2p_comm", "enable_overlap_p2p_comm"),
    "batched": ("batch_p2p_comm", "disable_batch_p2p_comm"),
    "variable_lengths": ("variable_seq_lengths", "enable_dynamic_shape"),
    "balanced": ("best_unbalanced_scheduler", "best_unbalanced_scheduler"),
    "dualpipe_v": ("use_dualpipev", "use_dualpipev"),
    "overlapped_backward": ("forward_backward_overlap_scheduler", "forward_backward_overlap_scheduler"),
    "cached_shapes": ("p2p_cache_shape", "disable_p2p_cache_shape"),
}
"""Switches by the field of a job: the present trainer's setting, and the token of the earlier ones."""

_OLD_TOKENS = frozenset(
    {
        "disable_p2p_cache_shape", "disable_partial_send_recv", "enable_delay_scale_loss", "enable_dp_comm_overlap",
        "enable_sharding_comm_overlap", "enable_timer", "enable_release_grads", "enable_clear_every_step_cache",
        "enable_overlap_p2p_comm", "disable_batch_p2p_comm", "best_unbalanced_scheduler", "enable_offload_queue",
        "use_dualpipev", "forward_backward_overlap_scheduler", "enable_dynamic_shape", "sync_moment", "sync_param",
        "enable_send_recv_overlap", "enable_split_backward", "auto_parallel_sync_shared_params",
        "disable_non_batch_p2p_comm",
    }
)  # fmt: skip
_SEQUENCE = ("max_seq_len", "max_seq_length", "max_length", "seq_length")
_COMMON = ("model_name_or_path", "output_dir", "stage", "bf16", "fp16", "max_steps", "learning_rate", "batch_size")
"""Settings of almost every training file of these trainers, with or without a pipeline."""
_OTHERS = (
    "gradient_accumulation_steps", "per_device_train_batch_size", "num_empty_layers_add_in_head",
    "num_empty_layers_add_in_tail", "num_nextn_predict_layers", "pp_seg_method", "hybrid_parallel_topo_order", TOKENS,
)  # fmt: skip
_DEGREE_NAMES = tuple(name for names in DEGREES.values() for name in names)
_PIPELINE_NAMES = (*_DEGREE_NAMES, "sequence_parallel", *(name for name, _ in _SWITCHES.values()), *_OTHERS)
_OF_FLEETX = frozenset({"dp_degree", "mp_degree", "pp_degree"})
"""Settings of PaddleFleetX, which these trainers do not have."""
_OF_MODELS = frozenset({"architectures", "model_type"})
"""Keys of a model's configuration, which has some names in common with training arguments."""
_KNOWN_ELSEWHERE = frozenset(
    {"moe_sharding_parallel_size", "expert_tensor_model_parallel_size", "expert_tensor_parallel_degree",
     "pp_need_data_degree", "tensor_parallel_config", "sharding_parallel_config", "data_parallel_config",
     "sequence_parallel_config", "context_parallel_config", "use_expert_parallel", "reorder_pipeline_priority",
     "enable_auto_parallel"}
)  # fmt: skip
_DEPTH, _EXPERIMENTAL = "multi_token_pred_depth", "gpt_model_use_experimental_version"
READ = frozenset(
    {*_PIPELINE_NAMES, *_SEQUENCE, *CONFIG_NAMES, *_KNOWN_ELSEWHERE, "batch_size", "bf16", "fp16", "sharding",
     "recompute", "recompute_granularity", "enable_mtp_magic_send", _DEPTH, _EXPERIMENTAL}
)  # fmt: skip
"""Settings that are read, or whose effect on a pipeline is known to be none."""
_ORDERS = {
    "sharding_first": ("dp", "sharding", "pp", "sep", "cp", "mp"),
    "pp_first": ("dp", "pp", "sharding", "sep", "cp", "mp"),
}


def import_formers(files: Sequence[Path], flags: Flags) -> Imported:
    """Read training arguments: YAML or JSON, one file or several; later files override.

    Raises:
        PlanFileError: a file cannot be read (PP100 to PP103, PP170), or the trainer refuses the job (PP171).
    """
    return import_settings(read_settings(files), flags)


def import_settings(
    settings: Settings, flags: Flags, adapt: Callable[[FleetJob, PlanBuilder], FleetJob] | None = None
) -> Imported:
    """Return the plan of training arguments; ``adapt`` makes the changes of a program around the trainer.

    Raises:
        PlanFileError: PP170 or PP171, as for ``import_formers``.
    """
    plan = PlanBuilder("paddleformers", flags)
    _require_known_trainer(settings)
    _report_unknown_settings(settings, plan)
    job = _job(settings, plan)
    take_model(plan, {name: settings.values[name] for name in CONFIG_NAMES if name in settings})
    if adapt is not None:
        job = adapt(job, plan)
    _mtp_modules(settings, job, plan)
    lay_out(job, plan)
    _memory(settings, job, plan)
    return plan.imported(settings.first.file, settings.first.lines, rephrasing(job))


def _mtp_modules(settings: Settings, job: FleetJob, plan: PlanBuilder) -> None:
    """Set the input of modules. PaddleFleet's GPTModel has the last norm before them and the tail's empty layers.

    Earlier models, in pre-training programs, and its experimental version have the norm after both.
    """
    number, magic = job.mtp, settings.flag("enable_mtp_magic_send", default=False)
    if number is None or not (number.value or plan.get("model", "mtp", "num_modules")):
        return
    if magic.value and number.value:
        plan.set(("model", "mtp", "magic_send"), magic.value, magic.setting, magic.location)
    program = settings.text("stage")
    is_other = number.setting == _DEPTH or (program is not None and program.value.endswith("_pretrain"))
    if is_old(settings) or is_other or settings.flag(_EXPERIMENTAL, default=False).value:
        return
    plan.set(("model", "mtp", "reads"), "after_norm", "a model of PaddleFleet", number.location)
    plan.set(("model", "final_norm"), "before_tail_empty", "a model of PaddleFleet", number.location)


def is_old(settings: Settings) -> bool:
    """Return True if the trainer of this file applies the tokens of ``pipeline_parallel_config``."""
    new = any(names[0] in settings for names in DEGREES.values())
    old = any(name in settings for names in DEGREES.values() for name in names[1:2])
    return not new and (old or TOKENS in settings)


def _job(settings: Settings, plan: PlanBuilder) -> FleetJob:
    old = is_old(settings)
    switches = _by_tokens(settings, plan) if old else _by_switches(settings, plan)
    names = {axis: (keys[1:] if old else (keys[0], *keys[2:])) for axis, keys in DEGREES.items()}
    if not old:
        _report_earlier_degrees(settings, plan)
    degree = {axis: settings.integer(1, *keys) for axis, keys in names.items() if axis not in ("sharding", "dp")}
    sharding = _sharding(settings, settings.integer(None, *names["sharding"]), degree["pp"], plan)
    seg_method = settings.text("pp_seg_method") or SourcedValue(
        "layer:DecoderLayer|EmptyLayer", "pp_seg_method", by_default=True
    )
    sequence = settings.integer(0, *_SEQUENCE)
    return FleetJob(
        pp=_at_least_one(degree["pp"]),
        tp=_at_least_one(degree["tp"]),
        dp=settings.integer(None, *names["dp"]),
        sharding=sharding,
        sep=_at_least_one(degree["sep"]),
        cp=_at_least_one(degree["cp"]),
        ep=_at_least_one(degree["ep"]),
        order=_order(settings, old=old),
        accumulate=_at_least_one(settings.integer(1, "gradient_accumulation_steps")),
        micro_batch_size=_at_least_one(settings.integer(8, "per_device_train_batch_size", "batch_size")),
        chunks=_at_least_one(degree["chunks"]),
        sequence_parallel=settings.flag("sequence_parallel", default=False),
        guard=True,
        cut=seg_method,
        empty_head=settings.integer(0, "num_empty_layers_add_in_head"),
        empty_tail=settings.integer(0, "num_empty_layers_add_in_tail"),
        mtp=settings.integer(0, "num_nextn_predict_layers", _DEPTH),
        sequence=sequence if sequence.value else None,
        dtype=_dtype(settings),
        **switches,
    )


def _at_least_one(sourced: SourcedValue[int]) -> SourcedValue[int]:
    """Return the degree; 0 means 1, as in the trainers."""
    return sourced if sourced.value else SourcedValue(1, sourced.setting, sourced.location, sourced.by_default)


def _by_switches(settings: Settings, plan: PlanBuilder) -> dict[str, SourcedValue[bool]]:
    """Read the switches of the present trainer; the former tokens have no effect."""
    why = "this trainer accepts the token and ignores it; it has a switch for each token"
    for token in _known_tokens(settings):
        ineffective(plan, SourcedValue(token, TOKENS, settings.location(TOKENS)), why)
    overlapped = settings.flag("overlap_p2p_comm", default=True)
    on = {"partial", "overlapped", "cached_shapes", "" if overlapped.value else "batched"}
    return {field: settings.flag(name, default=field in on) for field, (name, _) in _SWITCHES.items()}


def _by_tokens(settings: Settings, plan: PlanBuilder) -> dict[str, SourcedValue[bool]]:
    """Read the tokens of the earlier trainers, in one setting; later switches are unknown to them."""
    tokens = _known_tokens(settings)
    location = settings.location(TOKENS)
    why = f"with earlier names of degrees it is not a setting of the trainer, which reads tokens in `{TOKENS}`"
    for name, _ in _SWITCHES.values():
        if name in settings:
            ineffective(plan, SourcedValue(settings.values[name][0], name, settings.location(name)), why)

    def switch(token: str) -> SourcedValue[bool]:
        on = not token.startswith("disable")
        return SourcedValue(on == (token in tokens), TOKENS, location, by_default=token not in tokens)

    return {field: switch(token) for field, (_, token) in _SWITCHES.items()}


def _known_tokens(settings: Settings) -> tuple[str, ...]:
    tokens = settings.tokens(TOKENS)
    for token in tokens:
        if token not in _OLD_TOKENS:
            near = nearest_name(token, sorted(_OLD_TOKENS))
            suggestion = f"did you mean `{near}`?" if near else None
            message = f"`{TOKENS}` has the token `{token}`, which no trainer knows"
            raise unreadable(message, settings.location(TOKENS), suggestion)
    return tokens


def _report_earlier_degrees(settings: Settings, plan: PlanBuilder) -> None:
    """Report degrees with names of the earlier trainers in a file of the present one."""
    for now, before, *_ in DEGREES.values():
        if before in settings:
            sourced = SourcedValue(settings.values[before][0], before, settings.location(before))
            ineffective(plan, sourced, f"it is a name of earlier trainers; this trainer's name is `{now}`")


def _order(settings: Settings, *, old: bool) -> tuple[str, ...]:
    """Return the order of the mesh's axes, the slowest first.

    Earlier trainers (``paddlenlp/trainer/training_args.py``) have pipelines outside of sharding by default, and with
    experts move data parallelism inside.
    """
    order = settings.text("hybrid_parallel_topo_order")
    if order is not None and order.value not in _ORDERS:
        raise unreadable(f"`{order.setting}` must be {listed(list(_ORDERS))}, found `{order.value}`", order.location)
    named = _ORDERS[("pp_first" if old else "sharding_first") if order is None else order.value]
    experts = settings.flag("use_expert_parallel", default=False)
    if old and experts.value:
        return (*named[1:-1], "dp", "mp")
    if experts.value and settings.flag("reorder_pipeline_priority", default=False).value:
        return ("sharding", "pp", "sep", "cp", "dp", "mp")
    return named


def _sharding(
    settings: Settings, degree: SourcedValue[int | None], pp: SourcedValue[int], plan: PlanBuilder
) -> SourcedValue[int | None]:
    """Return the sharding ranks; with a pipeline, the trainers accept stage 1 only, and drop it over one rank."""
    stage = settings.text("sharding")
    if stage is None or not {"stage2", "stage3"} & set(stage.value.split()) or pp.value <= 1:
        return degree
    if degree.value in (0, 1):
        ineffective(plan, stage, f"the trainer drops sharding over one rank ({degree.text}); with more it refuses "
                                  "this stage with a pipeline")  # fmt: skip
    elif degree.value is not None:
        message = f"{stage.text} and {pp.text}: the trainers accept only sharding stage 1 with a pipeline"
        refuse(message, stage.location, f"set `{stage.setting}: stage1`")
    else:
        ineffective(plan, stage, "with a pipeline the trainer refuses this stage, unless there is one sharding "
                                  f"rank and it drops the stage ({degree.setting} is not set)")  # fmt: skip
    return degree


def _memory(settings: Settings, job: FleetJob, plan: PlanBuilder) -> None:
    """Set the sharding of the optimizer state, and recomputation: present trainers name its granularity alone."""
    stage, granularity = settings.text("sharding"), settings.text("recompute_granularity")
    if stage is not None and job.sharding.value != 1:
        keys = ("shard_optimizer", "shard_gradients", "shard_weights")
        number = max((i for i in range(1, 4) if f"stage{i}" in stage.value.split()), default=0)
        for key in keys[:number]:
            plan.set(("memory", key), "dp", stage.setting, stage.location)
    switch = settings.flag("recompute", default=not is_old(settings) and granularity is not None)
    if not switch.value:
        return
    kind = "full" if granularity is None else granularity.value
    source = switch if granularity is None else granularity
    if kind in ("full", "core_attn"):
        recompute = {"full": "full", "core_attn": "selective"}[kind]
        plan.set(("memory", "recompute"), recompute, source.setting, source.location)
    else:
        why = "recomputation is of whole blocks or of the core of attention here"
        plan.ignore(source.setting, why, source.location)


def _dtype(settings: Settings) -> SourcedValue[str] | None:
    if all(settings.flag(name, default=False).value for name in ("bf16", "fp16")):
        refuse("`bf16` and `fp16` are both true: the trainers accept one of the two", settings.location("fp16"))
    for name, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        if settings.flag(name, default=False).value:
            return SourcedValue(dtype, name, settings.location(name))
    return None


def _require_known_trainer(settings: Settings) -> None:
    """Refuse files of another trainer, and jobs that do not run on Fleet's pipeline."""
    for name in settings.values:
        if name in _OF_FLEETX:
            raise unreadable(
                f"`{name}` is a setting of PaddleFleetX, which the trainers of PaddleFormers, PaddleNLP and ERNIE do "
                "not have",
                settings.location(name),
                "write the degrees with the names of these trainers, such as `pipeline_model_parallel_size`, or save "
                "the job's DistributedStrategy and use `--from fleet`",
            )
    automatic = settings.flag("enable_auto_parallel", default=False)
    if automatic.value:
        raise unreadable(
            f"{automatic.text}: the job runs on Paddle's automatic parallelism, whose pipeline is not described here",
            automatic.location,
            f"`{automatic.setting}: false` trains by Fleet's pipeline, which is checked",
        )
    keys = (*_PIPELINE_NAMES, *_SEQUENCE, *_COMMON)
    if not any(name in settings for name in (*_DEGREE_NAMES, "per_device_train_batch_size")):
        for name in settings.values:
            if name in _OF_MODELS:
                fix = "give the training arguments, and this file with `--model-config`"
                raise unreadable(f"`{name}` is a key of a model's configuration", settings.location(name), fix)
    if not any(name in settings for name in keys):
        raise unreadable(
            "no setting here is one of PaddleFormers, PaddleNLP or ERNIE that a plan needs",
            Location(settings.first.file),
            "give the training arguments, or the kind of this file: `pipeproof import plan --help` lists the kinds",
        )


def concerns_pipeline(name: str) -> bool:
    """Return True if the name of a setting has a term of pipelines or parallelism."""
    return any(term in name for term in ("paral", "p2p", "partial_send", "pipeline", "virtual_pp"))


def _report_unknown_settings(settings: Settings, plan: PlanBuilder) -> None:
    """Report settings that look like one of the pipeline's and are unknown."""
    for name in settings.values:
        if name in _PIPELINE_NAMES or name in _KNOWN_ELSEWHERE:
            continue
        similar_name = misspelt(name, _PIPELINE_NAMES)
        if similar_name is not None:
            message = f"`{name}` is not a setting of these trainers"
            raise unreadable(message, settings.location(name), f"did you mean `{similar_name}`?")
        if not concerns_pipeline(name):
            continue
        near = nearest_name(name, _PIPELINE_NAMES)
        why = f"an unknown setting; did you mean `{near}`?" if near else "an unknown setting"
        plan.ignore(name, why, settings.location(name))
