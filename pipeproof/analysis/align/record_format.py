"""The format of a record: a file of JSON lines and, where values were requested, one additional file per step.

``record.jsonl`` begins with a header. Then for each step there is a line for
each tensor and each gradient, and the step's own line as the last: a step
without it was not finished. ``docs/schemas/record.schema.json`` has every key.

Tensors are in the order in which one process computes them that runs
micro-batches one by one: forward from the first layer, backward from the last,
and after all micro-batches the gradients of weights, from the last layer. In
this order causes come before effects in every plan: the first tensor that
differs shows the position. The order is the same for every plan.

A program under ``record_layers`` writes ``record.rankN.jsonl`` on each
rank instead, with the tensors of that rank, in their order; readers join
the files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

Index: TypeAlias = tuple[tuple[int, int], ...]
"""The half-open range in each dim of the whole."""

Layout: TypeAlias = tuple[tuple[int, ...], tuple[Index, ...]]
"""Shape of a whole tensor, and the ranges of it that one rank has; its part holds them one after the other."""


class AlignmentError(ValueError):
    """A file that is not a record or a log, or is cut off; the message has its name, the position, and the remedy."""


FORMAT = 1
RECORD_FILE = "record.jsonl"
WHOLE = "whole"
"""Name of a recorded model itself."""
WIDE = {
    "bfloat16": "float32",
    "float16": "float32",
    "float8_e4m3fn": "float32",
    "float8_e5m2": "float32",
    "bool": "uint8",
}
"""Types of arrays that a program's record has in place of others."""
DECIMALS = 20
"""Decimals of a loss: enough for every float32, and near 1 for every float64, to be exact."""


@dataclass(frozen=True, slots=True)
class Header:
    """Header of a record: ``who`` is ``run`` or ``reference``; ``digest`` is the plan's.

    For a recorded ``program``, ``digest`` is empty, ``steps`` is 0, and ``model`` has the numbers of heads, if the
    model names them.
    """

    who: Literal["run", "reference", "program"]
    pipeproof: str
    digest: str
    backend: str
    dtype: str
    steps: int
    layers: bool
    values: bool
    model: Mapping[str, int] = field(default_factory=dict)

    def to_line(self) -> str:
        """The first line."""
        content = {"kind": "record", "format": FORMAT, "pipeproof": self.pipeproof, **asdict(self)}
        if not self.model:
            del content["model"]
        return json.dumps(content, separators=(",", ":")) + "\n"


@dataclass(frozen=True, slots=True)
class Shard:
    """Part of a tensor that one rank holds; ``md5`` as in ``Recorded``.

    ``index`` is its half-open range in each dim of the whole. With a sharded optimizer it is the gradient's shard that
    the rank's dp group has together.
    """

    rank: int
    md5: str
    index: Index

    def to_json(self) -> dict[str, Any]:
        """Return the form of records and of the run report."""
        return {"rank": self.rank, "md5": self.md5, "index": [list(i) for i in self.index]}


@dataclass(frozen=True, slots=True)
class Recorded:
    """One tensor at a layer's boundary, or (with ``parameter``) one gradient of a weight.

    ``md5`` is of the whole, or a ``fast_digest``; empty if only parts have one. In the file of one rank, ``md5``
    and ``norm`` are of all its parts together, and ``time`` is their time, in nanoseconds since 1970.
    """

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
    time: int = 0
    in_first: bool = False
    """True for a gradient whose matrix is [in, out], as in Paddle's linear layers, not [out, in]."""

    @property
    def key(self) -> str:
        """The name within a step; no two tensors of a step share it."""
        if self.parameter:
            return f"gradient/{self.parameter}"
        return f"{self.layer}/{self.direction}/{self.side}/{self.micro_batch}/{self.piece}"

    @property
    def kind(self) -> str:
        """The name without micro-batch and piece."""
        if self.parameter:
            return f"gradient of {self.parameter}"
        return f"{self.layer}, {self.direction} {self.side}"

    @property
    def title(self) -> str:
        """The name as a person reads it."""
        piece = f", piece {self.piece}" if self.piece else ""
        return self.kind if self.parameter else f"{self.kind}, micro-batch {self.micro_batch}{piece}"

    def name_to_json(self) -> dict[str, Any]:
        """The keys of its name, in records and reports."""
        keys = ("layer", "parameter") if self.parameter else ("layer", "direction", "side", "micro_batch", "piece")
        return {"kind": "gradient" if self.parameter else "tensor", **{key: getattr(self, key) for key in keys}}

    def to_json(self) -> dict[str, Any]:
        """Its line."""
        name = self.name_to_json()
        return {
            "kind": name.pop("kind"),
            "step": self.step,
            **name,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "md5": self.md5,
            "norm": self.norm if math.isfinite(self.norm) else None,
            "shards": [shard.to_json() for shard in self.shards],
            **({"time": self.time} if self.time else {}),
            **({"in_first": True} if self.in_first else {}),
        }

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Recorded:
        """Read what ``to_json`` wrote.

        Raises:
            KeyError, TypeError, ValueError: it is not such a line.
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
            time=int(line.get("time", 0)),
            in_first=bool(line.get("in_first", False)),
            **named,
        )


@dataclass(frozen=True, slots=True)
class OtherRecorded:
    """A loss other than the main one, to 20 decimals, or (``loss`` None) a state that changes from step to step.

    ``name`` is ``mtp.0`` and so on for losses of modules, ``aux`` or ``z`` for
    losses of routers, ``bias/layer.3.mlp`` for a router's bias after the step,
    ``main/2`` for the main loss of a micro-batch.
    """

    name: str
    loss: str | None
    md5: str

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> OtherRecorded:
        """Read its entry in the step's line.

        Raises:
            KeyError, TypeError, ValueError: it is not such an entry.
        """
        loss = None if entry["loss"] is None else str(entry["loss"])
        if loss is not None:
            math.copysign(1.0, float(loss))
        return cls(str(entry["name"]), loss, str(entry["md5"]))


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One finished step: the loss to 20 decimals, the MD5 of its bytes, and its tensors in order.

    A rank without the loss has None. The loss of a program is the sum of the scalars whose backward it ran.
    ``others`` are the losses other than the main loss. The MD5 is of the scalar's
    little-endian bytes in the run's dtype: 4 for float32, 8 for float64.
    """

    step: int
    loss: str | None
    loss_md5: str | None
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


def rank_file(rank: int) -> str:
    """Name of the record of one rank of a program."""
    return f"record.rank{rank}.jsonl"


def rank_values_file(directory: Path, rank: int, step: int) -> Path:
    """Path of the values of one rank's step: an ``.npz`` with each array once, under its ``value_name``."""
    return directory / "values" / f"rank{rank}.step{step}.npz"


def value_name(digest: str, dtype: str) -> str:
    """Name of an array of a rank: its digest without prefix, and its type; 16-bit types are kept as float32."""
    return f"{digest.rpartition(':')[2]}.{WIDE.get(dtype, dtype)}"
