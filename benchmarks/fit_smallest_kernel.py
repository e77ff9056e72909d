"""Time of the smallest elementwise kernel in DeepSeek's published training profile, for ``cost/device_tables.py``.

``python benchmarks/fit_smallest_kernel.py train.json`` reads the profile of deepseek-ai/profile-data (H800, one
overlapped forward and backward of DualPipe). Small kernels are PyTorch's elementwise kernels with at most one block of
threads for each processor: with more work they would not take longer. It prints the time of such a kernel, and the time
between its start and the start of the next kernel of its stream, which is the time of an operation in a sequence of
small ones. Pauses of more than 10 us are waits for other streams and left out. The last column leaves out one name of
kernel in turn: the largest change of the mean.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from itertools import pairwise
from math import prod
from pathlib import Path
from statistics import fmean

LONGEST_PAUSE_US = 10


def main() -> None:
    """Print the means in microseconds and their number."""
    trace = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    num_processors = trace["deviceProperties"][0]["numSms"]
    streams = defaultdict(list)
    for event in trace["traceEvents"]:
        if event.get("cat") == "kernel":
            streams[event["args"]["stream"]].append(event)
    kernels = defaultdict[str, list[tuple[int, int]]](list)
    for events in streams.values():
        events.sort(key=lambda event: event["ts"])
        for event, following in pairwise(events):
            name, until_next = event["name"], following["ts"] - event["ts"]
            is_small = prod(event["args"]["grid"]) <= num_processors
            is_fed = until_next - event["dur"] <= LONGEST_PAUSE_US
            if is_small and is_fed and "at::native" in name and "elementwise" in name:
                kernels[name].append((event["dur"], until_next))
    rows = [row for found in kernels.values() for row in found]
    mean = fmean(until_next for _, until_next in rows)
    others = [fmean(row[1] for name, found in kernels.items() if name != left for row in found) for left in kernels]
    print(f"{len(rows)} kernels of {len(kernels)} names: {fmean(row[0] for row in rows):.2f} us, {mean:.2f} us to the "
          f"next; without one name {min(others):.2f} to {max(others):.2f} us")  # fmt: skip


if __name__ == "__main__":
    main()
