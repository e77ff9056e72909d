"""Right and wrong of a program with named buffers, by executing it: each result is the tuple of all that it comes from.

A program is right if every send, forward, backward and optimizer step finds
the same values as in the program without names, whose tensors are where their
kinds say. Ranks alternate; a receive waits for its message.
"""

from collections import defaultdict

from pipeproof.schedule.ops import OpKind

STEPS = 2


def is_right(rows_by_rank, intended):
    """True if the values with names equal the values of the intended program without names, in two steps in a row."""
    return values_of(rows_by_rank, use_names=True) == values_of(intended, use_names=False)


def values_of(rows_by_rank, *, use_names):
    """The values that each rank's sends, computations and optimizer steps read, in order."""
    machines = [_Rank(number, use_names) for number in range(len(rows_by_rank))]
    channels = defaultdict(list)
    for step in range(STEPS):
        todo = [list(rows) for rows in rows_by_rank]
        while any(todo):
            moved = False
            for machine, rows in zip(machines, todo, strict=True):
                while rows and machine.execute(rows[0], channels, step):
                    rows.pop(0)
                    moved = True
            assert moved, "a deadlock"
    return [machine.seen for machine in machines]


class _Rank:
    def __init__(self, number, use_names):
        self.number, self.use_names = number, use_names
        self.memory, self.seen = {}, []

    def get(self, names, tensor):
        """The value under the first name that holds ``tensor`` as an operation expects it, else where its kind says."""
        if self.use_names and names:
            return self.memory.get(names[0], "nothing")
        return self.memory.get(tensor, "nothing")

    def put(self, names, tensor, value):
        for name in names if self.use_names and names else (tensor,):
            self.memory[name] = value

    def execute(self, row, channels, step):
        op = row.op
        stage, item = op.stage, op.micro_batch
        match op.kind:
            case OpKind.RECV_FORWARD | OpKind.RECV_BACKWARD:
                queue = channels[op.kind, row.peer, self.number]
                if not queue:
                    return False
                self.put(row.writes, (op.kind, stage, item), queue.pop(0))
            case OpKind.SEND_FORWARD | OpKind.SEND_BACKWARD:
                forward = op.kind is OpKind.SEND_FORWARD
                value = self.get(row.reads, ("out" if forward else "gin", stage, item))
                self.seen.append(value)
                receive = OpKind.RECV_FORWARD if forward else OpKind.RECV_BACKWARD
                channels[receive, self.number, row.peer].append(value)
            case OpKind.FORWARD:
                data = self.get(row.reads, (OpKind.RECV_FORWARD, stage, item)) if stage else ("data", step, item)
                self.seen.append(data)
                # One value for the output and the saved tensors: no name states which of them a buffer holds.
                self.put(row.writes[:1], ("out", stage, item), ("F", stage, data))
                self.put(row.writes[1:], ("kept", stage, item), ("F", stage, data))
            case OpKind.BACKWARD:
                # reads: saved tensors, the sum, then the gradient; writes: the sum, the gradient of the input
                kept = self.get(row.reads[:1], ("kept", stage, item))
                data = (
                    kept[2] if isinstance(kept, tuple) and kept[:2] == ("F", stage) else kept
                )  # the input serves as well
                grad = self.get(row.reads[2:], (OpKind.RECV_BACKWARD, stage, item))
                self.seen.append((data, grad, self._foreign(row, (kept, data, grad))))
                made = ("B", stage, data, grad)
                self.put(row.writes[:1], ("sum", stage), sorted([*self._earlier(row, kept), made], key=repr))
                self.put(row.writes[1:], ("gin", stage, item), made)
            case OpKind.SCALE_GRAD:
                self.put(row.writes, ("sum", stage), 0)
            case OpKind.STEP:
                total = self.get(row.reads, ("sum", stage))
                self.seen.append(total)
        return True

    def _earlier(self, row, kept):
        """The sum that a backward adds to: empty if it only writes the buffer, or writes over the activation."""
        if self.use_names and row.writes and row.writes[0] not in row.reads:
            return []
        total = self.get(row.writes[:1], ("sum", row.op.stage))
        if isinstance(total, list):
            return total
        return [] if total in ("nothing", 0, kept) else ["unwanted"]

    def _foreign(self, row, own):
        """The values that a backward reads where it adds, if it does not write there and they are not its own."""
        names = row.reads[1:2] if self.use_names and row.reads[1:2] != row.writes[:1] else ()
        return [value for name in names if (value := self.memory.get(name, "nothing")) not in own]
