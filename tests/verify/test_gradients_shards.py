"""Sums of single micro-batches (``memory.shard_gradients``), and gathers before computations (``shard_weights``).

Wrong ones are found, correct ones near them pass.
"""

from dataclasses import replace

import pytest

from pipeproof.schedule.op_table import build_graph
from pipeproof.schedule.ops import OpKind, parse_op
from pipeproof.verify.check_plan import check_subject
from tests.plans import subject

SHARDS = {"shard_optimizer": "dp", "shard_gradients": "dp"}
WEIGHTS = SHARDS | {"shard_weights": "dp"}
TOPOLOGIES = [{"pp": 2, "dp": 2}, {"pp": 1, "dp": 3}, {"pp": 2, "tp": 2, "dp": 2, "sequence_parallel": True}]


def sharded(topology=TOPOLOGIES[0], memory=SHARDS, **sections):
    schedule = {"num_micro_batches": 3} | sections.pop("schedule", {})
    return subject(topology=topology, schedule=schedule, memory=memory, **sections)


def is_sum_of(micro_batch, row):
    op = row.op if row.op.target is None else row.op.target
    return op.kind is OpKind.REDUCE_GRAD and op.stage == 0 and op.micro_batch == micro_batch


def sums_of(micro_batch, rows):
    return [row for row in rows if is_sum_of(micro_batch, row)]


def without(micro_batch, rows):
    return [row for row in rows if not is_sum_of(micro_batch, row)]


def before(text, moved, rows):
    at = next((i for i, row in enumerate(rows) if str(row.op) == text), None)
    return rows if at is None else [*rows[:at], *moved, *rows[at:]]


def renumbered(rows, micro_batch):
    def changed(op):
        op = op._replace(micro_batch=micro_batch)
        return op if op.target is None else op._replace(target=op.target._replace(micro_batch=micro_batch))

    return [replace(row, op=changed(row.op)) for row in rows]


def left_out(rows):
    return without(1, rows)


def repeated(rows):
    return before("0STEP", sums_of(1, rows), rows)


def too_early(rows):
    return before("0B1", sums_of(1, rows), without(1, rows))


def too_late(rows):
    return before("0GATHER_WEIGHT:dp", sums_of(1, rows), without(1, rows))


def of_another_micro_batch(rows):
    return before("0STEP", renumbered(sums_of(1, rows), 0), without(1, rows))


def of_no_micro_batch(rows):
    return before("0STEP", renumbered(sums_of(1, rows), 7), without(1, rows))


def deferred(rows):
    return before("0STEP", sums_of(1, rows), without(1, rows))


def in_another_order(rows):
    moved = [*sums_of(2, rows), *sums_of(0, rows)]
    return before("0STEP", moved, without(0, without(2, rows)))


def whole_at_the_end(rows):
    moved = renumbered(sums_of(1, rows), None)
    return before("0STEP", moved, without(0, without(1, without(2, rows))))


def found(subject, change):
    graph = subject.graph
    rows = [change(own) for own in graph.rows()]
    changed = subject.with_graph(build_graph(rows, graph.tensors, graph.groups))
    return {one.code for one in check_subject(changed).findings if one.code != "PP411"}


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("kind", ["1f1b", "zb_h1"])
def test_a_plan_with_sharded_gradients_passes(topology, kind):
    one = sharded(topology, schedule={"kind": kind})
    assert found(one, lambda rows: rows) == set()
    sums = [str(op) for op in one.graph.ops if op.kind is OpKind.REDUCE_GRAD]
    assert {text.split(":")[0] for text in sums if text.startswith("0")} == {f"0REDUCE_GRAD{i}" for i in range(3)}


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize(
    ("change", "codes"),
    [
        (left_out, {"PP601"}),
        (repeated, {"PP602"}),
        (too_early, {"PP604"}),
        (too_late, {"PP604"}),
        (of_another_micro_batch, {"PP601", "PP602"}),
        (of_no_micro_batch, {"PP601"}),
    ],
)
def test_a_wrong_sum_of_one_micro_batch_is_found(topology, change, codes):
    assert found(sharded(topology), change) == codes
    assert found(sharded(topology).unfolded(), change) == codes


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("change", [deferred, in_another_order, whole_at_the_end])
def test_the_same_sums_in_other_places_pass(topology, change):
    assert found(sharded(topology), change) == set()
    assert found(sharded(topology).unfolded(), change) == set()


