"""Log of a faithful adapter, made from a graph."""

from pipeproof.exec.compare.compare_log import expected_facts
from pipeproof.exec.rank.op_log import HOST_QUEUE, LogEntry


def faithful_log(graph, rank, *, num_steps, dtype="float32"):
    """Every step of ``rank`` queue by queue, each entry one tick after the one before on its queue."""
    entries, clock = [], 0
    for step in range(num_steps):
        for queue, facts in expected_facts(graph, rank, dtype).items():
            for op, ranks, numel, entry_dtype in facts:
                entries.append(LogEntry(step, queue, op, clock, clock + 1, ranks, numel, entry_dtype))
                clock += 1
    return entries


def on_queue(entries, queue=HOST_QUEUE, step=0):
    """The places in the log of one step's entries on one queue, in order."""
    return [i for i, entry in enumerate(entries) if entry.queue == queue and entry.step == step]
