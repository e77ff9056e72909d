"""The key ``transport.send_recv``: the table of the backend that it names, and the plans that it is refused in."""

import pytest

from pipeproof.comm.backends import backend_table, declared_backend
from pipeproof.diagnostics.source import PlanFileError
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.verify.certificate import backend_table_version, graph_digest
from tests.plans import plan_dict, subject

GPU = {"backend": "torch", "device": "gpu"}
COPIES = {"send_recv": "copy_engine"}


def test_the_plan_has_the_table_of_copy_engines():
    plain, copies = (declared_backend(plan_from_dict(plan_dict(run=GPU, transport=t)).spec) for t in ({}, COPIES))
    assert (plain.name, copies.name) == ("torch-nccl", "torch-copy-engine")
    assert (plain.send_completes, copies.send_completes) == ("rendezvous", "slots")
    assert copies.queue == plain.queue
    assert backend_table_version(plain) != backend_table_version(copies)


def test_the_key_changes_no_digest():
    plain, copies = (subject(run=GPU, transport=transport) for transport in ({}, COPIES))
    assert graph_digest(plain) == graph_digest(copies)


@pytest.mark.parametrize("run", [{"backend": "torch"}, {"backend": "paddle"}, {"backend": "paddle", "device": "gpu"}])
def test_other_frameworks_and_devices_are_refused(run):
    with pytest.raises(PlanFileError) as refusal:
        plan_from_dict(plan_dict(run=run, transport=COPIES))
    (finding,) = refusal.value.findings
    assert finding.code == "PP106"
    assert f"the plan has {run['backend']} on {run.get('device', 'cpu')}" in finding.message
    with pytest.raises(ValueError, match="on cpu with send_recv copy_engine; there are tables for paddle on cpu, "):
        backend_table("paddle", "cpu", "copy_engine")
