"""The format of a record: a file of JSON lines and, where values were requested, one additional file per step.

``record.jsonl`` begins with a header. Then for each step there is a line for
each tensor and each gradient, and the step's own line as the last: a step
without it was not finished. ``docs/schemas/record.schema.json`` has every key.

Tensors are in the order in which one process computes them that runs
micro-batches one by one: forward from the first layer, backward from the last,
and after all micro-batches the gradients of weights, from the last layer. In
every plan causes come before effects in that order, so the first tensor that
differs is where to look. It is the same order for every plan.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

Index: TypeAlias = tuple[tuple[int, int], ...]
"""The half-open range in each dim of the whole."""

FORMAT = 1
RECORD_FILE = "record.jsonl"
DECIMALS = 20
"""Of a loss: enough to have every float32 and, near one, every float64 back exactly."""


@dataclass(frozen=True, slots=True)
class Header:
    """Header of a record: ``who`` is ``run`` or ``reference``; ``digest`` is the plan's."""

    who: Literal["run", "reference"]
    pipeproof: str
    digest: str
    backend: str
    dtype: str
    steps: int
    layers: bool
    values: bool

    def to_line(self) -> str:
        """The first line."""
        content = {"kind": "record", "format": FORMAT, "pipeproof": self.pipeproof, **asdict(self)}
        return json.dumps(content, separators=(",", ":")) + "\n"


@dataclass(frozen=True, slots=True)
class Shard:
    """Part of a tensor that one rank holds."""

    rank: int
    md5: str
    index: Index


@dataclass(frozen=True, slots=True)
class Recorded:
    """One tensor at a layer's border, or (with ``parameter``) one gradient of a weight; ``md5`` is of the whole."""

    step: int
    layer: str
    shape: tuple[int, ...]
    dtype: str
    md5: str
    norm: float
    shards: tuple[Shard, ...]
    direction: Literal["forward", "backward"] = "backward"
    side: Literal["input", "output"] = "output"
    micro_batch: int = 0
    piece: int = 0
    parameter: str = ""

    @property
    def key(self) -> str:
        """The name within a step; no two tensors of a step share it."""
        if self.parameter:
            return f"gradient/{self.parameter}"
        return f"{self.layer}/{self.direction}/{self.side}/{self.micro_batch}/{self.piece}"

    @property
    def title(self) -> str:
        """The name as a person reads it."""
        if self.parameter:
            return f"gradient of {self.parameter}"
        piece = f", piece {self.piece}" if self.piece else ""
        return f"{self.layer}, {self.direction} {self.side}, micro-batch {self.micro_batch}{piece}"

    def to_json(self) -> dict[str, Any]:
        """Its line."""
        common = {
            "shape": list(self.shape),
            "dtype": self.dtype,
            "md5": self.md5,
            "norm": self.norm if math.isfinite(self.norm) else None,
            "shards": [{"rank": s.rank, "md5": s.md5, "index": [list(r) for r in s.index]} for s in self.shards],
        }
        if self.parameter:
            return {
                "kind": "gradient", "step": self.step, "layer": self.layer, "parameter": self.parameter, **common,
            }  # fmt: skip
        return {
            "kind": "tensor",
            "step": self.step,
            "layer": self.layer,
            "direction": self.direction,
            "side": self.side,
            "micro_batch": self.micro_batch,
            "piece": self.piece,
            **common,
        }

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Recorded:
        """Read what ``to_json`` wrote.

        Raises:
            KeyError, TypeError, ValueError: it is no such line.
        """
        named = (
            {"parameter": str(line["parameter"])}
            if line["kind"] == "gradient"
            else {key: line[key] for key in ("direction", "side", "micro_batch", "piece")}
        )
        return cls(
            step=int(line["step"]),
            layer=str(line["layer"]),
            shape=tuple(map(int, line["shape"])),
            dtype=str(line["dtype"]),
            md5=str(line["md5"]),
            norm=math.nan if line["norm"] is None else float(line["norm"]),
            shards=tuple(
                Shard(int(s["rank"]), str(s["md5"]), tuple((int(a), int(b)) for a, b in s["index"]))
                for s in line["shards"]
            ),
            **named,
        )


@dataclass(frozen=True, slots=True)
class OtherRecorded:
    """Another loss than the main one, to 20 decimals, or (``loss`` None) a state that changes from step to step.

    ``name`` is ``mtp.0`` and so on for losses of modules, ``aux`` or ``z`` for
    losses of routers, ``bias/layer.3.mlp`` for the bias of one after the step.
    """

    name: str
    loss: str | None
    md5: str

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> OtherRecorded:
        """Read its entry in the step's line.

        Raises:
            KeyError, TypeError, ValueError: it is no such entry.
        """
        loss = None if entry["loss"] is None else str(entry["loss"])
        if loss is not None:
            math.copysign(1.0, float(loss))
        return cls(str(entry["name"]), loss, str(entry["md5"]))


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One finished step: the loss to 20 decimals, the MD5 of its bytes, and its tensors in order.

    ``others`` are the losses other than the main loss. The MD5 is of the scalar's
    little-endian bytes in the run's dtype: 4 for float32, 8 for float64.
    """

    step: int
    loss: str
    loss_md5: str
    tensors: tuple[Recorded, ...]
    others: tuple[OtherRecorded, ...] = ()

    def lines(self) -> str:
        """All lines of the step, its own as the last."""
        tensors = [tensor.to_json() for tensor in self.tensors]
        end = {
            "kind": "step",
            "step": self.step,
            "loss": self.loss,
            "loss_md5": self.loss_md5,
            "tensors": sum(line["kind"] == "tensor" for line in tensors),
            "gradients": sum(line["kind"] == "gradient" for line in tensors),
            **({"others": [asdict(one) for one in self.others]} if self.others else {}),
        }
        return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in (*tensors, end))


def values_file(directory: Path, step: int) -> Path:
    """Path of a step's values: an ``.npz`` with an array for each tensor's key.

    If the values of a rank's part differ from the whole tensor, they are stored
    in addition, under ``KEY@RANK``.
    """
    return directory / "values" / f"step{step}.npz"
