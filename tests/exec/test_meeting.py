"""Meeting of ranks at a store: who comes, who is on which host, and what is refused."""

import dataclasses
import json
import os
import re
import stat

import pytest

from pipeproof.diagnostics.finding import PipeproofError
from pipeproof.exec.launch import meeting as module
from pipeproof.exec.launch.hosts import Host, Identity, hosts_content, hosts_from, hosts_of, make_directory, ranks_text
from pipeproof.exec.launch.launched_rank import LaunchedRank
from pipeproof.exec.launch.meeting import JobEndedError, key_prefix, meet
from pipeproof.exec.launch.supervisor import job_directory
from pipeproof.exec.store.launcher_table import TORCHRUN
from pipeproof.exec.store.process_state import ProcessId
from tests.train.fake_store import FakeStore, on_ranks

FACTS = {"the plan": "a" * 64, "options": "b"}


def rank_of(rank, num_ranks, **changes):
    launched = LaunchedRank(TORCHRUN, rank, num_ranks, rank, num_ranks, 0, ("10.0.0.1", 29500), "job", 0)
    return dataclasses.replace(launched, **changes)


def met(num_ranks, come=None, facts=lambda rank: FACTS, patience_s=5.0, store=None):
    """Results of the ranks that come, of all by default."""
    store, come = store or FakeStore(), [*range(num_ranks)] if come is None else come

    def work(index):
        rank = come[index]
        return meet(rank_of(rank, num_ranks), store, facts(rank), patience_s, lambda line: None)

    return on_ranks(len(come), work)


def test_all_ranks_get_one_token_and_one_table():
    results = met(3)
    assert len({result.token for result in results}) == 1
    (host,) = results[0].hosts
    assert host.ranks == (0, 1, 2)
    assert [result.leads for result in results] == [True, False, False]
    assert {result.directory for result in results} == {results[0].directory}
    assert results[0].directory.name == f"pipeproof-{results[0].token}.0"
    assert results[2].local[1].process == Identity.own().process


def test_hosts_are_found_by_evidence_and_named_apart():
    own = Identity.own()
    places = [("node", "boot1"), ("node", "boot2"), ("node", "boot1"), ("other", "boot3")]
    identities = [dataclasses.replace(own, host=name, machine=machine) for name, machine in places]
    hosts = hosts_of(identities)
    assert hosts == (Host("node", (0, 2)), Host("node.2", (1,)), Host("other", (3,)))
    assert hosts_from(json.loads(json.dumps(hosts_content(hosts))), 4) == hosts


@pytest.mark.parametrize(
    "content",
    [
        None, 7, [{"name": "a"}], [{"name": "a", "ranks": [0]}], [{"name": "a", "ranks": [0, 0, 1]}],
        [{"name": "a\x1b[2J", "ranks": [0, 1]}], [{"name": "a", "ranks": [0, 1]}, {"name": "b", "ranks": []}],
    ],
)  # fmt: skip
def test_a_foreign_table_is_refused(content):
    with pytest.raises(ValueError, match="store"):
        hosts_from(content, 2)


def test_a_rank_that_does_not_come_is_named_on_all_that_came():
    results = met(4, come=[0, 3], patience_s=0.3)
    for result in results:
        assert isinstance(result, JobEndedError)
        assert result.status == 3
        assert result.findings[0].code == "PP947"
        assert "2 of 4 ranks did not come to the store within 0.3 s: ranks 1 to 2" in result.findings[0].message


def test_another_plan_on_one_host_is_named_with_both_hosts():
    results = met(2, facts=lambda rank: FACTS | {"the plan": str(rank)})
    for result in results:
        assert result.status == 2
        assert "rank 1 on" in result.findings[0].message
        assert "the plan 1 and not 0" in result.findings[0].message


def test_a_second_process_of_one_rank_is_refused_and_the_first_is_not_disturbed():
    store = FakeStore()
    results = met(2, store=store)
    with pytest.raises(PipeproofError, match="another process came as rank 1 of run `job`, attempt 0"):
        meet(rank_of(1, 2), store, FACTS, 1.0, lambda line: None)
    assert not any(isinstance(result, Exception) for result in results)


