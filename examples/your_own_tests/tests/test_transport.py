"""The reason to keep slices off: their effect on the layouts of this project."""

from pipeproof.testing import check_transport

ACTIVATION = (32, 2, 64)  # sequence, rows, hidden


def test_with_sequence_parallelism_only_whole_tensors_arrive():
    by_sequence = "sharded(0)"
    assert check_transport(by_sequence, by_sequence, "full", ACTIVATION, tp=2)
    lossy = check_transport(by_sequence, by_sequence, "partial", ACTIVATION, tp=2)
    assert (lossy.num_lost, lossy.num_elements) == (2048, 4096)
    assert "rank 2 loses elements 1024..2048 of rank 0" in str(lossy)


def test_without_it_slices_are_right_and_halve_what_is_sent():
    full, partial = (check_transport("invariant", "invariant", way, ACTIVATION, tp=2) for way in ("full", "partial"))
    assert full
    assert partial
    assert partial.num_bytes == full.num_bytes / 2
