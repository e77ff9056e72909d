"""Distance of the schedules of kind ``optimal`` from the shortest schedules.

``python benchmarks/optimal.py [WORKLOADS] [LIMIT]`` draws random workloads (200;
always the same ones): 2 to 5 ranks, 2 to 9 micro-batches, uneven times,
latency or none, memory from the least that works to plenty; one stage a rank,
two round-robin, or two in a V. Each is scheduled by ``optimal`` and given
to OR-tools' CP-SAT (``pip install ortools``), from the greedy schedule on, for
up to LIMIT (2) of its deterministic seconds. Printed is how much longer the
greedy schedule is than the proved optimum; what was not proved is counted and
left out. Before that, the 4 ranks and 8 micro-batches of unit times that the
documentation names. At last, 40 of them again with pairs that take turns, which
take their longer computation and 0 to 60 % of the shorter one. Nothing is
asserted: times are the machine's.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

from pipeproof.schedule.generators.optimal import optimal
from pipeproof.schedule.generators.solve import solve
from pipeproof.schedule.programs import StageCosts, Time, asap, even_costs


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
    compare(num_workloads, limit, with_pairs=False)
    compare(min(num_workloads, 40), limit, with_pairs=True)


def compare(num_workloads: int, limit: float, *, with_pairs: bool) -> None:
    """Random workloads, scheduled and solved."""
    draw, longer, unproved = random.Random(0), [], 0
    start = time.perf_counter()
    for _ in range(num_workloads):
        placement, num_micro_batches, costs, memory = random_workload(draw)
        if with_pairs:
            costs = replace(costs, in_turns=pair_time(costs, draw.choice([0, Fraction(1, 5), Fraction(3, 5)])))
        greedy = asap(optimal(placement, num_micro_batches, costs, memory), costs).makespan
        solution = solve(placement, num_micro_batches, costs, memory, time_limit_s=limit)
        if solution.proved:
            longer.append(float(Fraction(greedy) / Fraction(solution.makespan)) - 1)
        else:
            unproved += 1
    shortest = sum(share == 0 for share in longer)
    named = "random workloads with pairs" if with_pairs else "random workloads"
    print(f"{num_workloads} {named} in {time.perf_counter() - start:.0f} s, {unproved} not proved in the limit")
    average, worst = statistics.mean(longer), max(longer)
    print(
        f"greedy is the shortest in {shortest / len(longer):.0%} of the others, {average:.1%} longer on average, ",
        end="",
    )
    print(f"{worst:.1%} at worst")


def loop(num_ranks: int, num_chunks: int) -> tuple[tuple[int, ...], ...]:
    """Stages round-robin over the ranks."""
    return tuple(tuple(range(rank, num_ranks * num_chunks, num_ranks)) for rank in range(num_ranks))


def pair_time(costs: StageCosts, share: Fraction | int) -> Callable[[int, int], Time]:
    """The longer of two computations, and a share of the shorter one."""

    def in_turns(forward: int, backward: int) -> Time:
        times = costs.forward[forward], costs.backward_input[backward] + costs.backward_weight[backward]
        return max(times) + share * min(times)

    return in_turns


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
