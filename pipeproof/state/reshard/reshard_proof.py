"""The proof before bytes are moved: the source has what the target needs, element by element.

Every map must be a bijection on global indices: the shards of each side tile its tensors, the region copies tile the
target's, and every element of the source is used. Work grows with the number of shards and copies; equal shardings are
checked once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from difflib import get_close_matches
from functools import cache

from pipeproof.comm.op_graph import LoweredPlan, index_of
from pipeproof.diagnostics.finding import Finding
from pipeproof.diagnostics.problems import grouped
from pipeproof.stages.describe.gradient_facts import bias_name, moves_biases, routers
from pipeproof.stages.describe.layer import Parameter
from pipeproof.state.byte_ranges import CAST_DTYPES
from pipeproof.state.checkpoint import HeldShard
from pipeproof.state.region_text import and_more, range_text, weight_name
from pipeproof.state.regions import Region, TilingFault, first_with_count, is_outside, tiling_fault, whole_region
from pipeproof.state.reshard.reshard_codes import DUPLICATED_ELEMENTS, LOST_ELEMENTS, SHAPE_MISMATCH, TENSOR_MISMATCH
from pipeproof.state.reshard.reshard_targets import VOCABULARY_DIM
from pipeproof.state.reshard.shard_layout import ShardLayout, bad_shardings, garbage_collection_paused
from pipeproof.state.state_index import TensorEntry
from pipeproof.state.tensor_map import RegionCopy, StateMap, TensorMap
from pipeproof.verify.layouts.index_maps import NO_BIJECTION, OTHER_INDICES

# Proof that each rank of a plan saves its own tensors: layers on their stages, shards as the rank holds them.


def check_placement(layout: ShardLayout) -> Iterator[Finding]:
    """PP213 for a tensor that is not where its layer is, PP211 for a shard that is not the rank's own.

    A layout without a plan has no findings.
    """
    plan = layout.plan
    if plan is None:
        return
    weights = {weight.name for layer in plan.layers for weight in layer.parameters}
    missing = sorted(weights - layout.tensors.keys())
    if missing:
        message = f"no rank of {layout.name} has `{missing[0]}`{and_more(len(missing) - 1, 'tensor')}"
        yield TENSOR_MISMATCH.finding(message, help="put every layer on a stage")
    unused, shifted = _misplaced(layout, plan)
    if unused:
        name, held = unused[0]
        message = f"{held.where} of {layout.name} holds `{name}`, and computes with no layer that has it"
        message += and_more(len(unused) - 1, "shard")
        yield TENSOR_MISMATCH.finding(message, help="hold a tensor where its layer's stage is")
    if shifted:
        name, held, own_region = shifted[0]
        shape = layout.tensors[name].shape
        held_range = range_text(Region(held.shard.offsets, held.shard.extents), shape)
        message = f"{held.where} of {layout.name} computes with `{name}` {range_text(own_region, shape)}, "
        message += f"and its shard is listed as {held_range}{and_more(len(shifted) - 1, 'shard')}"
        fix = "a rank's shard begins at its own index among the ranks that shard the tensor"
        yield OTHER_INDICES.finding(message, help=fix)


def _misplaced(
    layout: ShardLayout, plan: LoweredPlan
) -> tuple[list[tuple[str, HeldShard]], list[tuple[str, HeldShard, Region]]]:
    """Return shards that their rank does not use, and shards that differ from the rank's own."""
    used = [_used_by(plan, pp) for pp in range(plan.mesh.size("pp"))]
    coords = [plan.mesh.coords(rank) for rank in range(plan.mesh.num_ranks)]
    own_of: dict[tuple[str, int, int], Region] = {}
    unused, shifted = list[tuple[str, HeldShard]](), list[tuple[str, HeldShard, Region]]()
    for name, shards in layout.shards.items():
        tensor = layout.tensors[name]
        weight = tensor.weight or name
        for held in shards:
            if held.rank is None:
                continue
            coordinates = coords[held.rank]
            if weight not in used[coordinates["pp"]]:
                unused.append((name, held))
                continue
            parameter = used[coordinates["pp"]][weight]
            if parameter is None or tensor.kind == "counter":
                continue
            key = weight, coordinates["tp"], coordinates["ep"]
            own_region = own_of.get(key) or own_of.setdefault(key, _own_region(plan, parameter, held.rank))
            if (held.shard.offsets, held.shard.extents) != own_region:
                shifted.append((name, held, own_region))
    return unused, shifted


