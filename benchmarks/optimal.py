"""Distance of the schedules of kind ``optimal`` from the shortest schedules.

``python benchmarks/optimal.py [WORKLOADS] [LIMIT]`` draws random workloads (200;
always the same ones): 2 to 5 ranks, 2 to 9 micro-batches, uneven times,
latency or none, memory from the least that works to plenty; one stage a rank,
two round-robin, or two in a V. Each is scheduled by ``optimal`` and given
to OR-tools' CP-SAT (``pip install ortools``), from the greedy schedule on, for
up to LIMIT (2) of its deterministic seconds. Printed is how much longer the
greedy schedule is than the proved optimum; what was not proved is counted and
left out. Before that, the 4 ranks and 8 micro-batches of unit times that the
documentation names. Nothing is asserted: times are the machine's.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from fractions import Fraction

from pipeproof.schedule.generators.optimal import optimal
from pipeproof.schedule.generators.solve import solve
from pipeproof.schedule.programs import StageCosts, asap, even_costs


def main() -> None:
    """The named cases, then the random ones."""
    num_workloads = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    limit = float(sys.argv[2]) if len(sys.argv) > 2 else 2.0
    print("4 ranks, 8 micro-batches, unit times")
    print(f"{'memory':>6} {'greedy':>6} {'solved':>6} {'proved':>6} {'seconds':>7}")
    for memory in (4, 3, 2, 1):
        placement, costs = loop(4, 1), even_costs(4)
        greedy = asap(optimal(placement, 8, costs, memory), costs).makespan
        solution = solve(placement, 8, costs, memory, time_limit_s=limit)
        proved = "yes" if solution.proved else "no"
        print(f"{memory:>6} {greedy!s:>6} {solution.makespan!s:>6} {proved:>6} {solution.seconds:>7.2f}")
    compare(num_workloads, limit)


def compare(num_workloads: int, limit: float) -> None:
    """Random workloads, scheduled and solved."""
    draw, longer, unproved = random.Random(0), [], 0
    start = time.perf_counter()
    for _ in range(num_workloads):
        placement, num_micro_batches, costs, memory = random_workload(draw)
        greedy = asap(optimal(placement, num_micro_batches, costs, memory), costs).makespan
        solution = solve(placement, num_micro_batches, costs, memory, time_limit_s=limit)
        if solution.proved:
            longer.append(float(Fraction(greedy) / Fraction(solution.makespan)) - 1)
        else:
            unproved += 1
    shortest = sum(share == 0 for share in longer)
    seconds = time.perf_counter() - start
    print(f"{num_workloads} random workloads in {seconds:.0f} s, {unproved} not proved in the limit")
    average, worst = statistics.mean(longer), max(longer)
    print(
        f"greedy is the shortest in {shortest / len(longer):.0%} of the others, {average:.1%} longer on average, ",
        end="",
    )
    print(f"{worst:.1%} at worst")


def loop(num_ranks: int, num_chunks: int) -> tuple[tuple[int, ...], ...]:
    """Stages round-robin over the ranks."""
    return tuple(tuple(range(rank, num_ranks * num_chunks, num_ranks)) for rank in range(num_ranks))


def random_workload(draw: random.Random) -> tuple[tuple[tuple[int, ...], ...], int, StageCosts, int]:
    """Placement, micro-batches, times and the most activations that a rank may hold."""
    num_ranks = draw.randint(2, 5)
    there_and_back = tuple((rank, 2 * num_ranks - 1 - rank) for rank in range(num_ranks))
    placement = draw.choice([loop(num_ranks, 1), loop(num_ranks, 1), loop(num_ranks, 2), there_and_back])
    num_stages, num_chunks = sum(map(len, placement)), len(placement[0])
    forward, backward_input, backward_weight = (tuple(draw.randint(1, 5) for _ in range(num_stages)) for _ in range(3))
    costs = StageCosts(forward, backward_input, backward_weight, draw.choice([0, 0, 1, 2]))
    return placement, draw.randint(2, 9), costs, draw.randint(num_chunks, num_chunks * (num_ranks + 1))


if __name__ == "__main__":
    main()
