"""Keys ``stages`` and ``schedule.num_chunks`` of a plan, from the flags of Megatron-LM."""

from __future__ import annotations

from pipeproof.diagnostics.finding import Location
from pipeproof.interop.importers.import_codes import REFUSED
from pipeproof.interop.importers.megatron.flag_values import MAX_RANKS, FlagReader
from pipeproof.interop.importers.megatron.layout_string import LayoutError, LayoutLetter, check_layout, parse_layout

MAX_LAYERS = 100_000
"""Most blocks of a model, as in plans."""

LAYOUT = "--pipeline-model-parallel-layout"
PER_CHUNK = "--num-layers-per-virtual-pipeline-stage"
CHUNKS = "--num-virtual-stages-per-pipeline-rank"
FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
EMBEDDING, LOSS = "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"


def import_stages(reader: FlagReader, *, num_layers: int, num_mtp: int, pp: int) -> int:
    """Set ``stages`` if the partition is given and not even, and return the number of stages of each pipeline rank.

    Raises:
        PlanFileError: PP170 for an invalid layout, PP171 if Megatron-LM refuses the settings.
    """
    if num_layers > MAX_LAYERS or pp > MAX_RANKS:
        location = reader.location("--num-layers") or Location(reader.arguments.file)
        reader.refuse(f"{num_layers} layers on {pp} pipeline ranks are more than a plan can have", location)
    partition_flags = [flag for flag in (PER_CHUNK, CHUNKS, LAYOUT) if reader.has(flag)]
    if len(partition_flags) > 1:
        first, second = partition_flags[:2]
        reader.megatron_refuses(f"{first} and {second} are given together", second, "remove one of the two")
    if reader.has(LAYOUT):
        return _by_layout(reader, num_layers, num_mtp, pp)
    num_chunks = _num_chunks(reader, num_layers, pp)
    sizes = _sizes(reader, num_layers, pp, num_chunks)
    stages = named_stages(sizes, num_mtp)
    flag = next((flag for flag in (FIRST, LAST, EMBEDDING, LOSS, PER_CHUNK, CHUNKS) if reader.has(flag)), None)
    if any(not stage for stage in stages):
        reader.refuse(
            f"stage {stages.index([])} has no layer, and a plan's stages have at least one",
            reader.location(flag or "--num-layers") or Location(reader.arguments.file),
        )
    if flag is not None and len(set(sizes)) > 1:  # an even cut is that of a plan without `stages`, for any pp
        reader.take(flag, ("stages",), stages)
    return num_chunks


def named_stages(sizes: list[int], num_mtp: int) -> list[list[str]]:
    """Return the layers of each global stage: the blocks, with the embedding first, modules, norm and head last."""
    stages: list[list[str]] = []
    block = 0
    for size in sizes:
        stages.append([f"layer.{index}" for index in range(block, block + size)])
        block += size
    stages[0].insert(0, "embed")
    stages[-1] += [*(f"mtp.{index}" for index in range(num_mtp)), "norm", "head"]
    return stages


def _num_chunks(reader: FlagReader, num_layers: int, pp: int) -> int:
    if reader.has(CHUNKS):
        return reader.degree(CHUNKS, ("schedule", "num_chunks"))
    if not reader.has(PER_CHUNK):
        return 1
    if reader.has(FIRST) or reader.has(LAST):
        reader.megatron_refuses(f"{PER_CHUNK} is given with an uneven partition", PER_CHUNK, f"use {CHUNKS}")
    total = num_layers + reader.has(EMBEDDING) + reader.has(LOSS)
    per_chunk = reader.number(PER_CHUNK)
    if per_chunk is None:
        reader.refuse(f"only a run determines the value of {PER_CHUNK}", reader.arguments.flags[PER_CHUNK].location)
    if total % pp or total // pp % per_chunk:
        reader.megatron_refuses(
            f"{total} layers over {pp} pipeline ranks do not divide into chunks of {per_chunk}", PER_CHUNK
        )
    return total // pp // per_chunk


