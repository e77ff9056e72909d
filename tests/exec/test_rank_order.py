"""Warnings about groups of ranks that a launcher put on several hosts."""

import pytest

from pipeproof.exec.launch.supervisor import Host
from pipeproof.exec.rehearse.rehearsal_report import split_groups
from tests.plans import subject

TOPOLOGY = {"pp": 2, "tp": 4, "dp": 2}


def test_consecutive_ranks_are_as_planned():
    assert split_groups(subject(topology=TOPOLOGY), [Host("a", (*range(8),)), Host("b", (*range(8, 16),))]) == ()


def test_round_robin_splits_groups_that_fit_on_a_host():
    hosts = [Host("a", (*range(0, 16, 2),)), Host("b", (*range(1, 16, 2),))]
    (finding,) = split_groups(subject(topology=TOPOLOGY), hosts)
    assert finding.code == "PP950"
    assert "ranks 0 and 1 of one tp group are on a and b" in finding.message
    assert "(12 such pairs)" in finding.message  # 4 groups of 4 ranks have 3 neighbours each


@pytest.mark.parametrize("sizes", [(2, 14), (1, 15), (16,)])
def test_a_group_that_fits_on_no_host_is_not_reported(sizes):
    first = sizes[0]
    hosts = [Host("a", (*range(first),)), Host("b", (*range(first, 16),))][: len(sizes)]
    assert split_groups(subject(topology=TOPOLOGY), hosts) == ()
