"""Writes ``tests/schedule/files/*.csv`` with the installed PyTorch, by its own ``_dump_csv``.

Run it with the PyTorch that ``make test-torch`` installs::

    python tests/schedule/make_torch_files.py

``test_against_torch.py`` compares the files with the output of this script.
"""

from pathlib import Path
from types import SimpleNamespace

FILES = Path(__file__).parent / "files"

SCHEDULES = {
    "zero_bubble_2x2": ("ScheduleInterleavedZeroBubble", 2, 2, 4),
    "zbv_2x2": ("ScheduleZBVZeroBubble", 2, 2, 4),
    "dualpipe_v_4x2": ("ScheduleDualPipeV", 4, 2, 10),
    "interleaved_4x2": ("ScheduleInterleaved1F1B", 4, 2, 8),
}
"""Name of the file to class, ranks, stages on each rank, micro-batches."""

FORMATS = {"": "compute_only", "_comms": "compute_comms"}
"""End of the file name to PyTorch's name of the format."""


def theirs(class_name, num_ranks, num_local_stages, num_micro_batches):
    """A schedule of PyTorch's, made as rank 0 makes it, from stages that hold nothing."""
    import torch
    from torch.distributed.pipelining import schedules

    def stage(index):
        return SimpleNamespace(
            stage_index=index,
            num_stages=num_ranks * num_local_stages,
            group_rank=0,
            group_size=num_ranks,
            submod=torch.nn.Identity(),
        )

    make = getattr(schedules, class_name)
    v_shaped = class_name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
    last = num_ranks * num_local_stages - 1
    indices = (0, last) if v_shaped else range(0, last + 1, num_ranks)
    return make([stage(index) for index in indices], num_micro_batches, loss_fn=lambda output, target: output)


def write_all(folder):
    for name, arguments in SCHEDULES.items():
        schedule = theirs(*arguments)
        for ending, form in FORMATS.items():
            schedule._dump_csv(str(folder / f"{name}{ending}.csv"), format=form)


if __name__ == "__main__":
    write_all(FILES)
