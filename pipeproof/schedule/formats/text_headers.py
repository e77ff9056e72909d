"""The lines of the text form that declare tensors and groups, read and written."""

from __future__ import annotations

import json
import re
from typing import Any, cast

from pipeproof.diagnostics.problems import nearest_name, shortened
from pipeproof.foreign_text import decode_json
from pipeproof.schedule.formats.located_text import Findings, Placed
from pipeproof.schedule.formats.text_tokens import attributes, quoted, shape_text, to_number, to_shape, unquoted
from pipeproof.schedule.op_parts import TensorPart
from pipeproof.schedule.op_table import Group, TensorSpec
from pipeproof.schedule.ops import AXES
from pipeproof.specs.axis_layout import parse_placement
from pipeproof.specs.schedule_file import BAD_LINE

_BARE_TITLE = re.compile(r'[^\s":](?:[^":]*[^\s":])?')
_DIMS = "sbh"


def read_tensor(name: Placed, rest: Placed, findings: Findings) -> TensorSpec | None:
    """The tensor that ``tensor NAME: ...`` declares; None with a finding (PP133)."""

    def refuse(message: str) -> None:
        findings.add(BAD_LINE, name.location, message, "write it as in `tensor hidden: shape=4x8 dtype=float32`")

    num_found = len(findings.found)
    fields: dict[str, Any] = {key: value for key, value, _ in attributes(rest, _TENSOR_KEYS, findings)}
    if len(findings.found) > num_found:
        return None
    missing = [key for key in ("shape", "dtype") if key not in fields]
    if missing:
        refuse(f"tensor {shortened(name.text)} has no {' and no '.join(missing)}")
        return None
    shape = fields["shape"]
    fields.setdefault("placement", "invariant")
    fields.setdefault("dims", _DIMS[: len(shape)] if len(shape) <= len(_DIMS) else "")
    try:
        title = unquoted(name.text) if name.text.startswith('"') else name.text
    except ValueError:
        refuse(f"`{shortened(name.text)}` is not a name")
        return None
    tensor = TensorSpec(title, **fields)
    for what, entries in (("dims", tensor.dims), ("strides", tensor.strides)):
        if entries and len(entries) != len(shape):
            refuse(f"tensor {shortened(name.text)} has {len(shape)} dims in `shape` and {len(entries)} in `{what}`")
    return tensor


def tensor_line(tensor: TensorSpec) -> str:
    """The line from which ``read_tensor`` makes the same tensor."""
    bare = tensor.name.isprintable() and _BARE_TITLE.fullmatch(tensor.name) is not None
    texts = [
        f"shape={shape_text(tensor.shape)}",
        f"dtype={quoted(tensor.dtype)}",
        f"placement={tensor.placement}",
        f"dims={quoted(tensor.dims)}",
    ]
    if tensor.member:
        texts.append(f"member={quoted(tensor.member)}")
    if tensor.strides is not None:
        texts.append(f"strides={shape_text(tensor.strides)}")
    if tensor.parts:
        parts = [[p.member, p.dtype, p.placement, p.dims, shape_text(p.shape)] for p in tensor.parts]
        texts.append(f"parts={json.dumps(json.dumps(parts))}")
    return f"tensor {tensor.name if bare else json.dumps(tensor.name)}: {' '.join(texts)}"


def _placement(text: str) -> str:
    if str(parse_placement(text)) != text:
        raise ValueError(f"{text!r} is not how a placement is written")
    return text


def _parts(text: str) -> tuple[TensorPart, ...]:
    """The parts of a packed message: a string with the JSON of their members, types, placements, dims and shapes."""
    found = decode_json(unquoted(text))
    if not isinstance(found, list) or not all(isinstance(part, list) and len(part) == _NUM_FIELDS for part in found):
        raise ValueError(f"{shortened(text)} is no list of parts")
    if not all(isinstance(value, str) for part in found for value in part):
        raise ValueError(f"{shortened(text)} has a value that is no string")
    return tuple(
        TensorPart(member, to_shape(shape), dtype, _placement(placement), dims, index)
        for index, (member, dtype, placement, dims, shape) in enumerate(found)
    )


_NUM_FIELDS = 5
_TENSOR_KEYS = {
    "shape": (to_shape, "4x8"),
    "dtype": (unquoted, "float32"),
    "placement": (_placement, "sharded(0)"),
    "dims": (unquoted, "sbh"),
    "member": (unquoted, "mask"),
    "strides": (to_shape, "8x1"),
    "parts": (_parts, json.dumps('[["mask","bool","invariant","sb","4x8"]]')),
}


def read_group(axis: Placed, rest: Placed, findings: Findings) -> Group | None:
    """The group that ``group AXIS: ...`` declares; None with a finding (PP133). Its ranks are not checked here."""
    if axis.text not in AXES:
        near = nearest_name(axis.text, AXES)
        fix = f"did you mean `{near}`?" if near else f"axes are {', '.join(AXES)}"
        findings.add(BAD_LINE, axis.location, f"there is no mesh axis `{shortened(axis.text)}`", fix)
        return None
    ranks_text, mark, _ = rest.text.partition("copies=")
    copies = 1
    if mark:
        for _, value, _ in attributes(rest.part(len(ranks_text), len(rest.text)), _GROUP_KEYS, findings):
            copies = cast("int", value)
    try:
        ranks = tuple(map(to_number, ranks_text.split()))
    except ValueError as error:
        findings.add(BAD_LINE, rest.location, f"a group lists ranks, and {error}", "write it as in `group tp: 0 1`")
        return None
    return Group(axis.text, ranks, copies)


def group_line(group: Group) -> str:
    """The line from which ``read_group`` makes the same group."""
    copies = f" copies={group.copies}" if group.copies > 1 else ""
    return f"group {group.axis}: {' '.join(map(str, group.ranks))}{copies}"


def _copies(text: str) -> int:
    number = to_number(text)
    if number < 1:
        raise ValueError("a rank stands for itself at least")
    return number


_GROUP_KEYS = {"copies": (_copies, "4")}
