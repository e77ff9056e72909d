"""V-Min: stages in a V, in a third of the memory of 1F1B.

Qi et al., "Pipeline Parallelism with Controllable Memory", arXiv:2405.15362. Stage ``r`` is the chunk of rank ``r`` on
the way down, stage ``2p - 1 - r`` its chunk on the way back up. Micro-batches go from rank to rank without a rest.
Their way is the shortest possible and takes the least memory: N = floor((p + 4) / 3) micro-batches of two chunk
activations each, as in the paper.

All times are per chunk and the same for all stages. If tf = ti = tw = t and
there is no latency, the makespan for m > N is (6m + 3p - 1 - 2N + max(0, 3p - 4N)) t;
for p >= 3 that is 6m t and 4p - 7, 4p - 5 or 4p - 9 times t for p % 3 = 0, 1 or 2.
For m <= N it is max(4p - 1 + 2m, 3p - 1 + 4m) t. No order of these stages in this memory is faster (`building_block`
explains why). The authors' own code (``zbv_greedy.py`` of sail-sg/zero-bubble-pipeline-parallelism) idles as long,
except 4p - 5 for p % 3 = 2: there its block leaves some ranks a place in this memory that they never use. Otherwise,
between the warm-up and the last forwards, F and I of every rank are in its order.

A way without rests has no slack. For p >= 3 each further micro-batch takes
max(2 (tf + ti + tw), 6 tf, 6 ti): the idle time grows with m unless
tw + ti >= 2 tf and tw + tf >= 2 ti, and it does with any latency. `v_half` is
for such times.
"""

from __future__ import annotations

from pipeproof.schedule.generators.building_block import BuildingBlock, repeated
from pipeproof.schedule.programs import Schedule


def v_min(num_ranks: int, num_micro_batches: int) -> Schedule:
    """One program of F, I and W per pipeline rank, for any sizes.

    With N = floor((p + 4) / 3), the busiest rank holds ``2 min(m, N)`` chunk
    activations until W frees them, and for m >= p each rank holds ``2N``.
    """
    return repeated(BuildingBlock(num_ranks, num_ahead=(num_ranks + 4) // 3, hop=1, turn=1), num_micro_batches)
