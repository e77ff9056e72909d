"""Work of processes that are killed. Its inputs are made once, at import, and not in each process."""

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from types import MappingProxyType

import rich.console

from pipeproof.cli.main import main
from pipeproof.diagnostics.text_output import render_text
from pipeproof.state.reshard import execute_reshard as carry
from pipeproof.state.reshard import meaning_proof as naming
from pipeproof.state.reshard import reshard_proof as proof
from pipeproof.state.reshard import reshard_targets as goals
from pipeproof.state.write_state import write_rank_state
from tests.plans import plan_dict
from tests.state.runs import MOE, plan_of
from tests.state.tiny import finish, values, written_by_rank

_SMALL = {"num_layers": 2, "vocab_size": 8}
PLANS = MappingProxyType(
    {
        "sharded": plan_of(
            steps=9, topology={"dp": 2}, memory={"shard_optimizer": "dp"}, model={**_SMALL, "tied_embedding": True}
        ),
        "experts": plan_of(steps=9, topology={"ep": 2}, model={**_SMALL, "moe": MOE}),
        "one": plan_of(steps=9, topology={"pp": 1}, model=_SMALL),
    }
)


TARGET = plan_dict(
    topology={"pp": 1, "tp": 2},
    schedule={"kind": "1f1b", "num_micro_batches": 8, "micro_batch_size": 1},
    model={"hidden_size": 8, "ffn_size": 8, "seq_length": 4, **_SMALL, "tied_embedding": True},
    run={"backend": "paddle", "steps": 9, "optimizer": "adamw"},
)
"""Target of a reshard of a state of `sharded`."""
IMPORTED = (rich.console, render_text, carry, goals, naming, proof)
"""Imports of a command, made before it runs: processes are forked from this one."""
_PARTS = MappingProxyType(
    {
        (name, steps_done, rank): written_by_rank(at.plan, rank, values(at.plan, steps_done))
        for name, at in PLANS.items()
        for steps_done in (1, 2)
        for rank in range(at.plan.mesh.num_ranks)
    }
)


def save_all(name, root, steps_done, job):
    """All ranks, one after the other."""
    for rank in range(PLANS[name].plan.mesh.num_ranks):
        _write(name, root, rank, steps_done, job)
    finish(PLANS[name], root, steps_done, job)


def save_rank(name, root, rank, steps_done, barrier):
    """One of the ranks that save together: as ``save_state`` of a run."""
    _write(name, root, rank, steps_done, "job")
    barrier.wait()
    if rank == 0:
        finish(PLANS[name], root, steps_done)


def _write(name, root, rank, steps_done, job):
    write_rank_state(root, steps_done, job, rank, _PARTS[name, steps_done, rank])


def write_target(path):
    path.write_text(json.dumps(TARGET))


def command(*words):
    """A command, as it is typed; it must succeed."""
    said, status = io.StringIO(), 0
    with redirect_stdout(said), redirect_stderr(said):
        try:
            main(list(map(str, words)), standalone_mode=False)
        except SystemExit as ended:
            status = ended.code
    assert not status, said.getvalue()
