"""Training arguments of PaddleFormers, PaddleNLP and ERNIE as a plan.

Two generations of names exist. PaddleFormers' present trainer
(``paddleformers/trainer/training_args.py``) has ``*_model_parallel_size`` and
a switch of its own for each thing that Fleet's pipeline can do; it accepts the
words of ``pipeline_parallel_config`` and warns that it does nothing by them.
PaddleNLP's trainer, and PaddleFormers' earlier one, have ``*_parallel_degree``
and obey those words. Both turn partial sends off beside sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeproof.interop.draft import Draft
from pipeproof.interop.imported import Flags, Imported
from pipeproof.interop.model_sizes import MODEL_NAMES, take_model
from pipeproof.interop.paddle.job import FleetJob, Given
from pipeproof.interop.paddle.lay_out import ineffective, lay_out, refuse
from pipeproof.interop.paddle.mend import retelling
from pipeproof.interop.paddle.training_file import Settings, read_settings, unreadable
from pipeproof.specs.problems import listed, nearest_name

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
"""The present name of each degree, and the names before it."""

SWITCHES = (
    "sequence_parallel", "partial_send_recv", "overlap_p2p_comm", "batch_p2p_comm", "variable_seq_lengths",
    "best_unbalanced_scheduler", "use_dualpipev", "forward_backward_overlap_scheduler", "p2p_cache_shape",
)  # fmt: skip

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
_OTHERS = (
    "gradient_accumulation_steps", "per_device_train_batch_size", "num_empty_layers_add_in_head",
    "num_empty_layers_add_in_tail", "num_nextn_predict_layers", "pp_seg_method", "hybrid_parallel_topo_order", TOKENS,
)  # fmt: skip
_PIPELINE_NAMES = (*(name for names in DEGREES.values() for name in names), *SWITCHES, *_OTHERS)
_KNOWN_ELSEWHERE = frozenset(
    {"moe_sharding_parallel_size", "expert_tensor_model_parallel_size", "expert_tensor_parallel_degree",
     "pp_need_data_degree", "tensor_parallel_config", "sharding_parallel_config", "data_parallel_config",
     "sequence_parallel_config", "context_parallel_config", "use_expert_parallel", "reorder_pipeline_priority"}
)  # fmt: skip
_ORDERS = {
    "sharding_first": ("dp", "sharding", "pp", "sep", "cp", "mp"),
    "pp_first": ("dp", "pp", "sharding", "sep", "cp", "mp"),
}


def import_formers(files: Sequence[Path], flags: Flags) -> Imported:
    """Read training arguments: YAML or JSON, one file or several, of which later ones win.

    Raises:
        PlanFileError: a file cannot be read (PP100 to PP103, PP170), or the trainer refuses the job (PP171).
    """
    settings = read_settings(files)
    draft = Draft("paddleformers", flags)
    _name_the_unknown(settings, draft)
    job = _job(settings, draft)
    take_model(draft, {name: settings.values[name] for name in MODEL_NAMES if name in settings})
    magic = settings.flag("enable_mtp_magic_send", default=False)
    if magic.value and job.mtp is not None and job.mtp.value:
        draft.set(("model", "mtp", "magic_send"), magic.value, magic.setting, magic.location)
    lay_out(job, draft)
    return draft.imported(settings.first.file, settings.first.lines, retelling(job))


def _is_old(settings: Settings) -> bool:
    """Whether the trainer that reads this file obeys the words of ``pipeline_parallel_config``."""
    new = any(names[0] in settings for names in DEGREES.values())
    old = any(name in settings for names in DEGREES.values() for name in names[1:2])
    return not new and (old or TOKENS in settings)


def _job(settings: Settings, draft: Draft) -> FleetJob:
    old = _is_old(settings)
    switches = _by_tokens(settings, draft) if old else _by_switches(settings, draft)
    names = {axis: (known[1:] if old else (known[0], *known[2:])) for axis, known in DEGREES.items()}
    if not old:
        _name_earlier_degrees(settings, draft)
    degree = {axis: settings.integer(1, *known) for axis, known in names.items() if axis not in ("sharding", "dp")}
    sharding = _sharding(settings, settings.integer(None, *names["sharding"]), degree["pp"], draft)
    seg_method = settings.text("pp_seg_method") or Given(
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
        order=_order(settings),
        accumulate=_at_least_one(settings.integer(1, "gradient_accumulation_steps")),
        micro_batch_size=_at_least_one(settings.integer(8, "per_device_train_batch_size", "batch_size")),
        chunks=_at_least_one(degree["chunks"]),
        sequence_parallel=settings.flag("sequence_parallel", default=False),
        guard=True,
        cut=seg_method,
        empty_head=settings.integer(0, "num_empty_layers_add_in_head"),
        empty_tail=settings.integer(0, "num_empty_layers_add_in_tail"),
        mtp=settings.integer(0, "num_nextn_predict_layers", "multi_token_pred_depth"),
        sequence=sequence if sequence.value else None,
        dtype=_dtype(settings),
        **switches,
    )


def _at_least_one(given: Given[int]) -> Given[int]:
    """The trainers take 0 for 1 in degrees."""
    return given if given.value else Given(1, given.setting, given.location, given.by_default)


def _by_switches(settings: Settings, draft: Draft) -> dict[str, Given[bool]]:
    """The present trainer: a switch for each; words that once did the same do nothing."""
    overlapped = settings.flag("overlap_p2p_comm", default=True)
    for token in _known_tokens(settings):
        ineffective(
            draft,
            Given(token, TOKENS, settings.place(TOKENS)),
            "this trainer accepts the word and sets nothing by it; it has a switch of its own for each",
        )
    return {
        "partial": settings.flag("partial_send_recv", default=True),
        "batched": settings.flag("batch_p2p_comm", default=not overlapped.value),
        "overlapped": overlapped,
        "cached_shapes": settings.flag("p2p_cache_shape", default=True),
        "variable_lengths": settings.flag("variable_seq_lengths", default=False),
        "balanced": settings.flag("best_unbalanced_scheduler", default=False),
        "dualpipe_v": settings.flag("use_dualpipev", default=False),
        "overlapped_backward": settings.flag("forward_backward_overlap_scheduler", default=False),
    }


def _by_tokens(settings: Settings, draft: Draft) -> dict[str, Given[bool]]:
    """The trainers before: words in one setting; what has become a switch since is unknown to them."""
    tokens = _known_tokens(settings)
    place = settings.place(TOKENS)
    for name in SWITCHES[1:]:
        if name in settings:
            ineffective(
                draft,
                Given(settings.values[name][0], name, settings.place(name)),
                f"beside degrees by their earlier names it is no setting of the trainer; that has words in `{TOKENS}`",
            )

    def switch(token: str) -> Given[bool]:
        on = not token.startswith("disable")
        return Given(on == (token in tokens), TOKENS, place, by_default=token not in tokens)

    return {
        "partial": switch("disable_partial_send_recv"),
        "batched": switch("disable_batch_p2p_comm"),
        "overlapped": switch("enable_overlap_p2p_comm"),
        "cached_shapes": switch("disable_p2p_cache_shape"),
        "variable_lengths": switch("enable_dynamic_shape"),
        "balanced": switch("best_unbalanced_scheduler"),
        "dualpipe_v": switch("use_dualpipev"),
        "overlapped_backward": switch("forward_backward_overlap_scheduler"),
    }


def _known_tokens(settings: Settings) -> tuple[str, ...]:
    tokens = settings.tokens(TOKENS)
    for token in tokens:
        if token not in _OLD_TOKENS:
            near = nearest_name(token, sorted(_OLD_TOKENS))
            mend = f"did you mean `{near}`?" if near else None
            raise unreadable(f"`{TOKENS}` has the word `{token}`, which no trainer knows", settings.place(TOKENS), mend)
    return tokens


def _name_earlier_degrees(settings: Settings, draft: Draft) -> None:
    """Degrees by names of the earlier trainers, in a file of the present one."""
    for now, before, *_ in DEGREES.values():
        if before in settings:
            given = Given(settings.values[before][0], before, settings.place(before))
            ineffective(draft, given, f"it is a name of earlier trainers; in this file's it is `{now}`")


def _order(settings: Settings) -> tuple[str, ...]:
    """The order of the mesh's axes, the slowest first."""
    order = settings.text("hybrid_parallel_topo_order")
    if order is not None and order.value not in _ORDERS:
        raise unreadable(f"`{order.setting}` must be {listed(list(_ORDERS))}, found `{order.value}`", order.location)
    experts = settings.flag("use_expert_parallel", default=False)
    if experts.value and settings.flag("reorder_pipeline_priority", default=False).value:
        return ("sharding", "pp", "sep", "cp", "dp", "mp")
    return _ORDERS["sharding_first" if order is None else order.value]


