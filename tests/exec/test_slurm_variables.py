"""Slurm's node lists and task counts, against an inverse that enumerates."""

import re
from itertools import groupby, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeproof.exec.store.launcher_table import expand_hosts, first_host, port_of_step, tasks_on_node

NAMES = st.builds(
    lambda prefix, width, number, suffix: f"{prefix}{number:0{width}d}{suffix}",
    st.sampled_from(["node", "gpu-", "r2n", "a.b"]),
    st.integers(1, 4),
    st.integers(0, 1200),
    st.sampled_from(["", "", "-ib", "x"]),
)


def compressed(hosts):
    """A node list of these hosts in their order, by trying every run of neighbours."""
    split = [re.fullmatch(r"(.*?)(\d+)(\D*)", host).groups() for host in hosts]
    parts = []
    for (prefix, suffix), group in groupby(split, key=lambda part: (part[0], part[2])):
        digits, ranges = [number for _, number, _ in group], []
        while digits:
            low = digits[0]
            size = 1
            while size < len(digits) and digits[size] == f"{int(low) + size:0{len(low)}d}":
                size += 1
            ranges.append(low if size == 1 else f"{low}-{digits[size - 1]}")
            digits = digits[size:]
        parts.append(f"{prefix}[{','.join(ranges)}]{suffix}")
    return ",".join(parts)


@given(st.lists(NAMES, min_size=1, max_size=12))
def test_a_compressed_list_expands_to_its_hosts(hosts):
    assert list(expand_hosts(compressed(hosts))) == hosts
    assert list(expand_hosts(",".join(hosts))) == hosts
    assert first_host(compressed(hosts)) == hosts[0]


@given(st.integers(0, 300), st.integers(0, 300), st.integers(1, 4))
def test_a_range_has_each_number_between_its_ends_at_the_width_of_the_first(low, length, width):
    text = f"n[{low:0{width}d}-{low + length}]"
    assert list(expand_hosts(text)) == [f"n{str(number).zfill(width)}" for number in range(low, low + length + 1)]


def test_examples_of_slurms_manual():
    assert list(expand_hosts("node[01-03,7],gpu-a")) == ["node01", "node02", "node03", "node7", "gpu-a"]
    assert list(expand_hosts("r[1-2]n[09-10]-ib")) == ["r1n09-ib", "r1n10-ib", "r2n09-ib", "r2n10-ib"]
    assert list(islice(expand_hosts("n[0-999999999999]"), 2)) == ["n0", "n1"]


@pytest.mark.parametrize(
    "text", ["", ",", "a,", "a,,b", "n[1-2", "n1-2]", "n[]", "n[2-1]", "n[1-]", "n[a-b]", "n[1,[2]]", "a b", "n[1-2-3]"]
)
def test_other_texts_are_no_node_lists(text):
    with pytest.raises(ValueError, match=r"is no node list|has no range"):
        expand_hosts(text)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=5))
def test_the_tasks_of_each_node(runs):
    text = ",".join(str(tasks) if count == 1 else f"{tasks}(x{count})" for tasks, count in runs)
    per_node = [tasks for tasks, count in runs for _ in range(count)]
    assert [tasks_on_node(text, str(node)) for node in range(len(per_node))] == per_node
    with pytest.raises(ValueError, match="has no node"):
        tasks_on_node(text, str(len(per_node)))


@pytest.mark.parametrize("text", ["", "2(x3", "2x3", "2(x3),", "-1"])
def test_other_texts_are_no_lists_of_tasks(text):
    with pytest.raises(ValueError, match="no list of tasks"):
        tasks_on_node(text, "0")


@given(st.integers(0, 2**31), st.integers(0, 50))
def test_ports_are_below_those_that_linux_gives_away(job, step):
    assert 20_000 <= port_of_step(str(job), str(step)) < 30_000
    assert len({port_of_step(str(job + one), str(step)) for one in range(1000)}) == 1000
    assert len({port_of_step(str(job), str(step + one)) for one in range(1000)}) == 1000
