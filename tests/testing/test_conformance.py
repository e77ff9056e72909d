"""The suite reads a backend's behaviour back row by row, and reports exactly the differences from its table."""

import dataclasses
from functools import partial
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.comm.backend_rows import BackendTable, RowValue
from pipeproof.comm.backends import backend_table
from pipeproof.testing.endpoint_protocol import MakeWorld
from pipeproof.testing.probes import PROBES, check_backend
from tests.testing.fake_backend import fake_world

TABLE = backend_table("paddle", "cpu")
TIMEOUT_S = 60.0
"""A fake world without a blocked probe is never quiet for so long, however busy the machine."""


def values_of(key: str) -> list[RowValue]:
    """Every value that a row can have, but one for the values that two ranks cannot tell apart."""
    row_type = get_type_hints(BackendTable)[key]
    values = [False, True] if row_type is bool else list(get_args(row_type))
    indistinct = sorted(map(str, next(probe for probe in PROBES if probe.key == key).look_alike - {"pair"}))
    return [value for value in values if value not in indistinct]


OTHER_VALUES = [
    (probe.key, value) for probe in PROBES for value in values_of(probe.key) if value != TABLE.value(probe.key)
]
FIRST_OTHER_VALUES = list(dict(reversed(OTHER_VALUES)).items())


def fake(**rows: Any) -> MakeWorld:
    """Makes worlds that follow the table but for these rows."""
    return partial(fake_world, dataclasses.replace(TABLE, **rows))


def test_every_row_that_two_ranks_can_observe_has_a_probe() -> None:
    assert [probe.key for probe in PROBES] == [row.key for row in TABLE.rows() if row.probed]


def test_a_faithful_backend_passes() -> None:
    results = check_backend(TABLE, fake(), timeout_s=TIMEOUT_S)
    assert [result.key for result in results] == [probe.key for probe in PROBES]
    assert [result for result in results if not result.ok] == []


@pytest.mark.parametrize(("key", "value"), FIRST_OTHER_VALUES)
def test_a_backend_that_violates_one_row_is_reported_for_that_row_alone(key: str, value: RowValue) -> None:
    results = check_backend(TABLE, fake(**{key: value}), timeout_s=TIMEOUT_S)
    differing = {result.key: result.observed for result in results if not result.ok}
    assert differing == {key: value}


@pytest.mark.parametrize(("key", "value"), OTHER_VALUES)
def test_each_value_of_each_row_is_told_apart(key: str, value: RowValue) -> None:
    (result,) = check_backend(TABLE, fake(**{key: value}), keys=[key], timeout_s=TIMEOUT_S)
    assert (result.expected, result.observed, result.ok) == (TABLE.value(key), value, False)


# Where posting blocks, no two transfers of an edge are ever under way at once, so their order shows nothing.
# The fake's other order is last in, first out; in a queue of several edges other operations would then block.
TABLES = st.fixed_dictionaries({probe.key: st.sampled_from(values_of(probe.key)) for probe in PROBES}).filter(
    lambda rows: rows["matching"] == "fifo" or (not rows["host_blocks_on_post"] and rows["queue"] == "directed_edge")
)


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(TABLES)
def test_the_table_of_any_backend_is_read_back(rows: dict[str, RowValue]) -> None:
    results = check_backend(TABLE, fake(**rows), timeout_s=TIMEOUT_S)
    assert {result.key: result.observed for result in results} == rows


@pytest.mark.parametrize("queue", ["pair", "communicator", "direction", "rank", "device"])
def test_a_shared_queue_is_observed_but_not_which(queue: str) -> None:
    table = dataclasses.replace(TABLE, queue=queue)
    (shared,) = check_backend(table, partial(fake_world, table), keys=["queue"], timeout_s=TIMEOUT_S)
    assert (shared.ok, shared.observed) == (True, queue)
    (free,) = check_backend(table, fake(), keys=["queue"], timeout_s=TIMEOUT_S)
    assert (free.ok, free.observed) == (False, "directed_edge")


def test_a_row_that_no_probe_observes_is_refused() -> None:
    with pytest.raises(ValueError, match="no probe observes max_batched_transfers; probes observe send_completes"):
        check_backend(TABLE, fake(), keys=["max_batched_transfers"])