def _sharding(settings: Settings, degree: Given[int | None], pp: Given[int], draft: Draft) -> Given[int | None]:
    """The sharding ranks; beside a pipeline, the trainers take stage 1 only, and drop the stage over one rank."""
    stage = settings.text("sharding")
    if stage is None or not {"stage2", "stage3"} & set(stage.value.split()) or pp.value <= 1:
        return degree
    if degree.value in (0, 1):
        ineffective(draft, stage, f"the trainer drops sharding over one rank ({degree.words}); with more it refuses "
                                  "this stage beside a pipeline")  # fmt: skip
    elif degree.value is not None:
        refuse(
            f"{stage.words} and {pp.words}: the trainers take sharding stage 1 only beside a pipeline",
            stage.location,
            f"set `{stage.setting}: stage1`",
        )
    else:
        ineffective(draft, stage, "beside a pipeline the trainer refuses this stage, unless there is one rank to "
                                  f"shard over and it drops it ({degree.setting} is not set)")  # fmt: skip
    return degree


def _dtype(settings: Settings) -> Given[str] | None:
    for name, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        if settings.flag(name, default=False).value:
            return Given(dtype, name, settings.place(name))
    return None


def _name_the_unknown(settings: Settings, draft: Draft) -> None:
    """Settings that look like one of the pipeline's and are none: a misspelt one would leave its default in force."""
    for name in settings.values:
        looks = any(word in name for word in ("paral", "p2p", "partial_send", "pipeline", "virtual_pp"))
        if name in _PIPELINE_NAMES or name in _KNOWN_ELSEWHERE or not looks:
            continue
        near = nearest_name(name, _PIPELINE_NAMES)
        why = f"no setting that is known here; did you mean `{near}`?" if near else "no setting that is known here"
        draft.ignore(name, why, settings.place(name))