def _used_by(plan: LoweredPlan, pp: int) -> dict[str, Parameter | None]:
    """Return the tensors that one pipeline rank index computes with, by name; biases have no parameter."""
    layers = [layer for stage, holders in enumerate(plan.holders) if pp in holders for layer in plan.layers_of(stage)]
    used: dict[str, Parameter | None] = {
        weight.name: weight for layer in layers for weight in (*layer.parameters, *layer.borrowed)
    }
    if moves_biases(plan.spec):
        used |= dict.fromkeys(map(bias_name, routers(layers)))
    return used


def _own_region(plan: LoweredPlan, parameter: Parameter, rank: int) -> Region:
    index = index_of(plan, parameter, rank)
    return Region(tuple(start for start, _ in index), tuple(stop - start for start, stop in index))


def prove(source: ShardLayout, state_map: StateMap, target: ShardLayout) -> tuple[Finding, ...]:
    """Return the findings against making ``target`` from ``source`` by a map; none if everything is proved.

    There is one finding for each kind of mistake, with the number of tensors and the first counter-example: tensor,
    rank, range.
    """
    with garbage_collection_paused():
        return (
            *_tiling_findings(source),
            *_tiling_findings(target),
            *check_tensors(source, state_map, target),
            *check_map(source, state_map, target),
            *check_placement(source),
            *check_placement(target),
        )


def _tiling_findings(side: ShardLayout) -> Iterator[Finding]:
    """PP210: every element of a layout is in one shard. One finding for each kind of mistake."""
    for kind, cuts in grouped((_kind(cut.fault), cut) for cut in bad_shardings(side)).items():
        name, region = cuts[0].tensors[0], cuts[0].fault.region
        more = sum(len(cut.tensors) for cut in cuts) - 1
        where = range_text(region, side.tensors[name].shape)
        shards = side.shards.get(name, ())
        holders = " and ".join(dict.fromkeys(shards[number].where for number in cuts[0].fault.holders))
        facts = {
            "missing": f"no shard has {where}",
            "repeated": f"{where} is in {cuts[0].fault.num_holders} shards, {holders}",
            "outside": f"{holders} has a shard outside of it, {where}",
        }
        shape = list(side.tensors[name].shape)
        message = f"{side.name}: of `{name}` {shape} {facts[kind]}{and_more(more, 'tensor')}"
        fixes = {
            "missing": "name a checkpoint that has all files of all ranks",
            "repeated": "each element must be saved by one rank: the first one that holds it",
            "outside": "offsets are those in the whole tensor",
        }
        yield NO_BIJECTION.finding(message, help=fixes[kind])


def _kind(fault: TilingFault) -> str:
    if not fault.num_holders:
        return "missing"
    return "repeated" if fault.num_holders > 1 else "outside"


_SHOWN = 3
_OPTIMIZER = "optimizer/"
_SIZES = "use the checkpoint and the plan of one model"


def check_tensors(source: ShardLayout, state_map: StateMap, target: ShardLayout) -> Iterator[Finding]:
    """PP213 for names that only one side has, PP214 for tensors that differ in shape or type."""
    computed, wanted = state_map.tensors, target.tensors
    read = state_map.readers().keys()
    unread = [name for name in source.tensors if name not in read and name not in state_map.removed]
    missing = [name for name in wanted if name not in computed] + sorted(read - source.tensors.keys())
    surplus = list(dict.fromkeys(name for name in (*unread, *computed) if name not in wanted))
    if missing:
        yield _missing(missing, surplus, source, target)
    if surplus:
        yield _surplus(surplus, source, target)
    both = [name for name in computed if name in wanted]
    shapes = {name: (computed[name].shape, wanted[name].shape) for name in both}
    differing = {name: (shape, other) for name, (shape, other) in shapes.items() if shape != other}
    if differing:
        yield _shapes(differing, target)
    sizes = _required_shapes(state_map, source.tensors)
    if sizes:
        name, needed = next(iter(sizes.items()))
        message = f"`{name}` of {source.name} is {list(source.tensors[name].shape)}, and {target.name} needs it as "
        message += f"{list(needed)}{and_more(len(sizes) - 1, 'tensor')}"
        yield SHAPE_MISMATCH.finding(message, help=_SIZES)
    faults = (_type_fault(name, computed[name], wanted[name], source.tensors) for name in both)
    types = [fault for fault in faults if fault is not None]
    if types:
        message = f"{types[0]}{and_more(len(types) - 1, 'tensor')}"
        fix = "use the source's type, or write the cast: `NAME -> NAME, dtype='..'` in an AOA file; "
        fix += f"cast are {', '.join(CAST_DTYPES)}"
        yield SHAPE_MISMATCH.finding(message, help=fix)


