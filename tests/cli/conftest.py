"""Plan files, and a guard that tells when real work begins."""

import pytest

from tests.plans import plan_file


@pytest.fixture
def write(tmp_path):
    """Write a plan of the given sections; its path."""

    def write_plan(**sections):
        return plan_file(tmp_path / "plan.json", **sections)

    return write_plan


@pytest.fixture
def good(write):
    return write()


@pytest.fixture
def refused(write):
    return write(topology={"pp": 2, "tp": 2, "sequence_parallel": True}, transport="partial")


@pytest.fixture
def started(monkeypatch):
    """The real work that was begun, in order: simulating and running are replaced and do nothing."""
    import pipeproof.exec.launch.run_console
    import pipeproof.sim.simulate

    begun = []

    def fake(name):
        def begin(*arguments, **keywords):
            begun.append(name)
            raise AssertionError(f"{name} was begun")

        return begin

    monkeypatch.setattr(pipeproof.sim.simulate, "simulate", fake("simulate"))
    monkeypatch.setattr(pipeproof.exec.launch.run_console, "run_command", fake("run"))
    return begun
