"""Slurm's task counts, against an inverse that enumerates."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeproof.exec.store.launcher_table import tasks_on_node


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=5))
def test_the_tasks_of_each_node(runs):
    text = ",".join(str(tasks) if count == 1 else f"{tasks}(x{count})" for tasks, count in runs)
    per_node = [tasks for tasks, count in runs for _ in range(count)]
    assert [tasks_on_node(text, str(node)) for node in range(len(per_node))] == per_node
    with pytest.raises(ValueError, match="has no node"):
        tasks_on_node(text, str(len(per_node)))


@pytest.mark.parametrize("text", ["", "2(x3", "2x3", "2(x3),", "-1"])
def test_other_texts_are_no_lists_of_tasks(text):
    with pytest.raises(ValueError, match="not a list of tasks"):
        tasks_on_node(text, "0")
