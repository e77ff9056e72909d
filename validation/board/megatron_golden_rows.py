"""Iteration times and memory peaks that Megatron-LM's functional tests store as golden values.

The file has a row for each case and machine. The arguments of a case come from Megatron-LM's own test configurations
(``megatron_cases.json``). The importer of Megatron-LM's arguments turns them into a plan.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pipeproof.diagnostics.finding import PipeproofError
from pipeproof.foreign_text import decode_json
from pipeproof.interop.importers.imported import Flags, with_device
from pipeproof.interop.importers.megatron.flag_values import Arguments, arguments_of_text
from pipeproof.interop.importers.megatron.megatron_importer import import_arguments
from validation.board.constants import LOCAL, STEP_LAUNCHES, fitted, host_times, host_us, value_of
from validation.board.golden_records import golden_system, record_of
from validation.board.measurement import (
    EXPERTS_OVER_TP,
    GIB,
    Measurement,
    MeasurementFileError,
    NoPlanError,
    Quantity,
    known_device,
)

CASES = Path(__file__).parent / "measurements" / "megatron_cases.json"
KEYS = frozenset({"kind", "case", "machine", "it", "mem"})
_NUM_RANKS = 8
_DEVICE = re.compile(r"(?:gb|mi|[abh])\d{3}x?", re.ASCII)
_DEGREES = (
    "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size",
    "--expert-model-parallel-size",
)  # fmt: skip
_NOT_DESCRIBED = {
    "--perform-rl-step": "reinforcement learning has no key in a plan",
    "--hybrid-layer-pattern": "blocks with a state space (Mamba) have no key in a plan",
    "--experimental-attention-variant": "sparse attention has no key in a plan",
    "--fine-grained-activation-offloading": "offloaded activations of a part of a block have no key in a plan",
}
_BERT = (
    "Bert's attention in both directions is counted as unfused attention, which computes all pairs; its pooler and "
    "second head, and the transformation before its head, are left out"
)
_APPROXIMATE = {
    "--squared-relu": "the squared ReLU is counted as GELU",
}


def golden_rows(path: Path, numbered: tuple[int, Any]) -> list[Measurement]:
    """Return the iteration time and the memory peak of a row with its number.

    Raises:
        MeasurementFileError: the row lacks a key, or a value is not a number.
    """
    number, row = numbered
    missing = sorted(KEYS - set(row)) if isinstance(row, Mapping) else sorted(KEYS)
    if missing:
        raise MeasurementFileError(f"{path}: row {number} has no `{missing[0]}`; add it")
    kind, case, machine = row["kind"], row["case"], row["machine"]
    name, device = f"{case}, {machine}", _device_in(machine)
    group = f"Megatron-LM, {'MoE' if kind in ('moe', 'mixtral') else 'dense'}, {device}"
    described, notes, no_plan = _plan_or_reason(kind, case, machine)
    record = record_of(case, machine)
    system = device if record is None else golden_system(device, machine, record)
    found = []
    for quantity, value, unit, label in (
        (Quantity.STEP, row["it"], 1.0, "step"),
        (Quantity.ALLOCATED, row["mem"], float(GIB), "memory"),
    ):
        measured, reason = _measured(path, number, value), no_plan
        if measured is None:
            measured, reason = 0.0, "the row has no measured value"
        elif not reason and record is not None:
            reason = record.no_step() if quantity is Quantity.STEP else record.no_memory()
        plan = None if reason else described
        of = {"system": system, "model": case}
        found.append(Measurement(f"{group}, {label}", name, quantity, measured / unit, plan, reason, notes, **of))
    return found


def _measured(path: Path, number: int, value: object) -> float | None:
    if value is None or value == 0:
        return None
    if not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise MeasurementFileError(f"{path}: row {number}: {value!r} is not a positive number; write one, or null")
    return float(value)


def _device_in(machine: str) -> str:
    """Return the device in the name of a machine; ``lts``, without one, is Megatron-LM's A100 cluster."""
    match = _DEVICE.search(machine)
    return match.group() if match else "a100" if machine == "lts" else machine


@cache
def _cases() -> Mapping[str, Mapping[str, str]]:
    cases: Mapping[str, Mapping[str, str]] = decode_json(CASES.read_text(encoding="utf-8"))["cases"]
    return cases


@cache
def _plan_or_reason(kind: str, case_name: str, machine: str) -> tuple[Mapping[str, Any] | None, tuple[str, ...], str]:
    """Return the plan of a case on a machine and its approximations; or None and the reason."""
    try:
        return *_plan(kind, case_name, machine), ""
    except NoPlanError as error:
        return None, (), str(error)


