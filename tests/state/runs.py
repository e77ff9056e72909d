"""Runs in one process that save their state, or resume from it."""

from pipeproof.exec.rank.checkpointing import rank_shards, restore_state
from pipeproof.state.read_state import find_state
from pipeproof.state.resume_check import require_resumable
from pipeproof.state.write_state import finish_state, write_rank_state
from pipeproof.verify.certificate import graph_digest
from tests.plans import subject

MOE = {"num_experts": 4, "top_k": 2, "ffn_size": 8, "aux_loss": 0.1, "expert_bias_rate": 0.01}


def plan_of(backend="paddle", steps=2, topology=(), schedule=(), model=(), run=(), **more):
    return subject(
        topology={"pp": 2, **dict(topology)},
        schedule={"num_micro_batches": 4, "micro_batch_size": 1, **dict(schedule)},
        model={"num_layers": 4, "hidden_size": 8, "ffn_size": 8, "vocab_size": 16, "seq_length": 4, **dict(model)},
        run={"backend": backend, "steps": steps, "optimizer": "adamw", **dict(run)},
        **more,
    )


def save(at, root, adapters, arrays, steps_done=2):
    """Save the state of all ranks of a subject after so many steps."""
    for rank, adapter in enumerate(adapters):
        write_rank_state(root, steps_done, "job", rank, rank_shards(adapter, arrays, at.plan, rank))
    return finish_state(root, steps_done, "job", at.plan, graph_digest(at), "1.0")


def shown(outcomes):
    """All bits of all ranks' steps."""
    return [
        [
            (
                None if one.loss is None else one.loss.tobytes(),
                {name: array.tobytes() for name, array in one.gradients.items()},
                {name: array.tobytes() for name, array in one.routers.items()},
            )
            for one in of_step
        ]
        for of_step in outcomes
    ]


def require_same_on_resume(tmp_path, **changes):
    """Steps 0 to 3 in one run, and with an end and a new beginning after step 1: the same bits, and the same files."""
    from pipeproof.exec.rank.framework_choice import start_framework
    from tests.exec.in_memory import run_all

    whole, half = plan_of(steps=4, **changes), plan_of(steps=2, **changes)
    arrays = start_framework(whole.plan.spec.run).arrays
    expected, at_end = run_all(whole.plan)
    _, adapters = run_all(half.plan)
    save(half, tmp_path / "half", adapters, arrays)
    state = find_state(tmp_path / "half")
    require_resumable(state, whole.plan, graph_digest(whole))

    def prepare(adapter, arrays, rank):
        restore_state(adapter, arrays, whole.plan, rank, state.directory)

    outcomes, resumed = run_all(whole.plan, first_step=2, prepare=prepare)
    assert shown(outcomes[2:]) == shown(expected[2:])
    saved = [
        save(whole, tmp_path / name, adapters, arrays, 4) for name, adapters in (("one", at_end), ("two", resumed))
    ]
    names = sorted(path.name for path in saved[0].iterdir())
    assert len(names) == whole.plan.mesh.num_ranks + 1
    for name in names:
        assert (saved[0] / name).read_bytes() == (saved[1] / name).read_bytes(), name
