"""Files that a profiler would write of a run that took exactly the simulated times."""

from __future__ import annotations

import gzip
import json
import sqlite3
from collections import defaultdict
from dataclasses import dataclass

from pipeproof.schedule.ops import COMPUTE_KINDS, FORWARD_KINDS, RECV_KINDS, SEND_KINDS, parse_op
from pipeproof.sim.simulate import simulate

MAIN, AUTOGRAD, COMPUTE_STREAM, MESSAGE_STREAM = 100, 200, 7, 20
BASE_NS = 1_700_000_000_000_000_000
STEP_NS = 50_000_000
POSTS_NS = 100
_MESSAGE = "ncclDevKernel_SendRecv(ncclDevComm*)"


@dataclass
class Event:
    """A range of the host with the kernels that it launches: (name, start, end) in nanoseconds."""

    name: str
    op: object
    start: int
    end: int
    kernels: list


def events_of(subject, *, num_steps=3, prefix="pipeproof:", optimizer_us=0):
    """By rank, the events of the steps of a plan's simulation, in the order in which the host launches them.

    The host runs ahead of the GPU: an operation has a microsecond of the host. A computation is two kernels with a gap
    between them; an SGD step of ``optimizer_us`` ends each step.
    """
    timeline = simulate(subject.plan).timeline
    found = {}
    for rank in range(subject.graph.num_ranks):
        spans = [span for span in timeline.spans if span.rank == rank]
        by_op = {span.op: span for span in spans if parse_op(span.op).kind in COMPUTE_KINDS | SEND_KINDS | RECV_KINDS}
        order = [str(subject.graph.ops[i]) for i in subject.graph.rank_ops(rank)]
        events, host = [], 0
        for step in range(num_steps):
            offset = step * STEP_NS
            host = max(host, offset)
            for text in (text for text in order if text in by_op):
                op, span = parse_op(text), by_op[text]
                start, end = (offset + int(1000 * timeline.us(time)) for time in (span.start, span.end))
                if op.kind in COMPUTE_KINDS:
                    third = (end - start) // 3
                    kernels = [("gemm", start, start + third), ("gemm", end - third, end)]
                else:
                    kernels = [(_MESSAGE, start, end)]
                events.append(Event(prefix + text, op, host, host + 1000, kernels))
                host += 1200
            end = offset + STEP_NS - 10_000_000
            kernels = [("multi_tensor_apply", end, end + 1000 * optimizer_us)] if optimizer_us else []
            events.append(Event("Optimizer.step#SGD.step", None, host, host + 1000, kernels))
            host += 1200
        found[rank] = events
    return found


def thread_of(event):
    """The thread that launches the kernels of an event."""
    return AUTOGRAD if event.op is not None and event.op.kind in COMPUTE_KINDS - FORWARD_KINDS else MAIN


def kineto_of(events, rank, num_ranks, *, named=True, device="NVIDIA H100"):
    """The trace of one rank as PyTorch's profiler writes it; without names only those of the optimizer are there."""
    lines, correlation = [], 1000
    for event in events:
        thread = thread_of(event)
        if named or event.op is None:
            lines.append(_complete("user_annotation", event.name, 1, MAIN, event.start, event.end, {}))
        if thread == AUTOGRAD:
            name = "autograd::engine::evaluate_function: AddmmBackward0"
            lines.append(_complete("cpu_op", name, 1, AUTOGRAD, event.start + 10, event.end - 10, {}))
        for place, (name, start, end) in enumerate(event.kernels):
            correlation += 1
            launch = event.start + 100 * (place + 1)
            args = {"correlation": correlation}
            lines.append(_complete("cuda_runtime", "cudaLaunchKernel", 1, thread, launch, launch + 50, args))
            stream = MESSAGE_STREAM if "SendRecv" in name else COMPUTE_STREAM
            lines.append(_complete("kernel", name, 0, stream, start, end, {**args, "stream": stream}))
    lines.append({"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "python"}})
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": device}],
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": num_ranks},
        "host_name": "node",
        "baseTimeNanoseconds": BASE_NS,
        "traceEvents": lines[::-1],
        "traceName": "trace.json",
    }


def _complete(category, name, pid, tid, start, end, args):
    time = {"ts": _us(start), "dur": _us(end - start)}
    return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, **time, "args": args}


def _us(time_ns):
    return time_ns / 1000 if time_ns % 1000 else time_ns // 1000


def write_kineto(folder, events, *, compress=False, **options):
    """Write the traces of all ranks; return their files."""
    files = []
    for rank, of_rank in events.items():
        text = json.dumps(kineto_of(of_rank, rank, len(events), **options), indent=1)
        path = folder / f"rank{rank}.json{'.gz' if compress else ''}"
        path.write_bytes(gzip.compress(text.encode()) if compress else text.encode())
        files.append(path)
    return files