def test_a_restarted_attempt_has_keys_of_its_own():
    assert key_prefix(rank_of(0, 2)) == "pipeproof/job/0/"
    assert key_prefix(rank_of(0, 2, attempt=1)) == "pipeproof/job/1/"
    assert key_prefix(rank_of(0, 2, run_id="a/../b c")) == "pipeproof/a_.._b_c/0/"
    assert key_prefix(rank_of(0, 2, run_id="")) == "pipeproof/run/0/"


def test_a_token_that_is_no_token_names_no_file(monkeypatch):
    monkeypatch.setattr(module.secrets, "token_hex", lambda length: "../../home")
    results = met(2)
    assert "is not one of ours" in results[1].findings[0].message


@pytest.mark.parametrize(
    ("ranks", "text"), [([3], "rank 3"), ([0, 1, 2, 3, 8], "ranks 0 to 3, 8"), ([1, 3], "ranks 1, 3")]
)
def test_ranks_are_shown_as_ranges(ranks, text):
    assert ranks_text(ranks) == text


# --- the directory of a host ---


def directory_of(tmp_path, number):
    return tmp_path / f"pipeproof-{number:032x}.0"


def test_what_an_ended_job_left_is_removed_and_what_a_running_one_has_is_not(tmp_path):
    own = Identity.own()
    ended, running, made = (directory_of(tmp_path, number) for number in range(3))
    make_directory(ended, {0: dataclasses.replace(own, process=ProcessId(2**22 + 1, "1"))})
    (ended / "rank0.log.json").touch()
    make_directory(running, {0: own})
    assert not ended.exists()
    (tmp_path / "pipeproof-of-a-user").mkdir()
    begun = directory_of(tmp_path, 7)
    begun.mkdir()  # has no list of processes yet
    elsewhere = directory_of(tmp_path, 8)  # a directory of temporary files that machines share
    make_directory(elsewhere, {0: Identity("node-2", "another machine", ProcessId(2**22 + 1, "1"))})
    make_directory(made, {0: own})
    assert sorted(tmp_path.iterdir()) == sorted([running, made, begun, elsewhere, tmp_path / "pipeproof-of-a-user"])
    assert made.stat().st_mode & 0o777 == 0o700
    make_directory(made, {0: own})


def test_a_directory_that_others_can_read_is_refused(tmp_path):
    directory = directory_of(tmp_path, 1)
    directory.mkdir(mode=0o755)
    directory.chmod(0o755)
    with pytest.raises(PermissionError, match="not a directory of this user alone"):
        make_directory(directory, {})


def test_a_directory_of_another_user_is_refused(tmp_path, monkeypatch):
    directory = directory_of(tmp_path, 1)
    directory.mkdir(mode=0o700)
    make_directory(directory, {})
    another = directory.stat().st_uid + 1
    monkeypatch.setattr(os, "getuid", lambda: another)
    with pytest.raises(PermissionError, match="not a directory of this user alone"):
        make_directory(directory, {})


def test_a_link_in_place_of_a_directory_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    directory_of(tmp_path, 1).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="not a directory of this user alone"):
        make_directory(directory_of(tmp_path, 1), {})
    assert not any((tmp_path / "elsewhere").iterdir())


def test_the_directory_of_a_run_has_a_random_name_and_is_of_this_user_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with job_directory(None) as first, job_directory(None) as second:
        for directory in (first, second):
            assert directory.parent == tmp_path
            assert re.fullmatch(r"pipeproof-[0-9a-f]{32}\.0", directory.name)
            assert (directory.stat().st_uid, stat.S_IMODE(directory.stat().st_mode)) == (os.getuid(), 0o700)
        assert first != second


def test_a_number_that_is_used_again_is_another_process():
    own = ProcessId.own()
    assert own.is_alive
    assert not dataclasses.replace(own, started="1").is_alive
