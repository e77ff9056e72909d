"""Schedules written as PyTorch's CSV: read back they are the same, and PyTorch takes them."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipeproof.schedule.formats.inexpressible import INEXPRESSIBLE, InexpressibleError
from pipeproof.schedule.formats.read_schedule import WRITTEN_FORMATS, convert_schedule, read_schedule, write_schedule
from pipeproof.schedule.formats.schedule_size_checks import Expected
from pipeproof.schedule.kinds import SCHEDULE_KINDS, Request
from pipeproof.schedule.ops import OpKind
from pipeproof.specs.schedule import ScheduleFileError
from tests.schedule.test_kinds import generated, requests

FILES = Path(__file__).parent / "files"
COMMS = sorted(path.name for path in FILES.glob("*_comms.csv"))
ANY = Expected(copies=True)


def read(text, **keywords):
    return read_schedule(text, "s", ANY, **keywords)


def expressible(schedule, form):
    try:
        return write_schedule(schedule, form)
    except InexpressibleError:
        assume(False)


def refusal(text, form, **keywords):
    """(line, column, message, help) of an operation that a format lacks."""
    with pytest.raises(ScheduleFileError) as caught:
        convert_schedule(read(text), form, **keywords)
    (finding,) = caught.value.findings
    assert finding.code == INEXPRESSIBLE.code
    place = finding.location
    return (place and place.line, place and place.column, finding.message, finding.help or "")


@given(requests(max_ranks=5, max_chunks=3), st.sampled_from(WRITTEN_FORMATS))
@settings(max_examples=80)
def test_whatever_can_be_written_reads_back_as_the_same_schedule(drawn, form):
    schedule = generated(*drawn)
    text = expressible(schedule, form)
    assert read(text).schedule == schedule
    assert read(text, format=form).schedule == schedule


@given(requests(max_ranks=4, max_chunks=3), st.lists(st.sampled_from(WRITTEN_FORMATS), min_size=1, max_size=4))
@settings(max_examples=50)
def test_formats_without_communication_convert_into_each_other_without_loss(drawn, forms):
    """Through any formats that can say it, and back."""
    schedule = generated(*drawn)
    first = text = write_schedule(schedule, "text")
    for form in forms:
        expressible(schedule, form)
        text = convert_schedule(read(text), form)
    assert convert_schedule(read(text), "text") == first


@pytest.mark.parametrize("name", COMMS)
def test_files_of_pytorch_with_communication_have_the_computations_of_those_without(name):
    theirs, compute = read((FILES / name).read_text()), read((FILES / name.replace("_comms", "")).read_text())
    assert "WAIT(" in convert_schedule(theirs, "text")
    assert convert_schedule(theirs, "csv", only_computations=True) == convert_schedule(compute, "csv")


def test_a_pair_is_one_cell():
    text = "rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1F1{batch=7} 1B0{batch=7} 1B1\n"
    assert convert_schedule(read(text), "csv") == "0F0,0F1,0B0,0B1\n1F0,(1F1;1B0)OVERLAP_F_B,1B1\n"


CANNOT = {
    ("csv", "rank 0: 0F0 0SEND_F0\nrank 1: 1RECV_F0 1F0"): (
        1,
        13,
        "0SEND_F0 is not a computation",
        "--only-computations",
    ),
    ("csv", "rank 0: 0F0.s0 0F0.s1"): (1, 9, "0F0.s0", ""),
    ("csv", "rank 0: 0F0{reads=a writes=b}"): (1, 9, "{reads=a writes=b}", ""),
    ("csv", "rank 0: 0F0{batch=0} 0F1{batch=0}"): (1, 9, "0F0", ""),
    ("csv", "rank 0: 0F0 0B0{batch=0} 0F1{batch=0}"): (1, 13, "0B0", ""),
    ("csv", "rank 0: 0F0 0F1{batch=0} 0F2 0B0{batch=0}"): (1, 13, "0F1", ""),
    ("csv", "rank 0: 0F0 0F1{batch=0} 0B0{batch=0} 0B1{batch=0}"): (1, 13, "0F1", ""),
    ("csv", "rank 0: 0F0 0F1{batch=0} 0W0{batch=0}"): (1, 13, "0F1", ""),
    ("csv", "tensor t: shape=4 dtype=int8\nrank 0: 0F0"): (None, None, "declares 1 tensor", "--only-computations"),
    ("csv", "group tp: 0\nrank 0: 0F0"): (None, None, "declares 1 group", "--only-computations"),
}


@pytest.mark.parametrize("case", CANNOT, ids=lambda case: " to ".join(reversed(case)).replace("\n", "|"))
def test_what_the_csv_cannot_express_is_named_with_its_place(case):
    form, text = case
    line, column, fragment, fix = CANNOT[case]
    found = refusal(text, form)
    assert found[:2] == (line, column)
    assert fragment in found[2]
    assert fix in found[3]


def test_only_computations_leaves_out_all_the_rest():
    text = (
        "tensor t: shape=4 dtype=int8\n"
        "rank 0: 0F0{writes=a} 0SEND_F0{tensor=0} WAIT(0SEND_F0) 0STEP\n"
        "rank 1: 1RECV_F0{tensor=0} WAIT(1RECV_F0) 1F0 1B0\n"
    )
    only = {form: convert_schedule(read(text), form, only_computations=True) for form in ("text", "csv")}
    assert only == {"text": "rank 0: 0F0\nrank 1: 1F0 1B0\n", "csv": "0F0\n1F0,1B0\n"}
    assert convert_schedule(read(text), "text") == text.replace("0SEND_F0{", "0SEND_F0{peer=1 ").replace(
        "1RECV_F0{", "1RECV_F0{peer=0 "
    ).replace("tensor=0}", "tensor=0 range=0..4}").replace("int8\n", "int8 placement=invariant dims=s\n")


def test_only_computations_leaves_a_computation_alone_that_was_one_call_with_a_transfer():
    text = "rank 0: 0F0{batch=0} 0SEND_F0{batch=0}\nrank 1: 1RECV_F0 1F0 1F1{batch=0} 1B0{batch=0}\n"
    csv = convert_schedule(read(text), "csv", only_computations=True)
    assert csv == "0F0\n1F0,(1F1;1B0)OVERLAP_F_B\n"


# --- next to the installed PyTorch ---


def runtime(num_ranks, num_stages, num_micro_batches):
    """PyTorch's runtime as rank 0 makes it, from stages that hold nothing."""
    from torch import nn
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    stage = SimpleNamespace(
        stage_index=0, num_stages=num_stages, group_rank=0, group_size=num_ranks, submod=nn.Identity()
    )
    return _PipelineScheduleRuntime([stage], num_micro_batches, loss_fn=lambda output, target: output)


