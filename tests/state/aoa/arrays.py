"""Maps applied on arrays of distinct numbers: ours, and Paddle's own engine's."""

import contextlib
import io

import numpy as np

from pipeproof.state.aoa.read_statements import read_statements
from pipeproof.state.aoa.tensor_families import TensorMeta


def program(*lines):
    return read_statements("\n".join(lines), "map.aoa")


def meta(*shape, dtype="float32", shards=1):
    return TensorMeta(dtype, shape, shards)


def numbers(metas):
    """Arrays of these shapes in which no number occurs twice."""
    found, start = {}, 1
    for name, one in metas.items():
        size = int(np.prod(one.shape))
        found[name] = np.arange(start, start + size).reshape(one.shape)
        start += size
    return found


def apply_map(state_map, arrays):
    """Return the target's arrays by name (0 where nothing is written), and the casts of each element."""
    made, casts = {}, {}
    for name, tensor in state_map.tensors.items():
        values, through = np.full(tensor.shape, -1), np.full(tensor.shape, None, dtype=object)
        for copy in tensor.copies:
            location = _index(zip(copy.region.offsets, copy.region.stops, strict=True))
            assert (values[location] == -1).all()
            content = 0
            if copy.source is not None:
                region = copy.source_region
                content = arrays[copy.source][_index(zip(region.offsets, region.stops, strict=True))]
                content = content if copy.permutation is None else content.transpose(copy.permutation)
            values[location] = content
            through[location].fill(copy.casts) if isinstance(through[location], np.ndarray) else None
        assert (values >= 0).all()
        made[name], casts[name] = values, through
    return made, casts


def _index(ranges):
    return tuple(slice(start, stop) for start, stop in ranges)


def engine(lines, source, target, **config):
    """Paddle's engine, which needs no process group."""
    from paddle.distributed.flex_checkpoint.aoa.aoa_engine import AOAEngine

    infos = [None if metas is None else shard_infos(metas) for metas in (source, target)]
    with contextlib.redirect_stdout(io.StringIO()):  # it prints a traceback of its own
        return AOAEngine({"aoa_statements": list(lines), **config}, *infos)


def shard_infos(metas):
    from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeightDesc

    found = {}
    for name, one in metas.items():
        cut = len(one.shape) - 1
        local = [length // one.num_shards if dim == cut else length for dim, length in enumerate(one.shape)]
        found[name] = [
            ShardedWeightDesc(
                name,
                tuple(local),
                one.shape,
                tuple(shard * length if dim == cut else 0 for dim, length in enumerate(local)),
                one.dtype,
            )
            for shard in range(one.num_shards)
        ]
    return found


def apply_map_with_paddle(made_by, arrays, names=None):
    """The same as ``apply_map``, from the slices that Paddle's engine answers."""
    made, casts = {}, {}
    for name in made_by.output_vars if names is None else names:
        tensor = made_by.output_vars[name]
        if tensor is None:
            continue
        whole = tuple(slice(0, length, 1) for length in tensor.shape)
        values, through = np.zeros(tuple(tensor.shape), dtype=int), np.full(tuple(tensor.shape), None, dtype=object)
        for key, there, here, steps in made_by.find_source_slices(name, whole):
            content = arrays[key][there]
            for step in steps or ():
                content = content.transpose(eval(step)) if step.startswith("[") else content
            values[here] = content
            through[here].fill(tuple(step for step in steps or () if not step.startswith("[")))
        made[name], casts[name] = values, through
    return made, casts


def same(one, other):
    return one.keys() == other.keys() and all(
        one[name].shape == other[name].shape and (one[name] == other[name]).all() for name in one
    )
