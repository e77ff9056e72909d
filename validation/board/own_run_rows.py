"""Steps that pipeproof itself measured on GPUs (results/prediction.json), predicted from sizes and the data sheet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from validation.board.measurement import (
    GIB,
    Measurement,
    MeasurementFileError,
    Quantity,
    known_device,
    measured_with_plan,
)

_HEAD_SIZE = 128
_WORKSPACES_GIB = 2 * 32 / 1024
"""PyTorch's workspaces of products on a device from H100 on: 32 MiB for each thread, forward and backward."""
_VOCABULARY = 4096
_ONE_CHUNK = frozenset({"gpipe", "1f1b"})


def read_own_runs(path: Path, results: Mapping[str, Any]) -> Iterator[Measurement]:
    """Yield the step, its replay and the memory peak of each measured schedule: forwards and backwards, no optimizer.

    Raises:
        MeasurementFileError: a key is missing.
    """
    try:
        for size in results["sizes"]:
            for case in size["cases"]:
                yield from _case(results["device"], int(results["num_ranks"]), size, case)
    except (KeyError, TypeError, ValueError) as error:
        raise MeasurementFileError(f"{path}: {error!r}: write the file with benchmarks/gpu/prediction.py") from error


def read_own_shapes(path: Path, results: Mapping[str, Any]) -> Iterator[Measurement]:
    """Yield the step of each shape of ``benchmarks/gpu/new_shapes.py``: on one GPU, four micro-batches of a sequence.

    Raises:
        MeasurementFileError: a key is missing.
    """
    try:
        device = results["device"]
        group = f"own runs, 1 {device.removeprefix('NVIDIA ')}"
        for one in results["shapes"]:
            sizes, moe = one["shape"], one["shape"].get("moe")
            model = f"hidden {sizes['hidden_size']}" + (f", {moe['num_experts']} experts" if moe else "")
            of = {"system": group, "model": model}
            kind = "experts" if moe else "dense"
            make_plan = partial(_shape_plan, device, sizes)
            seconds = median(one["measured_ms"]) / 1000
            yield measured_with_plan(f"{group}, {kind}", model, Quantity.COMPUTE, seconds, make_plan, **of)
    except (KeyError, TypeError, ValueError) as error:
        raise MeasurementFileError(f"{path}: {error!r}: write the file with benchmarks/gpu/new_shapes.py") from error


def _shape_plan(device: str, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Plan of ``benchmarks/gpu/new_shapes.py``."""
    usual = {"kind": "gpt", "activation_order": "bsh", "vocab_size": 32000, "seq_length": 4096}
    return {
        "pipeproof": 1,
        "model": usual | dict(sizes),
        "topology": {"pp": 1},
        "schedule": {"kind": "1f1b", "num_micro_batches": 4, "micro_batch_size": 1},
        "cost": {"analytic": {"device": known_device(device.replace(" ", "_")), "dtype": "bfloat16"}},
        "memory": {"optimizer_bytes": 0, "gradient_dtype": "bfloat16"},
        "run": {"backend": "torch", "device": "gpu", "dtype": "bfloat16"},
    }


def _case(device: str, num_ranks: int, size: Mapping[str, Any], case: Mapping[str, Any]) -> Iterator[Measurement]:
    group = f"own runs, {num_ranks} {device.removeprefix('NVIDIA ')}"
    name = f"{case['kind']}, {case['num_micro_batches']} micro-batches, hidden {size['hidden']}"
    measured = [(Quantity.COMPUTE, "step", case["measured_us"] / 1e6)]
    if case["measured_bytes"]:
        measured.append((Quantity.ALLOCATED_ANY, "memory", case["measured_bytes"] / GIB))
    if case.get("graph_us"):
        measured.append((Quantity.COMPUTE, "replayed", case["graph_us"] / 1e6))
    for quantity, label, value in measured:
        make_plan = partial(_plan, device, num_ranks, size, case, {"execution": "graph"} if label == "replayed" else {})
        of = {"system": group, "model": f"hidden {size['hidden']}"}
        yield measured_with_plan(f"{group}, {label}", name, quantity, value, make_plan, **of)


def _plan(
    device: str, num_ranks: int, size: Mapping[str, Any], case: Mapping[str, Any], execution: Mapping[str, str]
) -> dict[str, Any]:
    """Plan of ``benchmarks/gpu/sizes.py``: heads of 128, an MLP four times as wide, one sequence at a time."""
    hidden, kind = size["hidden"], case["kind"]
    analytic = {"device": known_device(device.replace(" ", "_")), "dtype": "bfloat16"}
    chunks = {} if kind in _ONE_CHUNK else {"num_chunks": 2}
    return {
        "pipeproof": 1,
        "model": {
            "kind": "gpt", "num_layers": size["layers_a_rank"] * num_ranks, "hidden_size": hidden,
            "num_heads": hidden // _HEAD_SIZE, "ffn_size": 4 * hidden, "vocab_size": _VOCABULARY,
            "seq_length": size["sequence"], "activation_order": "bsh",
        },
        "topology": {"pp": num_ranks},
        "schedule": {
            "kind": kind, **chunks, "num_micro_batches": case["num_micro_batches"], "micro_batch_size": 1,
        },
        "cost": {"analytic": {**analytic, **execution}, "p2p": "backend"},
        "memory": {"optimizer_bytes": 0, "gradient_dtype": "bfloat16", "overhead_gib": _WORKSPACES_GIB},
        "run": {"backend": "torch", "device": "gpu", "dtype": "bfloat16"},
    }  # fmt: skip