def write_nsys(path, events, *, named=True, ranges=True):
    """Write one SQLite export with the processes of all ranks, each with the GPU of its number."""
    path.unlink(missing_ok=True)
    connection = sqlite3.connect(path)
    connection.executescript(
        "CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);"
        "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER,"
        " globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL);"
        "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER"
        " NOT NULL, contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,"
        " demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL);"
        "CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER"
        " NOT NULL, contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,"
        " value INTEGER NOT NULL, bytes INTEGER NOT NULL);"
        "CREATE TABLE TARGET_INFO_GPU (id INTEGER NOT NULL, name TEXT);"
        "INSERT INTO TARGET_INFO_GPU VALUES (0, 'NVIDIA H100');"
    )
    if ranges:
        connection.execute(
            "CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL,"
            " rangeId INTEGER, category INTEGER, color INTEGER, text TEXT, globalTid INTEGER,"
            " endGlobalTid INTEGER, textId INTEGER, domainId INTEGER)"
        )
    names = defaultdict(lambda: len(names) + 1)
    for rank, of_rank in events.items():
        process, correlation = (0x11 << 48) | (4000 + rank) << 24, 0
        for number, event in enumerate(event for event in of_rank):
            if ranges and (named or event.op is None):
                text, text_id = (event.name, None) if number % 2 else (None, names[event.name])
                row = (event.start, event.end, 59, text, process | MAIN, text_id, 0)
                connection.execute(
                    "INSERT INTO NVTX_EVENTS (start, end, eventType, text, globalTid, textId, domainId) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?)", row,
                )  # fmt: skip
            for place, (name, start, end) in enumerate(event.kernels):
                correlation += 1
                launch, thread = event.start + 100 * (place + 1), process | thread_of(event)
                connection.execute(
                    "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, 0, ?, ?, ?, 0)",
                    (launch, launch + 50, thread, correlation, names["cudaLaunchKernel_v7000"]),
                )
                stream = MESSAGE_STREAM if "SendRecv" in name else COMPUTE_STREAM
                connection.execute(
                    "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, 1, ?, ?, ?, ?, ?)",
                    (start, end, rank, stream, correlation, process, names[name], names[name]),
                )
    connection.executemany("INSERT INTO StringIds VALUES (?, ?)", [(number, name) for name, number in names.items()])
    connection.commit()
    connection.close()
    return path


def host_traces(subject, *, num_steps=2, prefix="pipeproof:"):
    """By rank, the trace of a run on processors, where gloo moves messages and a host waits for them.

    With another prefix, the wait for the message is in the range of the computation, as PyTorch's runtime has it. A
    post takes a nanosecond, and a computation begins ``POSTS_NS`` later than simulated.
    """
    timeline = simulate(subject.plan).timeline
    length = int(1000 * timeline.makespan_us) + 1000
    traces = {}
    for rank in range(subject.graph.num_ranks):
        by_op = {span.op: span for span in timeline.spans if span.rank == rank}
        order = [subject.graph.ops[i] for i in subject.graph.rank_ops(rank)]
        events = []
        for offset in range(0, num_steps * length, length):
            now = posted = offset
            for op in order:
                span = by_op.get(str(op))
                if span is None:
                    continue
                start, end = (offset + int(1000 * timeline.us(time)) for time in (span.start, span.end))
                if op.kind in SEND_KINDS | RECV_KINDS:
                    posted = max(now, posted) + 2
                    events.append(_complete("user_annotation", f"{prefix}{op}", 1, MAIN, posted, posted + 1, {}))
                    name = "gloo:send" if op.kind in SEND_KINDS else "gloo:recv"
                    events.append(_complete("user_annotation", name, 1, MAIN, posted, max(posted, end), {}))
                elif op.kind in COMPUTE_KINDS:
                    start += POSTS_NS
                    begin = start if prefix == "pipeproof:" else max(now, posted + 1)
                    events.append(_complete("user_annotation", f"{prefix}{op}", 1, MAIN, begin, end, {}))
                    events.append(_complete("cpu_op", "aten::mm", 1, MAIN, start, end, {}))
                    now = end
                elif op.kind == "WAIT" and prefix == "pipeproof:":
                    begin = max(now, posted + 1)
                    now = max(begin + 1, end)
                    events.append(_complete("user_annotation", f"{prefix}{op}", 1, MAIN, begin, now, {}))
        traces[rank] = {
            "deviceProperties": [],
            "distributedInfo": {"backend": "gloo", "rank": rank},
            "host_name": "node",
            "traceEvents": events,
        }
    return traces