def _sizes(reader: FlagReader, num_layers: int, pp: int, num_chunks: int) -> list[int]:
    """Return the blocks of each global stage (get_num_layers_to_build in Megatron-LM's transformer_block.py)."""
    first, last = reader.number(FIRST), reader.number(LAST)
    ends = {0: first, pp - 1: last}
    if first is not None or last is not None:
        if reader.has(EMBEDDING) or reader.has(LOSS):
            both = EMBEDDING if reader.has(EMBEDDING) else LOSS
            reader.megatron_refuses(f"{both} is given with {FIRST if first is not None else LAST}", both)
        rest = num_layers - (first or 0) - (last or 0)
        ranks = pp - (first is not None) - (last is not None)
        flag = FIRST if first is not None else LAST
        if rest and not ranks:
            kept = f"{first or 0} + {last or 0} of {num_layers} blocks are on {pp} pipeline ranks"
            reader.refuse(
                f"{kept}: Megatron-LM from 0.16 on refuses this, and older versions drop {rest} without a word"
                if rest > 0 else f"{kept}: Megatron-LM from 0.16 on refuses this, and older versions build more blocks",
                reader.location(flag) or Location(reader.arguments.file), code=REFUSED,
            )  # fmt: skip
        if rest < 0 or (ranks and rest % ranks):
            reader.megatron_refuses(f"{rest} layers are left for {ranks} pipeline ranks, and must divide", flag)
        even = rest // ranks if ranks else 0
        rank_sizes = [even if ends.get(rank) is None else int(ends[rank] or 0) for rank in range(pp)]
    else:
        total = num_layers + reader.has(EMBEDDING) + reader.has(LOSS)
        if total % pp:
            counted = "layers, with those that count for embedding and loss," if total > num_layers else "layers"
            reader.megatron_refuses(
                f"{total} {counted} do not divide by --pipeline-model-parallel-size {pp}",
                "--pipeline-model-parallel-size",
            )
        rank_sizes = [total // pp] * pp
    uneven = next((size for size in rank_sizes if size % num_chunks), None)
    if uneven is not None:
        flag = CHUNKS if reader.has(CHUNKS) else PER_CHUNK
        reader.megatron_refuses(f"{uneven} layers of a pipeline rank do not divide by {num_chunks} chunks", flag)
    sizes = [rank_sizes[rank] // num_chunks for _ in range(num_chunks) for rank in range(pp)]
    sizes[0] -= reader.has(EMBEDDING)
    sizes[-1] -= reader.has(LOSS)
    return sizes


def _by_layout(reader: FlagReader, num_layers: int, num_mtp: int, pp: int) -> int:
    setting = reader.arguments.flags[LAYOUT]
    text = reader.text(LAYOUT)
    if text is None:
        reader.refuse(f"the value of {LAYOUT} is {setting.why}", setting.location, "write the layout into the script")
    location = setting.value_location
    try:
        stages = parse_layout(text)
        check_layout(stages, num_layers=num_layers, num_mtp=num_mtp, pp=pp, length=len(text))
    except LayoutError as error:
        reader.refuse(f"{LAYOUT}: {error}", location.part(error.at, error.last + 1), error.help)
    reader.take(LAYOUT, ("stages",), list(_named(stages)))
    holder = next((index for index, stage in enumerate(stages) if any(entry.letter == "m" for entry in stage)), -1)
    if 0 <= holder < len(stages) - 1:  # validate_layer_layout sets mtp_standalone, and p2p then sends shapes
        reader.take(LAYOUT, ("transport", "shape_exchange"), "per_message")
    return len(stages) // pp


def _named(stages: tuple[tuple[LayoutLetter, ...], ...]) -> list[list[str]]:
    counts = {"t": 0, "m": 0}
    named = []
    for stage in stages:
        names: list[str] = []
        for entry in stage:
            match entry.letter:
                case "E":
                    names.append("embed")
                case "L":
                    names += ["norm", "head"]
                case letter:
                    names.append(f"{'layer' if letter == 't' else 'mtp'}.{counts[letter]}")
                    counts[letter] += 1
        named.append(names)
    return named
