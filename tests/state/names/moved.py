"""Maps carried out on arrays in memory, one slab after the other."""

import numpy as np


def carried_out(state_map, arrays):
    """The target's tensors of a map; what no slab fills stays NaN."""
    made = {}
    for name, tensor in state_map.tensors.items():
        target = np.full(tensor.shape, np.nan)
        for slab in tensor.slabs:
            here = tuple(map(slice, slab.box.offsets, slab.box.stops))
            if slab.source is None:
                target[here] = 0
                continue
            there = tuple(map(slice, slab.source_box.offsets, slab.source_box.stops))
            block = arrays[slab.source][there]
            named = [dim for dim in slab.permutation or range(block.ndim) if dim >= 0]
            unnamed = [dim for dim in range(block.ndim) if dim not in named]
            target[here] = block.transpose(named + unnamed).reshape(slab.box.extents)
        made[name] = target
    return made
