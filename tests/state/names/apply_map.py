"""Maps applied on arrays in memory, one region copy after the other."""

import numpy as np


def apply_map(state_map, arrays):
    """The target's tensors of a map; elements that no region copy fills stay NaN."""
    made = {}
    for name, tensor in state_map.tensors.items():
        target = np.full(tensor.shape, np.nan)
        for copy in tensor.copies:
            here = tuple(map(slice, copy.region.offsets, copy.region.stops))
            if copy.source is None:
                target[here] = 0
                continue
            there = tuple(map(slice, copy.source_region.offsets, copy.source_region.stops))
            block = arrays[copy.source][there]
            named = [dim for dim in copy.permutation or range(block.ndim) if dim >= 0]
            unnamed = [dim for dim in range(block.ndim) if dim not in named]
            target[here] = block.transpose(named + unnamed).reshape(copy.region.extents)
        made[name] = target
    return made
