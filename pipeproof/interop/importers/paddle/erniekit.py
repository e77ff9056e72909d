"""Importer of ERNIEKit's configurations: training arguments with the names of the earlier trainers, and its own rules.

ERNIEKit (PaddlePaddle/ERNIE, Apache 2.0, commits 01d6181, 32e85dd and 3aa7875: erniekit/hparams, erniekit/train,
ernie/modeling_moe_pp.py) trains by the trainer that reads ``pipeline_parallel_config``. It stops at the start if
sequence parallelism would corrupt partially sent tensors, and reads the micro-batch from ``batch_size`` and the type
of activations from ``compute_type``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from pipeproof.diagnostics.problems import listed, nearest_name
from pipeproof.interop.importers.import_codes import unreadable
from pipeproof.interop.importers.imported import Flags, Imported
from pipeproof.interop.importers.names import depth_of, is_public
from pipeproof.interop.importers.paddle.fleet_job import FleetJob, SourcedValue, overridden
from pipeproof.interop.importers.paddle.fleet_plan import ineffective, refuse
from pipeproof.interop.importers.paddle.training_arguments import (
    READ,
    TOKENS,
    concerns_pipeline,
    import_settings,
    is_old,
)
from pipeproof.interop.importers.paddle.training_file import Settings, read_settings
from pipeproof.interop.importers.plan_builder import PlanBuilder, misspelt

_STAGES: Final = ("SFT", "PT", "DPO", "VL-SFT", "OCR-VL-SFT")
_STOPPING: Final = ("SFT", "PT", "DPO")
"""Stages that stop where partial sends would be wrong; the others turn them off."""
_DTYPES: Final = {
    "bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16", "wint8": "bfloat16", "wint4/8": "bfloat16",
    "nf4": "bfloat16",
}  # fmt: skip
"""Values of ``compute_type``, and the type of activations; ``bf16`` and ``fp16`` of the file have no effect."""
_OWN: Final = ("stage", "compute_type", "fine_tuning", "train_dataset_type")
"""ERNIEKit's configurations have at least one of these keys, and files of its pre-training script none."""
_KIT: Final = (*_OWN, "batch_size", "add_tail_layers", "pp_need_data", "pp_need_data_degree", "model_name_or_path")
_BY_BLOCKS: Final = "layer:Ernie4_5_DecoderLayer|EmptyLayer"
_CLEARED: Final = "enable_clear_every_step_cache"
_WHOLE: Final = "disable_partial_send_recv"
_MOST_NAMED: Final = 8


def import_ernie(files: Sequence[Path], flags: Flags) -> Imported:
    """Read a configuration of ERNIEKit, or other training arguments of ERNIE, which have the rules of their trainer.

    Raises:
        PlanFileError: a file cannot be read (PP100 to PP103, PP170), or ERNIEKit or its trainer refuses it (PP171).
    """
    settings = read_settings(files)
    if not (is_old(settings) and any(name in settings for name in _OWN)):
        return import_settings(settings, flags)
    _refuse_misspelt(settings)
    return import_settings(settings, flags, lambda job, plan: _of_kit(settings, job, plan))


def _refuse_misspelt(settings: Settings) -> None:
    """Refuse a key that is almost one of ERNIEKit's, which would keep its default."""
    for name in settings.values:
        near = None if name in READ or name in _KIT else misspelt(name, _KIT)
        if near is not None:
            raise unreadable(f"`{name}` is not a key of ERNIEKit", settings.location(name), f"did you mean `{near}`?")


def _of_kit(settings: Settings, job: FleetJob, plan: PlanBuilder) -> FleetJob:
    """Return the job with ERNIEKit's own keys, and note the keys that are not read."""
    stage = settings.text("stage") or SourcedValue("SFT", "stage", by_default=True)
    if stage.value not in _STAGES:
        _refuse_value(stage, _STAGES)
    compute = settings.text("compute_type") or SourcedValue("bf16", "compute_type", by_default=True)
    if compute.value not in _DTYPES:
        _refuse_value(compute, tuple(_DTYPES))
    asked = overridden(job, plan.flags)
    if asked.pp.value > 1:
        _check_start(settings, asked, stage)
    if "per_device_train_batch_size" in settings:
        size = settings.integer(1, "per_device_train_batch_size")
        ineffective(plan, size, "ERNIEKit overwrites it with `batch_size`, which is 1 if it is not set")
    if job.sequence_parallel.value and asked.tp.value == 1 and stage.value in _STOPPING:
        switch = job.sequence_parallel
        on = SourcedValue(value=True, setting=switch.setting, location=switch.location)
        ineffective(plan, on, "there is one tensor-parallel rank")
        job = replace(job, sequence_parallel=replace(switch, value=False))
    _depth(settings, plan)
    _note_others(settings, plan)
    batch, tail = settings.integer(1, "batch_size"), _tail(settings)
    return replace(
        job,
        micro_batch_size=batch if batch.value else replace(batch, value=1),
        dtype=replace(compute, value=_DTYPES[compute.value]),
        empty_tail=tail,
        cut=_cut(settings, asked, plan, stage.value, tail.value),
    )


