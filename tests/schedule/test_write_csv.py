"""Schedules written as PyTorch's CSV: read back they are the same, and PyTorch takes them."""

from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipeproof.schedule.formats.inexpressible import INEXPRESSIBLE, InexpressibleError
from pipeproof.schedule.formats.read_schedule import WRITTEN_FORMATS, convert_schedule, read_schedule, write_schedule
from pipeproof.schedule.formats.schedule_size_checks import Expected
from pipeproof.schedule.generators.one_f_one_b import one_f_one_b
from pipeproof.schedule.kinds import SCHEDULE_KINDS, Request
from pipeproof.schedule.ops import OpKind, parse_op
from pipeproof.schedule.programs import Schedule
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
        if form != "csv-comms":
            expressible(schedule, form)
            text = convert_schedule(read(text), form)
    assert convert_schedule(read(text), "text") == first


@given(requests(max_ranks=4, max_chunks=3))
@settings(max_examples=50)
def test_with_communication_everything_goes_through_the_text_form_and_back(drawn):
    schedule = generated(*drawn)
    comms = expressible(schedule, "csv-comms")
    text = convert_schedule(read(comms, format="csv-comms"), "text")
    assert convert_schedule(read(text), "csv-comms") == comms
    assert convert_schedule(read(comms), "csv", only_computations=True) == write_schedule(schedule, "csv")


@pytest.mark.parametrize("name", COMMS)
def test_files_of_pytorch_come_back_cell_for_cell(name):
    theirs = (FILES / name).read_text()
    text = convert_schedule(read(theirs), "text")
    assert "WAIT(" in text
    for source in (theirs, text):
        assert convert_schedule(read(source), "csv-comms") == theirs


@pytest.mark.parametrize("name", COMMS)
def test_to_computations_alone_we_add_what_pytorch_adds(name):
    compute = (FILES / name.replace("_comms", "")).read_text()
    assert convert_schedule(read(compute), "csv-comms") == (FILES / name).read_text()


def test_weights_are_gathered_for_the_next_three_stages_and_finished_behind_the_last_backward():
    program = "rank 0: 0F0 1F0 2F0 3F0 4F0 4B0 3I0 3W0 2B0 1B0 0B0"
    comms = convert_schedule(read(program), "csv-comms")
    assert comms == (
        "0UNSHARD,1UNSHARD,2UNSHARD,0F0,0RESHARD,3UNSHARD,1F0,1RESHARD,4UNSHARD,2F0,3F0,4F0,4B0,"
        "4REDUCE_GRAD,4RESHARD,1UNSHARD,3I0,3W0,3REDUCE_GRAD,3RESHARD,0UNSHARD,2B0,2REDUCE_GRAD,2RESHARD,1B0,"
        "1REDUCE_GRAD,1RESHARD,0B0,0REDUCE_GRAD,0RESHARD\n"
    )


def test_a_pair_is_one_cell_and_sends_follow_it():
    text = "rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1F1{batch=7} 1B0{batch=7} 1B1\n"
    assert convert_schedule(read(text), "csv") == "0F0,0F1,0B0,0B1\n1F0,(1F1;1B0)OVERLAP_F_B,1B1\n"
    comms = convert_schedule(read(text), "csv-comms").splitlines()
    assert comms[1] == (
        "1UNSHARD,1RECV_F0,1F0,1RECV_F1,(1F1;1B0)OVERLAP_F_B,1SEND_B0,1B1,1SEND_B1,1REDUCE_GRAD,1RESHARD"
    )


