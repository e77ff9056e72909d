"""A tensor of the graph names the boundary member that it is."""

from __future__ import annotations

from tests.plans import subject


def test_positions_lead_to_the_described_boundaries():
    boundaries = [{"name": "hidden", "dims": "sbh"}, {"name": "mask", "dims": "sbh", "gradient": False}]
    schedule = {"num_micro_batches": 3, "last_micro_batch_size": 1, "micro_batch_size": 2}
    for sections in ({}, {"schedule": schedule}, {"boundaries": boundaries}):
        plan = subject(topology={"pp": 2}, **sections).plan
        for tensor in plan.graph.tensors:
            edge, variant, member = tensor.position
            boundary = plan.edges[edge].variants[variant][member]
            assert (tensor.dtype, tensor.dims, tensor.member) == (boundary.dtype, boundary.dims, boundary.member)
            side = tensor.name.split()[0]
            assert tensor.shape == boundary.local_shape_at(at_sender=side == "output")
            assert int(tensor.name.rpartition(" ")[2]) == (edge if side == "output" else edge + 1)
