"""Memory of each rank over time, computed again without columns: an interval for each held tensor."""

from fractions import Fraction
from math import ceil

from pipeproof.schedule.op_table import NONE
from pipeproof.schedule.ops import COMPUTE_KINDS, RECV_KINDS, SEND_KINDS, OpKind
from pipeproof.specs.axis_layout import dtype_bytes
from pipeproof.stages.describe.model_family import stored_activations
from pipeproof.stages.describe.stage_memory import Lifetime, state_of_weights

FORWARDS = {OpKind.SEND_FORWARD, OpKind.RECV_FORWARD, OpKind.GATHER_FORWARD, OpKind.SLICE_FORWARD}


def intervals(lowered, timeline):
    """(rank, begin, end, bytes) of all that comes and goes; plans without slots, and with backwards."""
    graph = lowered.graph
    spans = {span.op_id: span for span in timeline.spans}
    last = max(span.end for span in timeline.spans)
    rows = [graph.row(op_id) for op_id in range(graph.num_ops)]
    place = {}
    for op_id, row in enumerate(rows):
        op = row.op
        place.setdefault((int(graph.rank[op_id]), op.kind, op.stage, op.micro_batch, op.split), op_id)
    freed = {
        (int(graph.rank[op_id]), row.op.stage, row.op.micro_batch, row.op.split): spans[op_id].start
        for op_id, row in enumerate(rows)
        if row.op.kind is OpKind.FREE
    }
    for rank in range(graph.num_ranks):
        host = Fraction(0)
        sent = {}
        for op_id in graph.rank_ops(rank):
            row, op, span = rows[op_id], rows[op_id].op, spans[op_id]
            if op.kind not in SEND_KINDS | RECV_KINDS:
                host = span.end
            unit = op.stage, op.micro_batch, op.split
            of_unit = {kind: spans[place[rank, kind, *unit]] for kind in COMPUTE_KINDS if (rank, kind, *unit) in place}
            forward, whole_backward = of_unit.get(OpKind.FORWARD), of_unit.get(OpKind.BACKWARD)
            i, w = (of_unit.get(kind, whole_backward) for kind in (OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT))
            if op.kind is OpKind.FORWARD:
                yield from activation(lowered, rank, int(graph.work_item[op_id]), op.stage, span, i, w)
            if row.tensor == NONE:
                continue
            item = dtype_bytes(graph.tensors[row.tensor].dtype)
            part, whole = (row.stop - row.start) * item, graph.tensors[row.tensor].numel * item
            used = forward.start if op.kind in FORWARDS else i.end
            if op.kind in RECV_KINDS:
                yield rank, host, used, part
            elif op.kind in (OpKind.GATHER_FORWARD, OpKind.GATHER_BACKWARD):
                yield rank, span.start, used, whole - part
            elif op.kind in SEND_KINDS:
                arrived = spans[int(graph.match[op_id])].end if graph.match[op_id] != NONE else last
                made = forward.end if op.kind in FORWARDS else i.end
                if op.kind in FORWARDS:
                    arrived = freed.get((rank, *unit), i.end)
                before = sent.get((op.kind, unit, row.tensor), (rank, made, made, whole))
                sent[op.kind, unit, row.tensor] = (rank, made, max(before[2], arrived), whole)
            elif op.kind in (OpKind.SLICE_FORWARD, OpKind.SLICE_BACKWARD):
                kind = OpKind.SEND_FORWARD if op.kind in FORWARDS else OpKind.SEND_BACKWARD
                yield rank, span.start, spans[int(graph.match[place[rank, kind, *unit]])].end, part
        yield from sent.values()


def activation(lowered, rank, unit, stage, forward, i, w):
    size = lowered.sizes[lowered.size_of_work_item[unit] if lowered.size_of_work_item else 0]
    lives = {
        Lifetime.TO_INPUT: (forward.start, i.end),
        Lifetime.TO_WEIGHT: (forward.start, w.end),
        Lifetime.IN_INPUT: (i.start, i.end),
        Lifetime.BETWEEN: (i.end, w.end),
    }
    held = stored_activations(lowered.spec, lowered.layers_of(stage), size)
    for life, (begin, end) in lives.items():
        for of_loss in (False, True):
            num_bytes = sum(one.num_bytes for one in held if one.lifetime is life and one.is_logits is of_loss)
            yield rank, begin, end, ceil(num_bytes)


def peaks(lowered, timeline):
    """By rank, the most bytes that are held at once."""
    entries = [entry for entry in intervals(lowered, timeline) if entry[1] < entry[2]]
    result = []
    for rank, global_rank in enumerate(lowered.graph.global_rank):
        pp = lowered.mesh.coords(global_rank)["pp"]
        stages = lowered.stages_of_rank(global_rank)
        states = [state_of_weights(lowered.spec, lowered.weights_of(stage, pp)) for stage in stages]
        always = sum(state.parameters + state.gradients + state.optimizer for state in states)
        mine = [entry[1:] for entry in entries if entry[0] == rank]
        at = {begin for begin, _, _ in mine}
        most = max((sum(b for begin, end, b in mine if begin <= time < end) for time in at), default=0)
        result.append(always + most)
    return result
