"""Uses of buffers as ``pipeproof/verify/lifetime/buffer_uses.py`` defines them, one operation at a time.

The columns must agree with it. A buffer is a tuple here: its owner, and its role there.
"""

from collections import defaultdict

from pipeproof.schedule.op_table import NONE
from pipeproof.schedule.ops import COLLECTIVE_KINDS, COMPUTE_KINDS, COPY_KINDS, GATHER_KINDS, RECV_KINDS, OpKind
from pipeproof.verify.lifetime.tensor_buffers import FREES, READS, WRITES

F, B, W = OpKind.FORWARD, OpKind.BACKWARD, OpKind.BACKWARD_WEIGHT
BI = OpKind.BACKWARD_INPUT
DIRECTIONS = {
    "forward": (OpKind.RECV_FORWARD, OpKind.GATHER_FORWARD, OpKind.SLICE_FORWARD, OpKind.SEND_FORWARD, (F,), -1),
    "backward": (OpKind.RECV_BACKWARD, OpKind.GATHER_BACKWARD, OpKind.SLICE_BACKWARD, OpKind.SEND_BACKWARD, (B, BI), 1),
}


def defined_uses(graph):
    """``{buffer: {op: (bits, op whose done ends the use)}}``."""
    uses = _Uses(graph)
    for direction in DIRECTIONS:
        uses.arriving(direction)
        uses.leaving(direction)
    if not uses.is_plain:
        uses.kept()
    uses.named()
    uses.freed()
    if not uses.is_plain:
        uses.persistent()
    return uses.found