GRID = [
    (kind.name, variant, p, chunks, m)
    for kind in SCHEDULE_KINDS.values()
    if kind.placement != "both_ways" and not kind.splits_sequences
    for variant in kind.variants or (None,)
    for p in (1, 2, 4)
    for chunks in {max(1, kind.min_chunks), min(3, kind.max_chunks or 3)}
    for m in (p, 2 * p, 3 * p + 1)
]


@pytest.mark.needs_torch
def test_pytorch_takes_our_file_and_adds_communication_that_we_read(tmp_path):
    taken = set()
    for name, variant, p, chunks, m in GRID:
        try:
            schedule = SCHEDULE_KINDS[name].generate(Request(p, m, chunks, variant=variant))
        except ValueError:
            continue
        (tmp_path / "s.csv").write_text(write_schedule(schedule, "csv"))
        theirs = runtime(p, p * chunks, m)
        theirs._load_csv(str(tmp_path / "s.csv"), format="compute_only")
        theirs._dump_csv(str(tmp_path / "comms.csv"), format="compute_comms")
        for rank, rows in enumerate(read((tmp_path / "comms.csv").read_text()).rows):
            ours = [str(row.op) for row in rows if row.op.kind is not OpKind.WAIT]
            assert ours == [
                str(leaf)
                for action in theirs.pipeline_order_with_comms[rank]
                for leaf in (action.sub_actions or (action,))
            ], (name, variant, p, chunks, m)
        taken.add(name)
    assert taken == {name for name, *_ in GRID}
