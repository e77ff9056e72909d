"""A state resumes with other micro-batches in each step: a note, and the right position of the data."""

import json

import numpy as np
import pytest

from pipeproof.diagnostics.finding import Severity
from pipeproof.exec.rank.checkpointing import prepare_checkpoint, restore_state
from pipeproof.exec.rank.job_files import CheckpointOptions, Job, RunOptions
from pipeproof.state.read_state import find_state, read_whole
from pipeproof.state.resume_check import data_done, require_resumable
from pipeproof.state.state_index import DataPosition, read_index
from pipeproof.state.write_state import finish_state, write_rank_state
from pipeproof.verify.certificate import Certificate, Verdict, graph_digest
from tests.state.reshard.plans import DENSE, files_of, reshard, state_of, write_plan
from tests.state.runs import plan_of, save
from tests.state.tiny import values, written_by_rank

PRODUCT = r"dp * ep * schedule.num_micro_batches was 4 and is"


def write(at, root, steps_done=2, data_before=None):
    for rank in range(at.plan.mesh.num_ranks):
        whole = values(at.plan, steps_done)
        write_rank_state(root, steps_done, "job", rank, written_by_rank(at.plan, rank, whole))
    return finish_state(root, steps_done, "job", at.plan, graph_digest(at), "1.0", data_before=data_before)


def resumed(root, **changes):
    """Options of a run of another plan that resumes from the newest state below ``root``, and its notes."""
    at, notes = plan_of(steps=9, **changes), []
    options = prepare_checkpoint(CheckpointOptions(resume=root), at, graph_digest(at), notes.append)
    Job(root, {}, Certificate("", 1, "", Verdict.PROVED), RunOptions(checkpoint=options)).save()
    assert Job.load(root).checkpoint == options  # as the ranks read it
    return at, options, notes


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"topology": {"dp": 2}}, f"{PRODUCT} 8"),
        ({"topology": {"pp": 1}, "schedule": {"num_micro_batches": 2}}, f"{PRODUCT} 2"),
        ({"schedule": {"num_micro_batches": 8}}, f"{PRODUCT} 8"),
        ({"schedule": {"micro_batch_size": 2}}, "micro-batch 0 of a step was 1 x 4 tokens and is 2 x 4 tokens"),
        (
            {"schedule": {"micro_batch_size": 2, "last_micro_batch_size": 1}},
            "micro-batch 0 of a step was 1 x 4 tokens and is 2 x 4 tokens",
        ),
        ({"schedule": {"seq_lengths": [4, 4, 2, 4]}}, "micro-batch 2 of a step was 1 x 4 tokens and is 1 x 2 tokens"),
    ],
)
def test_other_micro_batches_of_a_step_are_a_note_with_the_position_of_the_data(tmp_path, changes, difference):
    write(plan_of(), tmp_path)
    _, options, (note,) = resumed(tmp_path, **changes)
    assert (note.code, note.severity) == ("PP925", Severity.NOTE)
    assert note.message.startswith(f"{difference}: the state is loaded bit for bit, but ")
    assert note.message.endswith("of step 2, after 8 sequences (32 tokens)")
    assert options.data_before == {"steps": 2, "sequences": 8, "tokens": 32}
    assert options.reference_from_state


def test_the_same_micro_batches_over_other_data_ranks_are_the_same_data(tmp_path):
    write(plan_of(schedule={"seq_lengths": [4, 2, 4, 2]}), tmp_path)
    two = {"num_micro_batches": 2, "seq_lengths": [4, 2]}
    _, options, notes = resumed(tmp_path, topology={"dp": 2}, schedule=two)
    assert not notes
    assert options.data_before is None
    _, options, (note,) = resumed(tmp_path, topology={"dp": 2}, schedule={**two, "seq_lengths": [2, 4]})
    assert note.message.startswith("micro-batch 0 of a step was 1 x 4 tokens and is 1 x 2 tokens")
    assert options.data_before == {"steps": 2, "sequences": 8, "tokens": 24}


