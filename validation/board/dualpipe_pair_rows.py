"""The overlapped forward and backward in DeepSeek's published profile of DualPipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pipeproof.interop.tune_models import MODELS
from validation.board.measurement import (
    Measurement,
    MeasurementFileError,
    Quantity,
    known_device,
    measured_with_plan,
)

_NUM_BLOCKS = 4


def read_pair_summary(path: Path, summary: Mapping[str, Any]) -> Iterator[Measurement]:
    """Yield the pair of a summary: of each stream its first and last microsecond and its busy time.

    Raises:
        MeasurementFileError: a key is missing.
    """
    try:
        streams = [(one["busy_us"], one["last_us"] - one["first_us"]) for one in summary["streams"]]
        yield _pair(summary["device"], int(summary["ranks"]), streams)
    except (KeyError, TypeError, ValueError) as error:
        raise MeasurementFileError(f"{path}: {error!r}: give `device`, `ranks` and the times of `streams`") from error


def read_pair_trace(path: Path, trace: Mapping[str, Any]) -> Iterator[Measurement]:
    """Yield the pair of a trace by PyTorch's profiler: from the first to the last kernel of the computing stream.

    Raises:
        MeasurementFileError: the trace has no kernels, or no device.
    """
    by_stream: dict[Any, list[tuple[float, float]]] = {}
    for event in trace["traceEvents"]:
        if event.get("cat") == "kernel":
            by_stream.setdefault(event["tid"], []).append((event["ts"], event["dur"]))
    streams = [
        (sum(dur for _, dur in times), max(ts + dur for ts, dur in times) - min(ts for ts, _ in times))
        for times in by_stream.values()
    ]
    try:
        device, ranks = trace["deviceProperties"][0]["name"], trace["distributedInfo"]["world_size"]
        yield _pair(device, int(ranks), streams)
    except (KeyError, IndexError, ValueError) as error:
        message = f"{path}: no kernels, `deviceProperties` or `distributedInfo`"
        raise MeasurementFileError(f"{message}; record the trace on a GPU, in a distributed run") from error


def _pair(device: str, num_ranks: int, streams: Sequence[tuple[float, float]]) -> Measurement:
    """The pair takes from the first to the last kernel of the stream that computes most."""
    _, length_us = max(streams)
    group, name = "DeepSeek-V3, overlapped pair", f"{_NUM_BLOCKS} blocks, {num_ranks} {device}"
    of = {"system": device, "model": "deepseekv3"}
    return measured_with_plan(group, name, Quantity.PAIR, length_us / 1000, partial(_plan, device, num_ranks), **of)


def _plan(device: str, num_ranks: int) -> dict[str, Any]:
    """DualPipe on two pipeline ranks; each stage has the profile's four blocks, and the first and last one more layer.

    Exchanges are as in arXiv:2412.19437: at most four nodes for a token, in eight bits.
    """
    device_name = known_device(device.replace(" ", "_"))
    model = MODELS["deepseekv3"].keys
    moe = {**model["moe"], "dense_layers": 0, "nodes_per_token": 4, "dispatch_dtype": "float8"}
    num_stages = 4
    names = [f"layer.{i}" for i in range(_NUM_BLOCKS * (num_stages - 2))]
    stages = [names[i : i + _NUM_BLOCKS] for i in range(0, len(names), _NUM_BLOCKS)]
    return {
        "pipeproof": 1,
        "model": {
            "kind": "gpt", **{key: value for key, value in model.items() if key != "mtp"}, "moe": moe,
            "num_layers": len(names), "seq_length": 4096,
        },
        "topology": {"pp": num_stages, "ep": num_ranks},
        "schedule": {"kind": "dualpipe", "num_micro_batches": 2 * num_stages, "micro_batch_size": 1},
        "stages": [["embed"], *stages, ["norm", "head"]],
        "cost": {"analytic": {"device": device_name, "dtype": "bfloat16", "matmul_dtype": "float8_block"}},
    }  # fmt: skip
