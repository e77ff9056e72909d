"""What Paddle wrote, as the index of a state has it: which parts came into which file, and that none is missing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeproof.comm.lowered import LoweredPlan
from pipeproof.state.files import sync
from pipeproof.state.flex.checkpoint import open_flex
from pipeproof.state.flex.codes import FlexError
from pipeproof.state.flex.metadata import SUFFIX
from pipeproof.state.flex.names import key_of
from pipeproof.state.header import read_header
from pipeproof.state.index import ShardFile
from pipeproof.state.layout import Piece, files_of

_MEND = "save without `--save-format flex`, and report this with the plan"


def describe_file(file: Path, rank: int, pieces: Sequence[Piece], sha256: str) -> ShardFile:
    """A file that ``rank`` wrote, which holds some of its ``pieces`` under Paddle's names."""
    header = read_header(file)
    held = [piece for piece in pieces if key_of(piece.shard.tensor, piece.tensor) in header.arrays]
    keys = {piece.shard.tensor: key_of(piece.shard.tensor, piece.tensor) for piece in held}
    return ShardFile(
        name=file.name,
        rank=rank,
        size_bytes=header.size_bytes,
        sha256=sha256,
        shards=tuple(piece.shard for piece in held),
        keys={tensor: key for tensor, key in keys.items() if tensor != key},
    )


def require_all_written(directory: Path, plan: LoweredPlan) -> None:
    """Refuse to give a checkpoint its name unless its metadata, its files and the plan say the same; syncs the first.

    Raises:
        StateError: a part is missing, is there twice, or the metadata says something else than the files.
    """
    wanted = {shard for shards in files_of(plan).values() for shard in shards}
    notes = [directory / f"rank{rank}.json" for rank in range(plan.mesh.num_ranks)]
    written = [shard for note in notes for shard in ShardFile.model_validate_json(note.read_bytes()).shards]
    told = [part.shard for parts in open_flex(directory).parts.values() for part in parts]
    for what, shards in (("Paddle's metadata has", told), ("Paddle wrote", written)):
        if len(shards) != len(wanted) or set(shards) != wanted:
            missing = sorted(shard.tensor for shard in wanted.difference(shards))
            first = f"; {missing[0]} is missing" if missing else ""
            raise FlexError(f"{directory}: {what} {len(shards)} parts, and the plan {len(wanted)}{first}", _MEND)
    for file in directory.glob(f"*{SUFFIX}"):
        sync(file)