def test_the_position_counts_the_steps_of_each_plan_by_its_own_micro_batches(tmp_path):
    write(plan_of(), tmp_path / "first")
    at, options, _ = resumed(tmp_path / "first", topology={"dp": 2})
    before = DataPosition.model_validate(options.data_before)
    index = read_index(write(at, tmp_path / "second", 5, before))
    assert data_done(index) == DataPosition(steps=5, sequences=2 * 4 + 3 * 8, tokens=4 * (2 * 4 + 3 * 8))
    _, options, notes = resumed(tmp_path / "second", topology={"dp": 4}, schedule={"num_micro_batches": 2})
    assert not notes  # eight again: earlier steps do not change
    assert options.data_before == {"steps": 2, "sequences": 8, "tokens": 32}
    _, options, (note,) = resumed(tmp_path / "second")
    assert note.message.endswith("of step 5, after 32 sequences (128 tokens)")


def test_a_reshard_for_other_micro_batches_has_the_note_and_the_position(tmp_path):
    a, b = write_plan(tmp_path / "a.yaml", "one", DENSE), write_plan(tmp_path / "b.yaml", "sd4", DENSE, micro=3)
    source = state_of(a, tmp_path / "of_a")
    text = reshard(source, "--to", b, "-o", tmp_path / "made")
    assert "note[PP925]" in text
    assert "of step 3, after 12 sequences (48 tokens)" in " ".join(text.split())
    assert files_of(tmp_path / "made") == files_of(state_of(b, tmp_path / "of_b"))
    assert read_index(tmp_path / "made").data_before == DataPosition(steps=3, sequences=12, tokens=48)
    reshard(tmp_path / "made", "--to", b, "-o", tmp_path / "again")
    assert read_index(tmp_path / "again").data_before == DataPosition(steps=3, sequences=12, tokens=48)
    reshard(tmp_path / "made", "-o", tmp_path / "one.safetensors")
    reshard(tmp_path / "one.safetensors", "--to", a, "-o", tmp_path / "back")
    assert read_index(tmp_path / "back").data_before == DataPosition(steps=3, sequences=12, tokens=48)
    reshard(source, "--to", b, "--weights-only", "-o", tmp_path / "weights")
    assert read_index(tmp_path / "weights").data_before is None


def test_the_note_of_two_plans_is_no_error(tmp_path):
    a, b = write_plan(tmp_path / "a.yaml", "one", DENSE), write_plan(tmp_path / "b.yaml", "sd4", DENSE, micro=3)
    text = reshard(a, b, "--check")
    assert "note[PP925]" in text
    assert "proved: " in text
    (finding,) = json.loads(reshard(a, b, "--check", "--format", "json"))["findings"]
    assert (finding["code"], finding["severity"]) == ("PP925", "note")
    assert "PP925" not in reshard(a, a, "--check")


@pytest.mark.needs_torch
def test_training_resumes_with_twice_the_micro_batches_on_any_topology(tmp_path):
    """Two steps of 4 micro-batches, then two of 8: on dp 1 and dp 2 the same training, and another one than with 4."""
    from pipeproof.exec.rank.framework_choice import start_framework
    from tests.exec.in_memory import run_all

    changes = {"backend": "torch", "run": {"dtype": "float64"}}
    source = plan_of(steps=2, **changes)
    arrays = start_framework(source.plan.spec.run).arrays
    _, adapters = run_all(source.plan)
    state = find_state(save(source, tmp_path / "source", adapters, arrays))
    ends = []
    eight = {"num_micro_batches": 8}
    for number, sections in enumerate(({"schedule": eight}, {"topology": {"dp": 2}}, {})):
        target = plan_of(steps=4, **changes, **sections)
        assert (require_resumable(state, target.plan, graph_digest(target)) is None) == (not sections)

        def prepare(adapter, arrays, rank, target=target):
            restore_state(adapter, arrays, target.plan, rank, state.directory)

        _, adapters = run_all(target.plan, first_step=2, prepare=prepare)
        ends.append(read_whole(find_state(save(target, tmp_path / str(number), adapters, arrays, 4))))
    first, second, four = ({name: array.content.view(array.dtype) for name, array in end.items()} for end in ends)
    name = "layer.0.mlp.up.weight"
    assert name in first
    for key, expected in first.items():
        assert np.allclose(second[key], expected, rtol=1e-9, atol=1e-9), key
    assert not np.allclose(four[name], first[name], rtol=1e-6)
