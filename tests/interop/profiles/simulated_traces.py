"""Files that a profiler would write of a run that took exactly the simulated times."""

from __future__ import annotations

import gzip
import json
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
    return AUTOGRAD if event.op is not None and event.op.kind in COMPUTE_KINDS - FORWARD_KINDS else MAIN


def kineto_of(events, rank, num_ranks):
    """The trace of one rank as PyTorch's profiler writes it."""
    lines, correlation = [], 1000
    for event in events:
        thread = thread_of(event)
        lines.append(_complete("user_annotation", event.name, 1, MAIN, event.start, event.end, {}))
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
        "deviceProperties": [{"id": 0, "name": "NVIDIA H100"}],
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


def write_kineto(folder, events, *, compress=False):
    files = []
    for rank, of_rank in events.items():
        text = json.dumps(kineto_of(of_rank, rank, len(events)), indent=1)
        path = folder / f"rank{rank}.json{'.gz' if compress else ''}"
        path.write_bytes(gzip.compress(text.encode()) if compress else text.encode())
        files.append(path)
    return files


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