def gathers(rows, number):
    """The rows of the rank's n-th gather of stage 0."""
    starts = [i for i, row in enumerate(rows) if str(row.op) == "0GATHER_WEIGHT:dp"]
    if not starts:
        return []
    end = next(i for i in range(starts[number] + 1, len(rows)) if rows[i].op.target is None)
    return list(range(starts[number], end))


def without_gather(number):
    def changed(rows):
        left_out = set(gathers(rows, number))
        return [row for i, row in enumerate(rows) if i not in left_out]

    return changed


def without_one_weight(rows):
    left_out = gathers(rows, 1)[2:3]
    return [row for i, row in enumerate(rows) if i not in left_out]


def released_before(text):
    def changed(rows):
        release = [row for row in rows if str(row.op) == "0RESHARD"][:1]
        return before(text, release, rows)

    return changed


def of_a_part(rows):
    one = gathers(rows, 2)[1:2]
    return [replace(row, stop=row.stop - 1) if i in one else row for i, row in enumerate(rows)]


def stepped_between(rows):
    """A second STEP between a gather and its computation: the weights are old."""
    return before("0F1", [row for row in rows if str(row.op) == "0STEP"], rows)


def kept_until_the_next(rows):
    """Released once for two computations: their weights are whole in both."""
    at = [i for i, row in enumerate(rows) if str(row.op) == "0RESHARD"][:1]
    second = gathers(rows, 1)
    return [row for i, row in enumerate(rows) if i not in (*at, *second)]


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("kind", ["1f1b", "zb_h1", "dualpipe_v"])
def test_a_plan_with_sharded_weights_passes(topology, kind):
    schedule = {"kind": kind, "num_micro_batches": 4}
    one = sharded(topology, WEIGHTS, schedule=schedule)
    assert found(one, lambda rows: rows) == set()
    texts = [str(op) for op in one.graph.ops if op.stage == 0]
    num_computations = sum(texts.count(f"0{kind}{i}") for kind in "FBIW" for i in range(4))
    assert texts.count("0GATHER_WEIGHT:dp") == texts.count("0RESHARD") == num_computations


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize(
    ("change", "code"),
    [
        (without_gather(0), "PP612"),
        (without_gather(1), "PP612"),
        (without_gather(-1), "PP612"),
        (without_one_weight, "PP612"),
        (released_before("0F1"), "PP612"),
        (released_before("0B2"), "PP612"),
        (of_a_part, "PP612"),
        (stepped_between, "PP612"),
        (left_out, "PP601"),
        (repeated, "PP602"),
    ],
)
def test_a_computation_with_released_weights_is_found(topology, change, code):
    one = sharded(topology, WEIGHTS)
    assert code in found(one, change)
    assert code in found(one.unfolded(), change)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("change", [deferred, kept_until_the_next])
def test_whole_weights_in_other_places_pass(topology, change):
    one = sharded(topology, WEIGHTS, schedule={"kind": "gpipe"})
    assert found(one, change) == set()
    assert found(one.unfolded(), change) == set()


def test_the_text_form_has_the_micro_batch_of_a_sum():
    for text in ("0REDUCE_GRAD3:dp", "0REDUCE_GRAD3", "0REDUCE_GRAD:dp", "0REDUCE_GRAD3:dp/1.REDUCE_SCATTER:dp"):
        assert str(parse_op(text)) == text
    with pytest.raises(ValueError, match="is not an operation"):
        parse_op("0GATHER_WEIGHT3:dp")
