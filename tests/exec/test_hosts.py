"""Hosts of launched ranks: ranks at the store, the host of each, refusals; directories of jobs."""

import dataclasses
import json
import re
import stat

import pytest

from pipeproof.exec.launch import supervisor as module
from pipeproof.exec.launch.supervisor import Host, JobEndedError, hosts_of, job_directory, make_directory
from pipeproof.exec.rehearse import external_launcher
from pipeproof.exec.store.agreement import Agreement
from pipeproof.exec.store.launcher_table import TORCHRUN, LaunchedRank
from pipeproof.exec.store.process_state import ProcessId
from pipeproof.exec.store.run_codes import NOT_TOGETHER
from tests.train.fake_store import FakeStore, on_ranks

LAUNCHED = LaunchedRank(TORCHRUN, 0, 4, 0, 4, ("10.0.0.1", 29500), "job", 0)
FACTS = {"the plan": "a" * 64, "options": "b"}


def met(num_ranks, come=None, facts=lambda rank: FACTS, patience_s=5.0):
    """Hosts or errors of the ranks that come, of all by default."""
    store, come, lines = FakeStore(), [*range(num_ranks)] if come is None else come, []

    def work(index):
        rank = come[index]
        agreement = Agreement(store, rank, num_ranks, patience_s + 5 * (rank > 0))
        with external_launcher._one_end(agreement, NOT_TOGETHER):
            return external_launcher._all_hosts(agreement, LAUNCHED, facts(rank), lines.append)

    return on_ranks(len(come), work), lines


def test_rank_0_knows_the_hosts_of_all_that_came():
    (first, *others), lines = met(3)
    assert [host.ranks for host in first] == [(0, 1, 2)]
    assert others == [(), ()]
    assert lines == []


def test_hosts_are_found_by_evidence_and_named_apart():
    machines = [("node", "boot1"), ("node", "boot2"), ("node", "boot1"), ("other", "boot3")]
    assert hosts_of(machines) == (Host("node", (0, 2)), Host("node.2", (1,)), Host("other", (3,)))


def test_a_rank_that_does_not_come_is_named_on_all_that_came(monkeypatch):
    monkeypatch.setattr(external_launcher, "_SHOW_S", 0.2)
    monkeypatch.setattr(external_launcher, "_LAST_S", 0.5)
    results, lines = met(4, come=[0, 3], patience_s=0.3)
    for result in results:
        assert isinstance(result, JobEndedError)
        assert result.findings[0].code == "PP947"
        text = "2 of 4 ranks did not come to the store at 10.0.0.1:29500 within 0.3 s: ranks 1, 2"
        assert text in result.findings[0].message
    assert lines == ["waiting for ranks 1, 2"]


def test_another_plan_on_one_host_is_named_with_both_hosts():
    results, _ = met(2, facts=lambda rank: FACTS | {"the plan": str(rank)})
    for result in results:
        assert isinstance(result, JobEndedError)
        assert "rank 1 on" in result.findings[0].message
        assert "the plan 1 and not 0" in result.findings[0].message


# --- the directory of a job ---


def directory_of(tmp_path, number):
    return tmp_path / f"pipeproof-{number:032x}"


def test_what_an_ended_job_left_is_removed_and_what_a_running_one_has_is_not(tmp_path):
    ended, running, made = (directory_of(tmp_path, number) for number in range(3))
    make_directory(ended)
    (ended / "rank0.log.json").touch()
    make_directory(running)
    begun = directory_of(tmp_path, 7)
    begun.mkdir()  # has no process yet
    elsewhere = directory_of(tmp_path, 8)  # a directory of temporary files that machines share
    make_directory(elsewhere)
    for directory, changes in ((ended, {}), (elsewhere, {"machine": "another machine"})):
        file = directory / module._PROCESS
        file.write_text(json.dumps({**json.loads(file.read_text()), "pid": 2**22 + 1, **changes}))
    (tmp_path / "pipeproof-of-a-user").mkdir()
    make_directory(made)
    assert sorted(tmp_path.iterdir()) == sorted([running, made, begun, elsewhere, tmp_path / "pipeproof-of-a-user"])
    assert made.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("taken", ["directory", "link"])
def test_a_directory_that_another_made_is_refused(taken, tmp_path):
    directory = directory_of(tmp_path, 1)
    (tmp_path / "elsewhere").mkdir()
    directory.mkdir() if taken == "directory" else directory.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        make_directory(directory)
    assert not any((tmp_path / "elsewhere").iterdir())


def test_the_directory_of_a_run_has_a_random_name_and_is_of_this_user_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with job_directory(None) as first, job_directory(None) as second:
        for directory in (first, second):
            assert directory.parent == tmp_path
            assert re.fullmatch(r"pipeproof-[0-9a-f]{32}", directory.name)
            assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert first != second


def test_a_number_that_is_used_again_is_another_process():
    own = ProcessId.own()
    assert own.is_alive
    assert not dataclasses.replace(own, started="1").is_alive
