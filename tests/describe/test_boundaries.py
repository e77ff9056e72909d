"""Boundary tensors of each edge: the activation, declared tensors, micro-batches of other sizes."""

import pytest

from pipeproof.specs.axis_layout import INVARIANT, PARTIAL, REPLICATED, sharded
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.stages.describe.boundary import Boundary, work_item_sizes
from pipeproof.stages.describe.model_family import describe_boundaries, describe_boundary
from tests.plans import plan_dict, plan_spec


def edges(**sections):
    return describe_boundaries(plan_spec(**sections))


def test_without_any_the_activation_crosses_every_edge():
    spec = plan_spec(topology={"pp": 4, "tp": 2, "sequence_parallel": True})
    found = describe_boundaries(spec)
    assert len(found) == 3
    assert {edge.variants for edge in found} == {((describe_boundary(spec),),)}
    assert found[0].members(3) == (Boundary("sbh", (8, 2, 16), sharded(0), "float32", 2),)


def test_context_parallel_ranks_share_the_sequence():
    assert edges(topology={"pp": 2, "cp": 4})[0].members(0)[0].shape == (2, 2, 16)


def test_micro_batches_of_other_sizes():
    sections = {
        "schedule": {"num_micro_batches": 4, "seq_lengths": [8, 4, 8, 6], "last_micro_batch_size": 1},
    }
    (edge,) = edges(**sections)
    assert [edge.members(i)[0].shape for i in range(4)] == [(8, 2, 16), (4, 2, 16), (8, 2, 16), (6, 1, 16)]
    assert len(edge.variants) == 3
    sizes, by_micro_batch = work_item_sizes(plan_spec(**sections))
    assert [(size.seq_length, size.num_rows) for size in sizes] == [(8, 2), (4, 2), (6, 1)]
    assert by_micro_batch == (0, 1, 0, 2)


def test_declared_tensors_replace_the_activation_edge_by_edge():
    found = edges(
        topology={"pp": 4, "tp": 2},
        boundaries=[
            {"name": "hidden", "dims": "sbh", "tp": "sharded(s)"},
            {"name": "mask", "dims": "bs", "dtype": "bool", "tp": "replicated"},
            {"name": "extra", "dims": "x", "shape": [6], "edge": 1, "receiver_tp": "sharded(x)"},
        ],
    )
    assert [[member.member for member in edge.members(0)] for edge in found] == [
        ["hidden", "mask"], ["hidden", "mask", "extra"], ["hidden", "mask"],
    ]  # fmt: skip
    hidden, mask, extra = found[1].members(0)
    assert (hidden.tp, hidden.local_shape, hidden.has_gradient) == (sharded(0), (4, 2, 16), True)
    assert (mask.tp, mask.shape, mask.dtype, mask.has_gradient) == (REPLICATED, (2, 8), "bool", False)
    assert [extra.local_shape_at(at_sender=at_sender) for at_sender in (True, False)] == [(6,), (3,)]
    assert (extra.changes_layout, hidden.changes_layout) == (True, False)


def test_the_way_back_of_a_changed_layout_has_the_dual_layouts():
    tensor = Boundary("sh", (4, 2), INVARIANT, "float32", 2, "x", sharded(0))
    assert tensor.placement(at_sender=True, gradient=True) == INVARIANT
    assert [m[:3] for m in tensor.reshard(gradient=False)] == [(0, 0, 0), (1, 1, 4)]
    back = tensor.reshard(gradient=True)  # each rank of the stage after sends its part to both before
    assert [(m.sender, m.receiver, m.recv_start) for m in back] == [(0, 0, 0), (1, 0, 4), (0, 1, 0), (1, 1, 4)]
    assert Boundary("s", (4,), REPLICATED, "float32", 2).placement(at_sender=False, gradient=True) == PARTIAL
    assert not Boundary("s", (4,), INVARIANT, "float32", 1, "x", sharded(0)).changes_layout


def test_of_one_rank_all_layouts_are_the_same():
    (edge,) = edges(boundaries=[{"name": "x", "dims": "sbh", "tp": "sharded(s)", "receiver_tp": "sharded(h)"}])
    (tensor,) = edge.members(0)
    assert (tensor.tp, tensor.receiver_tp, tensor.changes_layout) == (INVARIANT, INVARIANT, False)


HIDDEN = {"name": "hidden", "dims": "sbh"}


@pytest.mark.parametrize(
    "sections",
    [
        {"boundaries": [{**HIDDEN, "edge": 0}]},
        {"topology": {"pp": 2, "tp": 2}, "boundaries": [{**HIDDEN, "tp": "replicated"}]},
        {"topology": {"pp": 2, "tp": 2}, "boundaries": [{**HIDDEN, "receiver_tp": "sharded(s)"}]},
        {
            "topology": {"pp": 2, "tp": 2},
            "boundaries": [{"name": "ids", "dims": "bs", "dtype": "int64", "receiver_tp": "replicated"}],
        },
        {"topology": {"pp": 4}, "boundaries": [{**HIDDEN, "edge": 0}, {**HIDDEN, "edge": 1}]},
        {"schedule": {"seq_lengths": [8, 2, 4, 6]}},
    ],
)
def test_what_is_right_near_the_mistakes_loads(sections):
    plan_from_dict(plan_dict(**sections))
