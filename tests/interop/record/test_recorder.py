"""The recorder counts only the program's own writes."""

from __future__ import annotations

import pytest

from pipeproof.interop.traces.recorder import Call, Recorder, Tensor
from pipeproof.interop.traces.trace_log import LoggedWait, read_logs


class Memory:
    """A framework's tensor: it counts its writes in place."""

    def __init__(self, start):
        self.start, self.version = start, 0

    def tensor(self):
        return Tensor((4,), "float32", (1,), self.start, self.start + 16, self.version, self)


@pytest.mark.parametrize(
    ("op", "written", "found"),
    [
        ("send", "input", True),
        ("recv", "output", True),
        ("all_gather", "input", True),
        ("all_gather", "output", False),  # gloo copies into it, from a thread of its own
        ("all_gather", "input in output", False),  # a view of the output has the output's count of writes
        ("all_reduce", "in place", True),
    ],
)
def test_writes_of_the_process_group_into_outputs_are_not_the_program_s_writes(tmp_path, op, written, found):
    inputs, outputs = Memory(0), Memory(64)
    if written == "input in output":
        inputs.start = 64
    if written == "in place":
        outputs = inputs
    recorder = Recorder(tmp_path, 0, 2, "torch 2", lambda memory: memory.version)
    recorder.group("0", [0, 1], "gloo", "")
    of_call = {"send": ((inputs.tensor(),), ()), "recv": ((), (outputs.tensor(),))}
    call = Call(op, "0", *of_call.get(op, ((inputs.tensor(),), (outputs.tensor(),))), peer=1)
    seq = recorder.call(call, None)
    recorder.issued(seq)
    (outputs if written == "output" else inputs).version += 1
    recorder.waits((seq,))
    recorder.done((seq,))
    recorder.close(None)
    (log,) = read_logs(tmp_path)
    (wait,) = [event for event in log.events if isinstance(event, LoggedWait)]
    assert wait.changed == ((seq,) if found else ())
