"""Results of steps on disk: reads return the appended values, and the memory does not grow with the steps."""

import tracemalloc
from dataclasses import replace

import pytest

from pipeproof.exec.launch.run_plan import ResultsOnDisk
from tests.exec.test_compare import compared, cut, whole_gradients
from tests.plans import subject


def results(number):
    plan = subject(topology={"pp": 2, "tp": 2}).plan
    first = compared(plan, cut(plan, whole_gradients(plan)))
    return [replace(first, step=step) for step in range(number)]


def test_what_is_read_is_what_was_appended(tmp_path):
    expected, on_disk = results(5), ResultsOnDisk(tmp_path)
    for number, result in enumerate(expected):
        on_disk.append(result)
        assert on_disk[-1] == result
        assert list(on_disk) == expected[: number + 1]
    assert on_disk[1:4] == expected[1:4]
    assert on_disk[0].loss.tobytes() == expected[0].loss.tobytes()
    with pytest.raises(IndexError):
        on_disk[5]


def test_the_directory_may_be_removed_before_the_results_are_read(tmp_path):
    directory = tmp_path / "job"
    directory.mkdir()
    (expected,), on_disk = results(1), ResultsOnDisk(directory)
    on_disk.append(expected)
    directory.rmdir()  # also fails if the file has a name
    assert list(on_disk) == [expected]


def test_the_memory_does_not_grow_with_the_steps(tmp_path):
    first = results(1)[0]

    def grown(append):
        def many(number):
            for _ in range(number):
                append(replace(first, gradients=tuple(map(replace, first.gradients))))

        many(50)
        tracemalloc.start()
        many(500)
        size = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        return size

    in_memory = []
    assert grown(in_memory.append) > 8 * grown(ResultsOnDisk(tmp_path).append)