def _plan(kind: str, case_name: str, machine: str) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Return the plan of a case and its approximations.

    Raises:
        NoPlanError: no plan describes the case.
    """
    device = _device_in(machine)
    device_name = known_device(device)
    case = _cases().get(case_name)
    if "inference" in case_name:
        raise NoPlanError("inference is not a training step")
    if case is None:
        raise NoPlanError("the arguments of this case are not known to the board")
    arguments = case["arguments"]
    record = record_of(case_name, machine)
    if record is None:
        raise NoPlanError("the release that recorded this row is not known")
    words = set(arguments.split())
    for flag, reason in _NOT_DESCRIBED.items():
        if flag in words:
            raise NoPlanError(reason)
    if case["test"] == "release":
        raise NoPlanError("the number of ranks of this case is not published")
    num_ranks = 4 if case_name.endswith("_1node") and device.startswith("gb") else _NUM_RANKS
    settings: dict[tuple[str | int, ...], object] = {}
    if "--fp8-format" in words:
        settings["cost", "analytic", "matmul_dtype"] = "float8"
    if record.has_unfused_attention and "--context-parallel-size" not in words:
        settings["cost", "analytic", "attention"] = "unfused"
    notes = [note for flag, note in _APPROXIMATE.items() if flag in words]
    if kind == "bert":
        notes.append(_BERT)
    try:
        known = arguments_of_text(arguments, case_name)
        tp, pp, cp, ep = (_degree(known, flag) for flag in _DEGREES)
        expert_tp = _degree(known, "--expert-tensor-parallel-size", tp)
        replicas = num_ranks // (tp * pp * cp)
        if replicas % ep and ep % tp == 0 and expert_tp == 1:
            settings["topology", "ep"] = ep // tp
            notes.append(EXPERTS_OVER_TP.format(ep=ep, tp=tp, rest=ep // tp))
        elif replicas % ep:
            raise NoPlanError(
                f"expert parallelism over {ep} of {replicas} data-parallel ranks cannot be described: experts are on "
                "ranks of one tensor-parallel group here"
            )
        imported = import_arguments(known, Flags(settings, world_size=num_ranks))
    except PipeproofError as error:
        raise NoPlanError(error.findings[0].message) from error
    notes += [f"{'.'.join(map(str, assumed.key))}: {assumed.why}" for assumed in imported.assumptions]
    plan = with_device(imported, device_name).plan
    model, memory = plan["model"], {**plan["memory"], "overhead_gib": _workspaces_mib(device, case) / 1024}
    if "moe" in model and "--swiglu" not in words:
        notes.append("experts with GELU are counted as SwiGLU of two thirds of their inner size: equal weights")
        inner = model["moe"]["ffn_size"] * 2 // (3 * tp) * tp
        model = {**model, "moe": {**model["moe"], "ffn_size": inner}}
    host = _host(golden_system(device, machine, record), words)
    cost = {**plan["cost"], "analytic": {**plan["cost"]["analytic"], **host}}
    return {**plan, "model": model, "memory": memory, "cost": cost}, tuple(notes)


def _host(system: str, words: Collection[str]) -> dict[str, float]:
    """Return the keys of ``cost.analytic`` on the host for a system and the words of a case's arguments.

    The host bounds the step of every dense case. Its time is a property of the machines that tests ran on.
    """
    name = host_us(system)
    if name not in fitted():
        return {}
    return host_times(value_of(name), value_of(STEP_LAUNCHES), value_of(LOCAL) if "local" in words else 1)


def _workspaces_mib(device: str, case: Mapping[str, str]) -> float:
    """Return the MiB of workspaces of products, which the allocator counts.

    PyTorch allocates one for each thread that multiplies (forward and backward have a thread each): 32 MiB on devices
    from H100 on and where the environment asks for it with ``:4096:8``, else 8.125 MiB. Transformer Engine has one of
    its own: 32 MiB from H100 on, else 4 MiB.
    """
    is_large = device != "a100"
    of_thread = 32 if is_large or case.get("cublas_workspace") == ":4096:8" else 8.125
    is_local = "--transformer-impl local" in case["arguments"] or "--spec local" in case["arguments"]
    engine = 0 if is_local else 32 if is_large else 4
    return 2 * of_thread + engine


def _degree(arguments: Arguments, flag: str, default: int = 1) -> int:
    setting = arguments.flags.get(flag)
    return int(setting.value) if setting is not None and setting.value is not None else default
