"""Times the generation of every kind of schedule, next to PyTorch's own generation of its kinds.

``python benchmarks/generate.py [REPEATS]`` prints, for 64 ranks and 256
micro-batches, the processor time of the fastest of REPEATS (7) runs of our
generator of each kind that exists at these sizes (of one run, where that takes
more than a second), with 4 stages on each rank where the kind takes any number.
In addition, where PyTorch is installed (``pip install torch==2.13.0``), the
fastest run of the method
``_calculate_single_rank_operations`` of its schedule classes over all ranks:
this makes the same computations in the same order, but for idle slots. Runs of
both alternate in one process, without garbage collection. Nothing is
asserted: times are the machine's.
"""

from __future__ import annotations

import gc
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator

from pipeproof.schedule.kinds import SCHEDULE_KINDS, Request, ScheduleKind
from pipeproof.schedule.programs import UnfitSizesError

RANKS, CHUNKS, MICRO_BATCHES, SPLITS = 64, 4, 256, 2

THEIRS = {
    ("interleaved", "torch"): "ScheduleInterleaved1F1B",
    ("looped_bfs", None): "ScheduleLoopedBFS",
    ("interleaved_zb", None): "ScheduleInterleavedZeroBubble",
    ("zb_v", None): "ScheduleZBVZeroBubble",
    ("dualpipe_v", None): "ScheduleDualPipeV",
}
"""Kind and variant to PyTorch's class of the same order."""


def main() -> None:
    """Measure each kind in turn and print one line for it."""
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    with_torch = importlib.util.find_spec("torch") is not None
    print(f"{RANKS} ranks, {MICRO_BATCHES} micro-batches, seconds of processor time, fastest of {repeats}")
    print(f"{'kind':<28} {'stages':>6} {'operations':>10} {'pipeproof':>9} {'PyTorch':>8} {'ratio':>6}")
    for kind, variant in kinds_and_variants():
        request = request_for(kind, variant)
        name = kind.name if variant is None else f"{kind.name} {variant}"
        start = time.perf_counter()
        try:
            num_ops = sum(map(len, kind.generate(request).programs))
        except UnfitSizesError as unfit:
            print(f"{name:<28} does not exist at these sizes: {unfit.help}")
            continue
        runs = [lambda kind=kind, request=request: kind.generate(request)]
        if with_torch and (kind.name, variant) in THEIRS:
            runs.append(torch_generation(THEIRS[kind.name, variant], request))
        ours, *theirs = fastest(runs, repeats if time.perf_counter() - start < 1 else 1)
        rival = f" {theirs[0]:>8.3f} {theirs[0] / ours:>5.2f}x" if theirs else ""
        print(f"{name:<28} {request.num_chunks:>6} {num_ops:>10,} {ours:>9.3f}{rival}")
    if not with_torch:
        print("PyTorch is not installed: pip install torch==2.13.0 to compare with it")


def kinds_and_variants() -> Iterator[tuple[ScheduleKind, str | None]]:
    """Every kind, once for each of its variants."""
    for kind in SCHEDULE_KINDS.values():
        for variant in kind.variants or (None,):
            yield kind, variant


def request_for(kind: ScheduleKind, variant: str | None) -> Request:
    """The sizes of the benchmark, as far as the kind takes them."""
    num_chunks = CHUNKS if kind.max_chunks is None else kind.max_chunks
    splits = SPLITS if kind.splits_sequences else 1
    return Request(RANKS, MICRO_BATCHES, num_chunks, num_sequence_splits=splits, variant=variant)


def torch_generation(class_name: str, request: Request) -> Callable[[], object]:
    """PyTorch's generation of all ranks, of a schedule made without stages that can run."""
    from torch.distributed.pipelining import schedules

    made = object.__new__(getattr(schedules, class_name))
    made.pp_group_size, made.n_local_stages, made._n_microbatches = RANKS, request.num_chunks, MICRO_BATCHES
    made._stages = [None] * request.num_chunks
    made.num_stages = made._num_stages = RANKS * request.num_chunks
    made.number_of_rounds = max(1, MICRO_BATCHES // RANKS)
    made.microbatches_per_round = MICRO_BATCHES // made.number_of_rounds
    return lambda: [made._calculate_single_rank_operations(rank) for rank in range(RANKS)]


def fastest(runs: list[Callable[[], object]], repeats: int) -> list[float]:
    """The fastest time of each, alternately; all results are kept, to give every run new memory."""
    times: list[list[float]] = [[] for _ in runs]
    kept = []
    gc.collect()
    gc.disable()
    for _ in range(repeats):
        for mine, run in zip(times, runs, strict=True):
            start = time.process_time()
            kept.append(run())
            mine.append(time.process_time() - start)
    gc.enable()
    return list(map(min, times))


if __name__ == "__main__":
    main()
