"""Every stage cut runs, also with empty layers: bitwise the reference, and with PP alone the unpartitioned model."""

import pytest

from tests.plans import subject

pytestmark = [pytest.mark.needs_paddle, pytest.mark.usefixtures("paddle_started")]

SP = {"tp": 2, "sequence_parallel": True}
ENDS = {"empty_layers": {"head": 1, "tail": 2}}
MIDDLE = [["embed", "empty.0", "layer.0", "layer.1"], ["layer.2", "layer.3"], ["empty.1"], ["empty.2", "norm", "head"]]
ALONE = [["embed"], ["empty.0"], ["layer.0", "layer.1", "layer.2", "layer.3", "empty.1"], ["empty.2", "norm"], ["head"]]
BY_CLASS = "layer:TransformerLayer|EmptyLayer"
V = {"kind": "zb_v", "num_chunks": 2}
FILLED = {"empty_layers": {"head": 1, "tail": 3}, "final_norm": "before_tail_empty"}
PLANS = {
    "in the middle": ({"pp": 4}, {}, {"stages": MIDDLE}),
    "split backward": ({"pp": 4}, {"kind": "zb_h1"}, {"stages": MIDDLE}),
    "embedding and head alone": ({"pp": 5}, {}, {"stages": ALONE}),
    "chunks": ({"pp": 2}, {"kind": "interleaved", "num_chunks": 2}, {"stages": MIDDLE}),
    "v": ({"pp": 2}, V, {"stages": MIDDLE}),
    "everything again": ({"pp": 4}, {"kind": "zb_h1"}, {"stages": MIDDLE, "memory": {"recompute": "full"}}),
    "slots": ({"pp": 4}, {}, {"stages": MIDDLE, "buffers": {"receive_slots": 4, "free_output": "after_send_done"}}),
    "clipped": ({"pp": 4}, {}, {"stages": MIDDLE, "run": {"clip_norm": 0.05}}),
    "uniform": ({"pp": 3}, {}, {"stages": "uniform"}),
    "even": ({"pp": 4}, {"kind": "gpipe"}, {}),
    "residual streams": ({"pp": 2}, V, {"stages": BY_CLASS, "model": {**FILLED, "hyper_connections": {"streams": 2}}}),
    "tokens further on": ({"pp": 2}, V, {"stages": BY_CLASS, "model": {**FILLED, "mtp": {"num_modules": 2}}}),
}
IN_PARALLEL = {
    "tp, partial": ({"pp": 4, "tp": 2}, {}, {"stages": MIDDLE, "transport": {"forward": "partial"}}),
    "sp": ({"pp": 4, **SP}, {}, {"stages": MIDDLE}),
    "dp": ({"pp": 4, "dp": 2}, {}, {"stages": MIDDLE}),
    "shared-out optimizer": ({"pp": 4, "dp": 2}, {}, {"stages": MIDDLE, "memory": {"shard_optimizer": "dp"}}),
    "copies": ({"pp": 4}, {"kind": "dualpipe", "num_micro_batches": 8}, {"stages": MIDDLE}),
    "sequence splits": ({"pp": 4}, {"kind": "seq1f1b", "num_sequence_splits": 2}, {"stages": MIDDLE}),
    "tied": ({"pp": 4}, {}, {"stages": MIDDLE, "model": {"tied_embedding": True}}),
}


def lowered(topology, schedule, others, **model):
    sections = {**others, "model": {**ENDS, **others.get("model", {}), **model}}
    return subject(topology=topology, schedule=schedule, **sections).unfolded().plan


@pytest.mark.parametrize("name", PLANS)
def test_the_reference_is_the_unpartitioned_model(name):
    from tests.exec.in_memory import compared

    steps = compared(lowered(*PLANS[name]))
    assert len(steps) == 2
    for step in steps:
        assert step.bitwise
        assert step.unpartitioned_loss.tobytes() == step.loss.tobytes()
        assert max(one.unpartitioned_max_rel_diff for one in step.gradients) == 0.0


@pytest.mark.parametrize("name", IN_PARALLEL)
def test_it_has_the_bits_of_the_reference(name):
    from tests.exec.in_memory import compared

    assert all(step.bitwise for step in compared(lowered(*IN_PARALLEL[name])))


@pytest.mark.slow
def test_twenty_steps_of_adamw_at_every_position_of_the_norm():
    from tests.exec.in_memory import compared

    last = {}
    for place in ("after_tail_empty", "before_tail_empty"):
        others = {"stages": BY_CLASS, "run": {"steps": 20}}
        empty = {"head": 1, "tail": 1}
        plan = lowered({"pp": 2}, {"num_micro_batches": 2}, others, num_layers=2, empty_layers=empty, final_norm=place)
        assert [names[-1] for names in plan.stages] == ["layer.0", "head"]
        steps = compared(plan)
        assert len(steps) == 20
        assert all(step.bitwise and step.unpartitioned_loss == step.loss for step in steps)
        last[place] = steps[-1]
    one, other = last.values()
    assert one.loss.tobytes() == other.loss.tobytes()
    assert {g.name: g.md5 for g in one.gradients} == {g.name: g.md5 for g in other.gradients}


def test_a_record_shows_what_empty_layers_hand_on():
    from pipeproof.stages.describe.layer_records import LayerWatch
    from pipeproof.stages.reference.unpartitioned import run_unpartitioned

    for place, before in (("after_tail_empty", "layer.3"), ("before_tail_empty", "norm")):
        plan = lowered({"pp": 4}, {}, {"stages": "uniform"}, final_norm=place).spec
        watch = LayerWatch()
        next(run_unpartitioned(plan, watch))
        seen = watch.take()
        for empty, giver in (("empty.0", "embed"), ("empty.1", before)):
            made = seen[f"{giver}/forward/output/0/0"]
            for side in ("input", "output"):
                assert (seen[f"{empty}/forward/{side}/0/0"] == made).all()
                assert seen[f"{empty}/backward/{side}/0/0"].any()
