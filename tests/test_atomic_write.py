"""Files that appear whole or not at all."""

import pytest

from pipeproof.atomic_write import atomic_write


def test_a_file_is_replaced_at_the_end_of_the_block(tmp_path):
    path = tmp_path / "file.json"
    path.write_text("old")
    with atomic_write(path) as new:
        new.write_text("new")
        assert path.read_text() == "old"
        assert [*tmp_path.glob("*.json")] == [path]  # by which a job's files are copied
    assert path.read_text() == "new"
    assert [*tmp_path.iterdir()] == [path]


def test_an_error_in_the_block_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file.json"
    path.write_text("old")

    def fail():
        with atomic_write(path) as new:
            new.write_text("ne")
            raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        fail()
    assert path.read_text() == "old"
    assert [*tmp_path.iterdir()] == [path]
