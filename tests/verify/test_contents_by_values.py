"""The analysis of contents against execution with values, on random programs with a mistake in their names."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pipeproof.schedule.op_table import Row, build_graph
from pipeproof.schedule.ops import parse_op
from pipeproof.verify.check_plan import check_subject
from pipeproof.verify.subject import graph_subject
from tests.verify.contents_definition import is_right


def pipeline(num_stages, num_micro_batches, slots, warm):
    """GPipe or 1F1B with named buffers: ``slots`` outputs, inputs and gradients are used in turn."""
    return [
        list(_rank(stage, num_stages, num_micro_batches, slots, warm(stage, num_stages, num_micro_batches)))
        for stage in range(num_stages)
    ]


def _rank(stage, num_stages, num_micro_batches, slots, warm):
    def row(text, **names):
        return Row(parse_op(f"{stage}{text}"), **names)

    yield row("SCALE_GRAD", writes=("sum",))
    done = 0
    for index in range(num_micro_batches + warm):
        if index < num_micro_batches:
            yield from _forward(row, stage, num_stages, index, slots)
        if index >= warm:
            yield from _backward(row, stage, num_stages, done, slots)
            done += 1
    yield row("STEP", reads=("sum",))


def _forward(row, stage, num_stages, item, slots):
    slot = item % slots
    inputs = (f"in[{slot}]",) if stage else ()
    if stage:
        yield row(f"RECV_F{item}", peer=stage - 1, writes=inputs)
        yield Row(parse_op(f"WAIT({stage}RECV_F{item})"))
    yield row(f"F{item}", reads=inputs, writes=(f"out[{slot}]", f"kept[{item}]"))
    if stage + 1 < num_stages:
        yield row(f"SEND_F{item}", peer=stage + 1, reads=(f"out[{slot}]",))
        yield Row(parse_op(f"WAIT({stage}SEND_F{item})"))


def _backward(row, stage, num_stages, item, slots):
    slot = item % slots
    gradient = (f"grad_out[{slot}]",) if stage + 1 < num_stages else ()
    if gradient:
        yield row(f"RECV_B{item}", peer=stage + 1, writes=gradient)
        yield Row(parse_op(f"WAIT({stage}RECV_B{item})"))
    yield row(f"B{item}", reads=(f"kept[{item}]", "sum", *gradient), writes=("sum", f"grad_in[{slot}]"))
    if stage:
        yield row(f"SEND_B{item}", peer=stage - 1, reads=(f"grad_in[{slot}]",))
        yield Row(parse_op(f"WAIT({stage}SEND_B{item})"))


def all_forwards_first(_stage, _num_stages, num_micro_batches):
    return num_micro_batches


def one_forward_one_backward(stage, num_stages, num_micro_batches):
    return min(num_micro_batches, num_stages - 1 - stage)


sizes = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3))
orders = st.sampled_from([all_forwards_first, one_forward_one_backward])


def findings(rows):
    report = check_subject(graph_subject(build_graph(rows, [], [])))
    return {finding.code for finding in report.findings if finding.code.startswith("PP5")}


@given(sizes=sizes, order=orders)
def test_slots_that_are_read_at_once_need_no_number(sizes, order):
    rows = pipeline(*sizes, order)
    assert is_right(rows, rows)
    assert findings(rows) == set()


def renamed(draw, rows):
    """One name of one row becomes another name of the rank."""
    place = draw(st.sampled_from([i for i, row in enumerate(rows) if row.reads or row.writes]))
    field = draw(st.sampled_from([name for name in ("reads", "writes") if getattr(rows[place], name)]))
    names = list(getattr(rows[place], field))
    known = sorted({name for row in rows for name in (*row.reads, *row.writes)})
    names[draw(st.integers(0, len(names) - 1))] = draw(st.sampled_from(known))
    rows[place] = replace(rows[place], **{field: tuple(names)})


def exchanged(draw, rows):
    """Two rows of one kind get the names of each other."""
    places = [i for i, row in enumerate(rows) if row.reads or row.writes]
    one = draw(st.sampled_from(places))
    other = draw(st.sampled_from([i for i in places if rows[i].op.kind is rows[one].op.kind]))
    names = [(rows[i].reads, rows[i].writes) for i in (one, other)]
    for place, (reads, writes) in zip((other, one), names, strict=True):
        rows[place] = replace(rows[place], reads=reads, writes=writes)


def set_to_zero(draw, rows):
    """A buffer is set to zero once more, somewhere."""
    name = draw(st.sampled_from(sorted({name for row in rows for name in row.writes})))
    rows.insert(draw(st.integers(0, len(rows))), replace(rows[0], writes=(name,)))


@given(data=st.data(), sizes=sizes, order=orders, change=st.sampled_from([renamed, exchanged, set_to_zero]))
def test_a_wrong_name_is_found_if_and_only_if_a_value_changes(data, sizes, order, change):
    intended = pipeline(*sizes, order)
    rows = [list(of_rank) for of_rank in intended]
    own = rows[data.draw(st.integers(0, len(rows) - 1))]
    change(data.draw, own)
    if any(len(set(names)) < len(names) for row in own for names in (row.reads, row.writes)):
        return  # one buffer for two tensors of one operation: which of them it holds, no name states
    written = {name for row in own for name in row.writes}
    if any(name not in written for row in own for name in row.reads):
        return  # buffers that the program never writes are assumed to be there from the start
    found = findings(rows)
    if found & {"PP501", "PP502"}:
        return  # a race: which value is read is a matter of time
    assert bool(found) == (not is_right(rows, intended))
