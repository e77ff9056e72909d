"""The keys ``stages`` and ``schedule.num_chunks`` from the flags of Megatron-LM."""

from __future__ import annotations

from pipeproof.interop.megatron.given import MAX_RANKS, Given
from pipeproof.interop.megatron.layout import LayoutError, Placed, check_layout, parse_layout
from pipeproof.specs.finding import Location

MAX_LAYERS = 100_000
"""Most blocks of a model, as in plans."""

LAYOUT = "--pipeline-model-parallel-layout"
PER_CHUNK = "--num-layers-per-virtual-pipeline-stage"
CHUNKS = "--num-virtual-stages-per-pipeline-rank"
FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
EMBEDDING, LOSS = "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"


def import_cut(given: Given, *, num_layers: int, num_mtp: int, pp: int) -> int:
    """Set ``stages`` where the cut is given, and return the stages of each pipeline rank.

    Raises:
        PlanFileError: PP170 for what is no layout, PP171 for what Megatron-LM refuses.
    """
    if num_layers > MAX_LAYERS or pp > MAX_RANKS:
        place = given.place("--num-layers") or Location(given.arguments.file, 1, 1)
        given.refuse(f"{num_layers} layers on {pp} pipeline ranks are more than a plan has", place)
    said = [flag for flag in (PER_CHUNK, CHUNKS, LAYOUT) if given.has(flag)]
    if len(said) > 1:
        given.megatron_refuses(f"{said[0]} and {said[1]} are given together", said[1], "remove one of the two")
    if given.has(LAYOUT):
        return _by_layout(given, num_layers, num_mtp, pp)
    num_chunks = _num_chunks(given, num_layers, pp)
    sizes = _sizes(given, num_layers, pp, num_chunks)
    stages = named_stages(sizes, num_mtp)
    flag = next((flag for flag in (FIRST, LAST, EMBEDDING, LOSS, PER_CHUNK, CHUNKS) if given.has(flag)), None)
    if any(not stage for stage in stages):
        given.refuse(
            f"stage {stages.index([])} has no layer, and a plan's stages have one at least",
            given.place(flag or "--num-layers") or Location(given.arguments.file, 1, 1),
        )
    if flag is not None:
        given.take(flag, ("stages",), stages)
    elif pp * num_chunks > 1:
        given.take("--pipeline-model-parallel-size", ("stages",), stages)
    return num_chunks


def named_stages(sizes: list[int], num_mtp: int) -> list[list[str]]:
    """The layers of each global stage: that many blocks, with the embedding first, modules, norm and head last."""
    stages: list[list[str]] = []
    block = 0
    for size in sizes:
        stages.append([f"layer.{index}" for index in range(block, block + size)])
        block += size
    stages[0].insert(0, "embed")
    stages[-1] += [*(f"mtp.{index}" for index in range(num_mtp)), "norm", "head"]
    return stages


def _num_chunks(given: Given, num_layers: int, pp: int) -> int:
    if given.has(CHUNKS):
        return given.degree(CHUNKS, ("schedule", "num_chunks"))
    if not given.has(PER_CHUNK):
        return 1
    if given.has(FIRST) or given.has(LAST):
        given.megatron_refuses(f"{PER_CHUNK} is given with an uneven cut", PER_CHUNK, f"use {CHUNKS}")
    total = num_layers + given.has(EMBEDDING) + given.has(LOSS)
    per_chunk = given.number(PER_CHUNK)
    if per_chunk is None:
        given.refuse(f"only a run can tell the value of {PER_CHUNK}", given.arguments.flags[PER_CHUNK].location)
    if total % pp or total // pp % per_chunk:
        given.megatron_refuses(
            f"{total} layers over {pp} pipeline ranks do not divide into chunks of {per_chunk}", PER_CHUNK
        )
    return total // pp // per_chunk


def _sizes(given: Given, num_layers: int, pp: int, num_chunks: int) -> list[int]:
    """Blocks of each global stage, as get_num_layers_to_build in megatron/core/transformer/transformer_block.py."""
    first, last = given.number(FIRST), given.number(LAST)
    ends = {0: first, pp - 1: last}
    if first is not None or last is not None:
        if given.has(EMBEDDING) or given.has(LOSS):
            both = EMBEDDING if given.has(EMBEDDING) else LOSS
            given.megatron_refuses(f"{both} is given with {FIRST if first is not None else LAST}", both)
        rest = num_layers - (first or 0) - (last or 0)
        ranks = pp - (first is not None) - (last is not None)
        flag = FIRST if first is not None else LAST
        if rest < 0 or (ranks and rest % ranks) or (not ranks and rest):
            given.megatron_refuses(f"{rest} layers are left for {ranks} pipeline ranks, and must divide", flag)
        even = rest // ranks if ranks else 0
        of_rank = [even if ends.get(rank) is None else int(ends[rank] or 0) for rank in range(pp)]
    else:
        total = num_layers + given.has(EMBEDDING) + given.has(LOSS)
        if total % pp:
            counted = "layers, with those that count for embedding and loss," if total > num_layers else "layers"
            given.megatron_refuses(
                f"{total} {counted} do not divide by --pipeline-model-parallel-size {pp}",
                "--pipeline-model-parallel-size",
            )
        of_rank = [total // pp] * pp
    uneven = next((size for size in of_rank if size % num_chunks), None)
    if uneven is not None:
        flag = CHUNKS if given.has(CHUNKS) else PER_CHUNK
        given.megatron_refuses(f"{uneven} layers of a pipeline rank do not divide by {num_chunks} chunks", flag)
    sizes = [of_rank[rank] // num_chunks for _ in range(num_chunks) for rank in range(pp)]
    sizes[0] -= given.has(EMBEDDING)
    sizes[-1] -= given.has(LOSS)
    return sizes


def _by_layout(given: Given, num_layers: int, num_mtp: int, pp: int) -> int:
    setting = given.arguments.flags[LAYOUT]
    text = given.text(LAYOUT)
    if text is None:
        given.refuse(f"the value of {LAYOUT} is {setting.why}", setting.location, "write the layout into the script")
    place = setting.value_location
    try:
        stages = parse_layout(text)
        check_layout(stages, num_layers=num_layers, num_mtp=num_mtp, pp=pp, length=len(text))
    except LayoutError as error:
        begin = Location(place.file, place.line, place.column + error.at, place.column + error.last)
        given.refuse(f"{LAYOUT}: {error}", begin, error.help)
    given.take(LAYOUT, ("stages",), list(_named(stages)))
    return len(stages) // pp


def _named(stages: tuple[tuple[Placed, ...], ...]) -> list[list[str]]:
    counts = {"t": 0, "m": 0}
    named = []
    for stage in stages:
        names: list[str] = []
        for unit in stage:
            match unit.letter:
                case "E":
                    names.append("embed")
                case "L":
                    names += ["norm", "head"]
                case letter:
                    names.append(f"{'layer' if letter == 't' else 'mtp'}.{counts[letter]}")
                    counts[letter] += 1
        named.append(names)
    return named