class _Uses:
    def __init__(self, graph):
        self.graph, self.found = graph, defaultdict(dict)
        self.kinds = [op.kind for op in graph.ops]
        self.is_plain = all(
            kind not in COPY_KINDS | {OpKind.FREE, OpKind.UNSHARD, OpKind.RESHARD}
            and graph.queue[i] <= 0
            and graph.batch[i] == NONE
            for i, kind in enumerate(self.kinds)
        )

    def use(self, buffer, op, bits, end=None):
        """Note a use; several uses of one buffer by one operation add up."""
        before, _ = self.found[buffer].get(op, (0, op))
        self.found[buffer][op] = before | bits, op if end is None else end

    def place(self, op, step=0):
        """(rank, stage, work item) of an operation, or of the stage after or before it."""
        return int(self.graph.rank[op]), int(self.graph.stage[op]) + step, int(self.graph.work_item[op])

    def of(self, *kinds, place=None):
        """Operations of the kinds on micro-batches, at a place."""
        return [
            op
            for op, kind in enumerate(self.kinds)
            if kind in kinds and self.graph.work_item[op] != NONE and place in (None, self.place(op))
        ]

    def boundary(self, op, direction):
        """The memory that a message fills: messages of one tensor that no gather joins fill parts of it."""
        graph, tensor = self.graph, int(self.graph.tensor[op])
        joined = any(graph.tensor[gather] == tensor for gather in self.of(*GATHER_KINDS))
        part = int(graph.start[op]) if self.kinds[op] in RECV_KINDS and not joined else 0
        return "boundary", self.place(op), direction, tensor, part

    def arriving(self, direction):
        recv, gather, _, _, consumers, step = DIRECTIONS[direction]
        recvs, gathers = self.of(recv), self.of(gather)
        joined = {self.boundary(op, direction) for op in gathers}
        arrived = [(op, self.boundary(op, direction)) for op in recvs if self.boundary(op, direction) not in joined]
        for op in recvs:
            self.use(self.boundary(op, direction), op, WRITES)
        for op in gathers:
            self.use(self.boundary(op, direction), op, READS)
            self.use(("whole", self.place(op), direction), op, WRITES)
            arrived.append((op, ("whole", self.place(op), direction)))
        for op, buffer in arrived:
            readers = [consumers]
            if not self.is_plain:
                readers += [(W,)] if direction == "backward" else [(B,), (BI,), (W,)]
            for kinds in readers:
                for user in self.of(*kinds, place=self.place(op))[:1]:
                    self.use(buffer, user, READS)
        for op in self.of(*consumers):  # the output of the neighbouring stage of the same rank
            if not self.of(recv, place=self.place(op)) and self.of(*consumers, place=self.place(op, step)):
                self.use(("made", self.place(op, step), direction), op, READS)

    def leaving(self, direction):
        _, _, slicer, send, makers, _ = DIRECTIONS[direction]
        cut = {self.boundary(op, direction) for op in self.of(slicer)}
        for op in self.of(*makers):
            self.use(("made", self.place(op), direction), op, WRITES)
        for op in self.of(slicer):
            self.use(("made", self.place(op), direction), op, READS)
            self.use(self.boundary(op, direction), op, WRITES)
        for op in self.of(send):
            boundary = self.boundary(op, direction)
            self.use(boundary if boundary in cut else ("made", self.place(op), direction), op, READS)

    def kept(self):
        for op in self.of(F):
            self.use(("kept", self.place(op)), op, WRITES)
        for op in self.of(OpKind.OFFLOAD):
            self.use(("kept", self.place(op)), op, READS)
            self.use(("host", self.place(op)), op, WRITES)
        for op in self.of(OpKind.RELOAD):
            self.use(("host", self.place(op)), op, READS)
            self.use(("reloaded", self.place(op)), op, WRITES)
        for op in self.of(B, BI, W):
            name = "reloaded" if self.of(OpKind.RELOAD, place=self.place(op)) else "kept"
            self.use((name, self.place(op)), op, READS | WRITES if self.kinds[op] is BI else READS)

    def named(self):
        graph = self.graph
        for op in range(graph.num_ops):
            row, rank = graph.row(op), int(graph.rank[op])
            for bits, names in ((READS, row.reads), (WRITES, row.writes), (FREES, row.frees)):
                for name in names:
                    base, _, at = name.rpartition("@")
                    is_abroad = base != "" and at.isdecimal() and int(at) < graph.num_ranks
                    holder, own = (int(at), base) if is_abroad else (rank, name)
                    members = graph.members_of(op) if self.kinds[op] in COLLECTIVE_KINDS else ()
                    end = next((member for member in members if graph.rank[member] == holder), op)
                    self.use(("named", holder, own), op, bits, end if holder != rank else op)

    def freed(self):
        used = {buffer: dict(by_op) for buffer, by_op in self.found.items()}
        for op, kind in enumerate(self.kinds):
            if kind is not OpKind.FREE:
                continue
            same = [other for other in self.graph.rank_ops(int(self.graph.rank[op])) if self._is_target(op, other)]
            earlier = [other for other in same if other < op]
            for target in earlier[-1:] or same[:1]:
                for buffer, by_op in used.items():
                    if target in by_op and (self.kinds[target] not in COPY_KINDS or by_op[target][0] & READS):
                        self.use(buffer, op, FREES)

    def _is_target(self, free, other):
        named, op = self.graph.ops[free].target, self.graph.ops[other]
        return op.target is None and op == named

    def persistent(self):
        sharded = {OpKind.UNSHARD, OpKind.RESHARD} & {*self.kinds}
        gather = WRITES if sharded else READS | WRITES
        does = {
            **{adder: [("gradient", READS | WRITES)] for adder in (B, W, OpKind.REDUCE_GRAD, OpKind.SCALE_GRAD)},
            OpKind.UNSHARD: [("weights", WRITES)],
            OpKind.RESHARD: [("weights", FREES)],
            OpKind.STEP: [("gradient", READS), *([] if sharded else [("weights", WRITES)])],
            OpKind.GATHER_WEIGHT: [("weights", gather)],
        }
        below = {OpKind.REDUCE_GRAD: ("gradient", READS | WRITES), OpKind.GATHER_WEIGHT: ("weights", gather)}
        for op, kind in enumerate(self.kinds):
            owner = int(self.graph.rank[op]), int(self.graph.stage[op])
            uses = [*does.get(kind, ()), *([("weights", READS)] if kind in COMPUTE_KINDS else ())]
            parent = int(self.graph.parent[op])
            if parent != NONE and self.kinds[parent] in below:
                uses.append(below[self.kinds[parent]])
            for name, bits in uses:
                self.use((name, *owner), op, bits)