CANNOT = {
    ("csv", "rank 0: 0F0 0SEND_F0\nrank 1: 1RECV_F0 1F0"): (1, 13, "0SEND_F0 is no computation", "csv-comms"),
    ("csv", "rank 0: 0F0.s0 0F0.s1"): (1, 9, "0F0.s0", ""),
    ("csv", "rank 0: 0F0{reads=a writes=b}"): (1, 9, "{reads=a writes=b}", ""),
    ("csv", "rank 0: 0F0{batch=0} 0F1{batch=0}"): (1, 9, "0F0", ""),
    ("csv", "rank 0: 0F0 0B0{batch=0} 0F1{batch=0}"): (1, 13, "0B0", ""),
    ("csv", "rank 0: 0F0 0F1{batch=0} 0F2 0B0{batch=0}"): (1, 13, "0F1", ""),
    ("csv", "rank 0: 0F0 0F1{batch=0} 0B0{batch=0} 0B1{batch=0}"): (1, 13, "0F1", ""),
    ("csv", "rank 0: 0F0 0F1{batch=0} 0W0{batch=0}"): (1, 13, "0F1", ""),
    ("csv", "tensor t: shape=4 dtype=int8\nrank 0: 0F0"): (None, None, "declares 1 tensor", "--only-computations"),
    ("csv", "group tp: 0\nrank 0: 0F0"): (None, None, "declares 1 group", "--only-computations"),
    ("csv-comms", "rank 0: 0F0 0STEP"): (1, 13, "0STEP", ""),
    ("csv-comms", "rank 0: 0F0 0REDUCE_GRAD:dp"): (1, 13, "0REDUCE_GRAD:dp is no operation", ""),
    ("csv-comms", "rank 0: 0F0.s0 0UNSHARD"): (1, 9, "0F0.s0", ""),
    ("csv-comms", "rank 0: 0F0.s0"): (1, 9, "0F0.s0", ""),
    ("csv-comms", "rank 0: 0F0 0B0\nrank 1: 0F1 0B1"): (2, 9, "stage 0 is on ranks 0 and 1", ""),
    ("csv-comms", "rank 0: 1F0 0F0"): (1, 9, "1F0", ""),
    ("csv-comms", "rank 0: 0F0 0SEND_F0\nrank 1: 1RECV_F0 WAIT(1RECV_F0) 1F0"): (1, 13, "0SEND_F0{peer=1} where", ""),
    ("csv-comms", "rank 0: 0UNSHARD WAIT(0UNSHARD) 0F0"): (1, 9, "0UNSHARD{queue=unshard}", ""),
    ("csv-comms", "rank 0: 0UNSHARD{queue=unshard} WAIT(0UNSHARD) 0F0 WAIT(0F0)"): (1, 52, "would end", ""),
    ("csv-comms", "rank 0: 0UNSHARD{queue=unshard} 0F0"): (1, 33, "WAIT(0UNSHARD)", ""),
    ("csv-comms", "rank 0: 0F0 0RESHARD"): (1, 13, "the program ends where", "--only-computations"),
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


def test_a_schedule_that_cannot_run_is_refused_as_a_generated_one_too():
    stuck = Schedule(((parse_op("0B0"), parse_op("0F0")), (parse_op("1F0"), parse_op("1B0"))))
    with pytest.raises(InexpressibleError, match="0B0"):
        write_schedule(stuck, "csv-comms")


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
def test_pytorch_takes_both_files_and_makes_the_same_of_them(tmp_path):
    from torch.distributed.pipelining import schedules

    taken = set()
    for name, variant, p, chunks, m in GRID:
        try:
            schedule = SCHEDULE_KINDS[name].generate(Request(p, m, chunks, variant=variant))
        except ValueError:
            continue
        for form in ("csv", "csv-comms"):
            (tmp_path / form).write_text(write_schedule(schedule, form))
        ours, theirs = runtime(p, p * chunks, m), runtime(p, p * chunks, m)
        ours._load_csv(str(tmp_path / "csv-comms"), format="compute_comms")
        theirs._load_csv(str(tmp_path / "csv"), format="compute_only")
        lowered = [in_order(each.pipeline_order_with_comms) for each in (ours, theirs)]
        assert lowered[0] == lowered[1], (name, variant, p, chunks, m)
        simulated = schedules._simulate_comms_compute(
            {
                rank: [leaf for action in actions for leaf in (action.sub_actions or (action,)) if is_simulated(leaf)]
                for rank, actions in ours.pipeline_order_with_comms.items()
            },
            lambda stage, rank_of=ours.stage_index_to_group_rank: rank_of[stage],
            p * chunks,
        )
        assert sum(action is not None for actions in simulated.values() for action in actions)
        taken.add(name)
    assert taken == {name for name, *_ in GRID}


def is_simulated(action):
    """PyTorch's own simulation does not know the actions of a whole stage."""
    return action.microbatch_index is not None


def in_order(actions_by_rank):
    """Actions as text; the order of RESHARDs that stand together is that of a hash table there."""
    return {
        rank: [
            text
            for dropped, run in groupby(map(str, actions), lambda text: text.endswith("RESHARD"))
            for text in (sorted(run) if dropped else run)
        ]
        for rank, actions in actions_by_rank.items()
    }


@pytest.mark.needs_torch
def test_our_reader_sees_the_actions_that_pytorch_reads(tmp_path):
    comms = write_schedule(one_f_one_b(4, 6), "csv-comms")
    (tmp_path / "s.csv").write_text(comms)
    theirs = runtime(4, 4, 6)
    theirs._load_csv(str(tmp_path / "s.csv"), format="compute_comms")
    for rank, rows in enumerate(read(comms).rows):
        assert [str(row.op) for row in rows if row.op.kind is not OpKind.WAIT] == [
            str(action) for action in theirs.pipeline_order_with_comms[rank]
        ]


@pytest.mark.needs_torch
def test_pytorch_divides_gradients_only_where_a_file_finishes_them(tmp_path):
    """Which is why ours has REDUCE_GRAD without sharded weights, too."""
    import torch
    from torch import distributed
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    def gradient(text, form):
        model = torch.nn.Linear(3, 3, bias=False)
        torch.nn.init.ones_(model.weight)
        stage = PipelineStage(model, 0, 1, torch.device("cpu"))
        run = _PipelineScheduleRuntime([stage], 4, loss_fn=torch.nn.functional.mse_loss)
        (tmp_path / "s.csv").write_text(text)
        run._load_csv(str(tmp_path / "s.csv"), format=form)
        run.step(torch.arange(12.0).reshape(4, 3), target=torch.zeros(4, 3))
        return model.weight.grad

    schedule = one_f_one_b(1, 4)
    compute, comms = (write_schedule(schedule, form) for form in ("csv", "csv-comms"))
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        own = gradient(compute, "compute_only")
        assert torch.equal(gradient(comms, "compute_comms"), own)
        assert torch.allclose(gradient(comms.replace("0REDUCE_GRAD,", ""), "compute_comms"), 4 * own)
    finally:
        distributed.destroy_process_group()