def _missing(names: list[str], surplus: Collection[str], source: ShardLayout, target: ShardLayout) -> Finding:
    names_shown = []
    for name in names[:_SHOWN]:
        near = [other for other in surplus if other.startswith(_OPTIMIZER) == name.startswith(_OPTIMIZER)]
        nearest = get_close_matches(name, near, 1)
        names_shown.append(f"`{name}`" + (f" (near: `{nearest[0]}`)" if nearest else ""))
    named = _listed(names_shown, len(names))
    message = f"{target.name} needs {_count_text(names)} that {source.name} does not have: {named}"
    fix = "use the checkpoint of the same model; if it has other names, give their convention "
    fix += "(`--names CONVENTION`) or statements (`--aoa FILE`)"
    return TENSOR_MISMATCH.finding(message, help=fix)


def _surplus(names: list[str], source: ShardLayout, target: ShardLayout) -> Finding:
    names_shown = _listed([f"`{name}`" for name in names[:_SHOWN]], len(names))
    message = f"{source.name} has {_count_text(names)} that {target.name} does not have: {names_shown}"
    fix = "use the plan of the same model, or remove them by name: `NAME -> _` in an AOA file"
    return TENSOR_MISMATCH.finding(message, help=fix)


def _count_text(names: list[str]) -> str:
    return "a tensor" if len(names) == 1 else f"{len(names)} tensors"


def _listed(names_shown: list[str], number: int) -> str:
    return ", ".join(names_shown) + (f" and {number - len(names_shown)} more" if number > len(names_shown) else "")


def _shapes(shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]], target: ShardLayout) -> Finding:
    name, (computed, wanted) = next(iter(shapes.items()))
    more = and_more(len(shapes) - 1, "tensor")
    fix = _SIZES
    if all(_only_vocabulary_differs(candidate, *both) for candidate, both in shapes.items()):
        fix = "if only the padding of the vocabulary differs, give the number of token ids in both plans: "
        fix += "model.unpadded_vocab_size"
    message = f"`{name}` is {list(computed)}, and {target.name} needs {list(wanted)}{more}"
    return SHAPE_MISMATCH.finding(message, help=fix)


