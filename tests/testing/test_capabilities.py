"""Backend tables: complete, with a source for every row, and the source of nothing else's identity."""

import dataclasses
from typing import Any, get_args, get_type_hints

import pytest

from pipeproof.comm.backend_rows import BackendTable, Row, behaviours
from pipeproof.comm.backends import TABLES, backend_table

TABLE = backend_table("paddle", "cpu")


def test_the_rows_that_deadlock_rules_read() -> None:
    assert TABLE.name == "paddle-gloo"
    assert (TABLE.send_completes, TABLE.host_blocks_on_post, TABLE.queue) == (
        "rendezvous",
        False,
        "directed_edge",
    )


def test_every_field_but_name_and_what_is_said_of_rows_is_a_row() -> None:
    fields = [f.name for f in dataclasses.fields(BackendTable)]
    assert (
        [row.key for row in TABLE.rows()]
        == list(behaviours())
        == [f for f in fields if f not in ("name", "sources", "also")]
    )


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=f"{table.name}-{row.key}") for table in TABLES.values() for row in table.rows()],
)
def test_a_row_has_an_allowed_value_and_says_what_it_means_and_where_it_is_from(row: Row) -> None:
    row_type = get_type_hints(BackendTable)[row.key]
    assert row.value in (get_args(row_type) or [row.value])
    assert row_type in (bool, int) or get_args(row_type)
    assert row.meaning
    assert row.if_different.endswith(".")
    assert row.source


@pytest.mark.parametrize(
    "sources",
    [
        {key: source for key, source in TABLE.sources.items() if key != "queue"},
        {**TABLE.sources, "queue_": "a typing error"},
    ],
)
def test_a_row_without_a_source_and_a_source_without_a_row_are_refused(sources: Any) -> None:
    with pytest.raises(ValueError, match="paddle-gloo: every row needs one source; look at queue"):
        dataclasses.replace(TABLE, sources=sources)


def test_what_a_table_allows_beside_its_value() -> None:
    nccl = backend_table("torch", "gpu")
    assert nccl.allows("send_completes", "rendezvous")
    assert nccl.allows("send_completes", "eager")
    assert not TABLE.allows("send_completes", "eager")
    assert not nccl.allows("matching", "other")
    one = dataclasses.replace(TABLE, max_batched_transfers=1)
    assert not one.allows("max_batched_transfers", observed=True)  # though 1 == True
    with pytest.raises(ValueError, match="look at speed"):
        dataclasses.replace(nccl, also={"speed": frozenset({"fast"})})
