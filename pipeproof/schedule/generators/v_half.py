"""V-Half: stages in a V, in half of the memory of 1F1B.

Qi et al., "Pipeline Parallelism with Controllable Memory", arXiv:2405.15362. Stage ``r`` is the chunk of rank ``r`` on
the way down, stage ``2p - 1 - r`` its chunk on the way back up. On its ways down a micro-batch rests for one slot
between two ranks. This slack costs memory, N = floor(p / 2) + 1 micro-batches of two chunk activations each, as in the
paper, and lets F, I and W differ. Between the warm-up and the last forwards, F and I of every rank are in the order of
the authors' own code (sail-sg/zero-bubble-pipeline-parallelism, ``zbv_greedy.py``).

All times are per chunk and the same for all stages. If tf = ti = tw = t and
there is no latency, the makespan for m > N is (6m + 3p - 1 - 2N + max(0, 3p - 4N)) t;
for p >= 3 that is 6m t and 3p - 4 (p odd) or 3p - 7 (p even) times t. For m <= N it is
max(4p - 1 + 2m, 3p - 1 + 4m) t. No order of these stages in this memory is
faster (`building_block` explains why).

For p >= 2 and no latency each further micro-batch takes
max(2 (tf + ti + tw), 4 tf + tw, 4 ti + tw): the idle time does not grow with m exactly
if tw + 2 ti >= 2 tf and tw + 2 tf >= 2 ti, the paper's condition. With equal times t it
does not grow with latencies up to t / 2.
"""

from __future__ import annotations

from pipeproof.schedule.generators.building_block import BuildingBlock, repeated
from pipeproof.schedule.programs import Schedule


def v_half(num_ranks: int, num_micro_batches: int) -> Schedule:
    """One program of F, I and W per pipeline rank, for any sizes.

    With N = floor(p / 2) + 1, the busiest rank holds ``2 min(m, N)`` chunk
    activations until W frees them, and for m >= p each rank holds ``2N``.
    """
    return repeated(BuildingBlock(num_ranks, num_ahead=num_ranks // 2 + 1, hop=2, turn=2), num_micro_batches)