def _only_vocabulary_differs(name: str, computed: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    dim = VOCABULARY_DIM.get(weight_name(name) or "")
    differ = [
        index for index, (candidate, other) in enumerate(zip(computed, wanted, strict=False)) if candidate != other
    ]
    return len(computed) == len(wanted) and dim is not None and differ == [dim]


def _required_shapes(state_map: StateMap, source: Mapping[str, TensorEntry]) -> dict[str, tuple[int, ...]]:
    """Return by name the least shape that a source tensor needs, if elements outside of it are read."""
    return {
        name: tuple(map(max, zip(*(reader.region.stops for reader in readers), strict=False)))
        for name, readers in state_map.readers().items()
        if name in source and any(is_outside(reader.region, source[name].shape) for reader in readers)
    }


def _type_fault(name: str, computed: TensorMap, wanted: TensorEntry, source: Mapping[str, TensorEntry]) -> str | None:
    """Describe the first copy whose elements come in another type than the target's."""
    for copy in computed.copies:
        entry = None if copy.source is None else source.get(copy.source)
        incoming = copy.casts[-1] if copy.casts else (computed.dtype if entry is None else entry.dtype)
        types = (*(() if entry is None else (entry.dtype,)), *copy.casts)
        if copy.casts and not set(types) <= set(CAST_DTYPES):
            return f"`{copy.source}` is {types[0]}, which is not cast to {copy.casts[-1]}"
        if incoming != computed.dtype or computed.dtype != wanted.dtype:
            return f"`{name}` comes as {incoming}, and {wanted.dtype} is needed"
    return None


_FaultOf = Callable[[tuple[int, ...], tuple[Region, ...]], TilingFault | None]


def check_map(source: ShardLayout, state_map: StateMap, target: ShardLayout) -> Iterator[Finding]:
    """PP210 for elements that are made never or twice, PP215 and PP216 for elements that are read never or twice."""
    fault_of = cache(tiling_fault)  # many tensors have the same regions
    faults = (_copies_fault(name, state_map, source, fault_of) for name in state_map.tensors)
    computed = [fault for fault in faults if fault is not None]
    if computed:
        message = f"{target.name}: {computed[0]}{and_more(len(computed) - 1, 'tensor')}"
        fix = "every element of a tensor comes from one element, or is zero by a statement"
        yield NO_BIJECTION.finding(message, help=fix)
    yield from _coverage_findings(source, state_map)


def _copies_fault(name: str, state_map: StateMap, source: ShardLayout, fault_of: _FaultOf) -> str | None:
    tensor = state_map.tensors[name]
    for copy in tensor.copies:
        message = _copy_fault(copy, source)
        if message is not None:
            return f"`{name}` {range_text(copy.region, tensor.shape)} {message}"
    if len(tensor.copies) == 1 and tensor.copies[0].region == whole_region(tensor.shape):
        return None
    fault = fault_of(tensor.shape, tuple(copy.region for copy in tensor.copies))
    if fault is None:
        return None
    where = range_text(fault.region, tensor.shape)
    if not fault.num_holders:
        return f"`{name}` {where} has no source"
    if fault.num_holders == 1:
        return f"`{name}` has no {where}, and a copy writes it"
    first, second = (tensor.copies[number].source for number in fault.holders[:2])
    return f"`{name}` {where} is written {fault.num_holders} times, from `{first}` and `{second}`"


def _copy_fault(copy: RegionCopy, source: ShardLayout) -> str | None:
    """Describe why a copy cannot be executed; missing sources are reported elsewhere."""
    entry = None if copy.source is None else source.tensors.get(copy.source)
    if entry is None:
        return None
    region = copy.source_region
    if is_outside(region, entry.shape):
        return None  # reported with the shapes
    seen = region if copy.permutation is None else region.permuted(copy.permutation)
    if seen.extents != copy.region.extents:
        return f"comes from {list(seen.extents)} elements of `{copy.source}`"
    return None


def _coverage_findings(source: ShardLayout, state_map: StateMap) -> Iterator[Finding]:
    first_unread: _FaultOf = cache(lambda shape, regions: first_with_count(shape, regions, lambda number: number == 0))
    first_repeated: _FaultOf = cache(lambda shape, regions: first_with_count(shape, regions, lambda number: number > 1))
    lost, twice = list[str](), list[str]()
    for name, own_readers in state_map.readers().items():
        entry, regions = source.tensors.get(name), tuple(reader.region for reader in own_readers)
        if entry is None or any(is_outside(region, entry.shape) for region in regions):
            continue  # reported already
        shape = entry.shape
        if regions == (whole_region(shape),):
            continue
        lost_fault = first_unread(shape, (*dict.fromkeys(regions), *state_map.dropped.get(name, ())))
        if lost_fault is not None:
            lost.append(f"`{name}` {range_text(lost_fault.region, shape)}")
        repeated_fault = None if name in state_map.duplicated else first_repeated(shape, regions)
        if repeated_fault is not None:
            to = " and ".join(dict.fromkeys(f"`{own_readers[number].tensor}`" for number in repeated_fault.holders))
            where = range_text(repeated_fault.region, shape)
            twice.append(f"`{name}` {where}: {repeated_fault.num_holders} times, for {to}")
    if lost:
        message = f"{source.name}: nothing reads {lost[0]}{and_more(len(lost) - 1, 'tensor')}"
        fix = "use the checkpoint and the plan of one model; to drop a tensor on purpose, remove it by name: "
        fix += "`NAME -> _` in an AOA file"
        yield LOST_ELEMENTS.finding(message, help=fix)
    if twice:
        message = f"{source.name}: several tensors read {twice[0]}{and_more(len(twice) - 1, 'tensor')}"
        fix = "check that these copies are intended, such as a head that is the embedding"
        yield DUPLICATED_ELEMENTS.finding(message, help=fix)