def _refuse_value(setting: SourcedValue[str], choices: Sequence[str]) -> None:
    near = nearest_name(setting.value, choices)
    suggestion = f"did you mean `{near}`?" if near else f"known are {listed(list(choices), 'and')}"
    refuse(f"ERNIEKit refuses this: {setting.text}", setting.location, suggestion)


def _check_start(settings: Settings, job: FleetJob, stage: SourcedValue[str]) -> None:
    """Refuse a pipeline that ERNIEKit refuses."""
    tokens = settings.tokens(TOKENS)
    if stage.value == "DPO" and _CLEARED not in tokens:
        where = settings.location(TOKENS) or job.pp.location
        refuse(f"ERNIEKit refuses this: {stage.text} with {job.pp.text} and without the token `{_CLEARED}`", where,
               f"add it to `{TOKENS}`")  # fmt: skip
    if stage.value in _STOPPING and job.sequence_parallel.value and _WHOLE not in tokens:
        refuse(
            f"ERNIEKit refuses this: {job.sequence_parallel.text} with {job.pp.text} and without the token `{_WHOLE}`, "
            "as partial sends would corrupt the tensors between stages",
            job.sequence_parallel.location, f"add it to `{TOKENS}`",
        )  # fmt: skip
    wanted = settings.integer(0, "pp_need_data_degree")
    if not wanted.value and settings.flag("pp_need_data", default=False).value:
        wanted = SourcedValue(job.pp.value, "pp_need_data", settings.location("pp_need_data"))
    if not wanted.value:
        return
    if not 2 <= wanted.value <= job.pp.value:
        refuse(f"ERNIEKit refuses this: {wanted.text} is not from 2 to {job.pp.text}", wanted.location)
    if job.accumulate.value % wanted.value:
        refuse(
            f"ERNIEKit refuses this: {job.accumulate.text} does not divide by the {wanted.value} stages that load data "
            f"(`{wanted.setting}`)", job.accumulate.location or wanted.location,
        )  # fmt: skip


def _tail(settings: Settings) -> SourcedValue[int]:
    """Return the number of empty layers after the last block; false means 0."""
    if settings.values.get("add_tail_layers", (False, None))[0] is False:
        return SourcedValue(0, "add_tail_layers", settings.location("add_tail_layers"))
    return settings.integer(0, "add_tail_layers")


def _cut(settings: Settings, job: FleetJob, plan: PlanBuilder, stage: str, tail: int) -> SourcedValue[str] | None:
    """Return the partition: ERNIE's text models have a uniform one if the blocks do not divide over the ranks.

    Models with images, and models with PyTorch's weights (``-PT``), have the blocks divided, or are refused.
    """
    layers, name = plan.number("model", "num_layers", default=0), settings.text("model_name_or_path")
    by_blocks = job.cut is None or job.cut.by_default or job.cut.value == _BY_BLOCKS
    of_torch = name is not None and name.value.rstrip("/").endswith("-PT")
    if stage in _STOPPING and by_blocks and layers and not of_torch and (layers + tail) % job.pp.value:
        location = settings.location("pp_seg_method") or job.pp.location
        return SourcedValue("uniform", "pp_seg_method", location, by_default="pp_seg_method" not in settings)
    return job.cut


def _depth(settings: Settings, plan: PlanBuilder) -> None:
    """Set the number of blocks of the public checkpoint that the file names."""
    name = settings.text("model_name_or_path")
    depth = None if name is None else depth_of(name.value)
    if name is None or depth is None or ("model", "num_layers") in plan:
        return
    plan.set(("model", "num_layers"), depth, name.setting, name.location)
    if not is_public(name.value):
        plan.ignore(name.setting, "the directory is taken for the public checkpoint of that name", name.location)


def _note_others(settings: Settings, plan: PlanBuilder) -> None:
    """List once the keys that are not read; those with a term of parallelism are listed one by one elsewhere."""
    others = [name for name in settings.values if not (name in READ or name in _KIT or concerns_pipeline(name))]
    if others:
        named = ", ".join(others[:_MOST_NAMED]) + (", .." if others[_MOST_NAMED:] else "")
        why = f"{len(others)}, without a term of parallelism in their names, are not read ({named})"
        plan.ignore("other keys", why, settings.location(others[0]))
