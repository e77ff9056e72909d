"""Dump files: which there are, of which ranks, and their content as plain data.

A dump is what ``torch._C._distributed_c10d._dump_nccl_trace()`` (or
``_dump_fr_trace``) returns, or its JSON form, one file a rank, with the rank at
the end of its name (``TORCH_NCCL_DEBUG_INFO_TEMP_FILE`` is such a prefix).
Nothing in a pickle is run: classes and functions are refused.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from pathlib import Path
from typing import Any, Final, NoReturn

from pipeproof.interop.hang.codes import UNREADABLE_DUMP
from pipeproof.specs.finding import Finding, Location, Severity
from pipeproof.specs.load import PlanFileError

MAX_BYTES: Final = 2**28
"""Largest dump of a rank."""

_RANK: Final = re.compile(r"(?P<prefix>.*?)(?P<rank>\d+)(?:\.(?:pkl|pickle|json|bin))?", re.DOTALL)


class _Plain(pickle.Unpickler):
    """Lists, dictionaries, strings and numbers only."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"it asks for `{module_name}.{global_name}`, and a dump has plain values only")


def dump_files(directory: Path) -> dict[int, Path]:
    """The dump of each rank in a directory, by the number that their names end with.

    Raises:
        PlanFileError: PP930, there is none, or two have one rank.
    """
    try:
        names = sorted(path for path in directory.iterdir() if path.is_file() and not path.name.startswith("."))
    except OSError as error:
        raise refused(f"cannot read `{directory}`: {error.strerror}", str(directory)) from error
    found: dict[int, Path] = {}
    for path in names:
        match = _RANK.fullmatch(path.name)
        if match is None:
            continue
        rank = int(match["rank"])
        if rank in found:
            raise refused(
                f"`{found[rank].name}` and `{path.name}` are both of rank {rank}",
                str(directory),
                help="give a directory with the dumps of one hang",
            )
        found[rank] = path
    if not found:
        raise refused(
            f"no dump in `{directory}`: the name of each ends with its rank, such as nccl_trace_rank_0",
            str(directory),
            help="set TORCH_NCCL_DUMP_ON_TIMEOUT=1 and TORCH_NCCL_DEBUG_INFO_TEMP_FILE=DIR/nccl_trace_rank_ in the run",
        )
    return dict(sorted(found.items()))


def read_content(path: Path) -> dict[str, Any]:
    """The content of a dump.

    Raises:
        PlanFileError: PP930, it cannot be read, is truncated, or is something else.
    """
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise refused(f"cannot read `{path}`: {error.strerror}", str(path)) from error
    if len(raw) > MAX_BYTES:
        raise refused(f"`{path}` has more than {MAX_BYTES} bytes", str(path))
    try:
        data = json.loads(raw) if raw.lstrip()[:1] == b"{" else _Plain(io.BytesIO(raw)).load()
    except RecursionError:
        raise refused(f"`{path}` is no Flight Recorder dump: it is nested too deeply", str(path)) from None
    except Exception as error:
        raise refused(
            f"`{path}` is no Flight Recorder dump, or is cut short: {error or type(error).__name__}", str(path)
        ) from error
    if not isinstance(data, dict) or "version" not in data:
        raise refused(f"`{path}` is no Flight Recorder dump: it has no version", str(path))
    return data


def refused(message: str, file: str, help: str | None = None) -> PlanFileError:
    """The error for a file that cannot be used."""
    return PlanFileError(Finding(UNREADABLE_DUMP.code, Severity.ERROR, message, Location(file, 1, 1), help))
