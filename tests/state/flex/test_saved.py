"""A state that is saved or resharded as Paddle's checkpoint: whole or not at all, readable by both, resumed."""

import json

import numpy as np
import pytest

from pipeproof.diagnostics.finding import PipeproofError
from pipeproof.exec.rank.checkpointing import prepare_checkpoint
from pipeproof.exec.rank.job_files import CheckpointOptions
from pipeproof.state.byte_ranges import ByteArray
from pipeproof.state.flex.flex_metadata import open_flex
from pipeproof.state.open_checkpoint import open_checkpoint
from pipeproof.state.read_state import find_state, read_whole
from pipeproof.state.state_codes import StateError
from pipeproof.state.state_index import ShardFile
from pipeproof.state.state_layout import shards_of_rank
from pipeproof.state.write_state import finish_state, partial_directory, remove_partial_states, write_rank_state
from pipeproof.verify.certificate import graph_digest
from tests.cli.commands import invoke
from tests.plans import plan_dict, subject
from tests.state.flex.paddle_checkpoints import names_by_key, require_equal, whole_tensors
from tests.state.flex.ranks import MOE, SIZES, moe_plan, shard_of, values_of


def saved(root, at):
    """A state of known values in pipeproof's own format."""
    values = values_of(at.plan)
    for rank in range(at.plan.mesh.num_ranks):
        held = {}
        for piece in shards_of_rank(at.plan, rank):
            content = np.frombuffer(shard_of(values[piece.shard.tensor], piece.shard).tobytes(), np.uint8)
            if piece.writer == rank:
                held[piece.shard] = ByteArray(piece.tensor.dtype, piece.shape, content)
        write_rank_state(root, 2, "job", rank, held)
    return finish_state(root, 2, "job", at.plan, graph_digest(at), "3.3.1")


def plan_file(path, backend="paddle", **topology):
    sharded = {"memory": {"shard_optimizer": "dp"}} if topology.get("dp", 1) > 1 else {}
    model = {"num_layers": 4, "vocab_size": 16, "seq_length": 4, **SIZES, "tied_embedding": True, "moe": MOE}
    schedule = {"num_micro_batches": 4 // topology.get("dp", 1), "micro_batch_size": 1}
    run = {"backend": backend, "steps": 3, "optimizer": "adamw"}
    plan = plan_dict(model=model, topology={"pp": 1, **topology}, schedule=schedule, run=run, **sharded)
    path.write_text(json.dumps(plan))
    return str(path)


def resharded(tmp_path, *options, backend="paddle"):
    state = saved(tmp_path / "states", moe_plan())
    plan = plan_file(tmp_path / "b.json", backend, dp=2)
    return invoke("state", "reshard", state, "--to", plan, "-o", tmp_path / "out", *options)


def test_a_resharded_state_is_paddles_checkpoint_with_our_index(tmp_path):
    result = resharded(tmp_path, "--save-format", "flex")
    assert result.exit_code == 0, result.output
    out, values = tmp_path / "out", values_of(moe_plan().plan)
    assert sorted(path.name for path in out.iterdir()) == [
        "0.metadata", "0_0.safetensors", "1_0.safetensors", "index.json",
    ]  # fmt: skip
    require_equal(whole_tensors(open_checkpoint(out)), values)
    require_equal(whole_tensors(open_flex(out)), values)
    assert {name: one.content.tobytes() for name, one in read_whole(find_state(out)).items()} == {
        name: value.tobytes() for name, value in values.items()
    }
    merged = tmp_path / "merged.safetensors"
    assert invoke("state", "reshard", out, "-o", merged).exit_code == 0
    require_equal(whole_tensors(open_checkpoint(merged)), values)


@pytest.mark.needs_paddle
def test_paddle_merges_a_resharded_state_to_the_same_bits(tmp_path):
    from pipeproof.stages.paddle.runtime import start_paddle

    start_paddle()
    from paddle.distributed import load_merged_state_dict

    assert resharded(tmp_path, "--save-format", "flex").exit_code == 0
    names = names_by_key(open_flex(tmp_path / "out"))
    values = values_of(moe_plan().plan)
    merged = load_merged_state_dict(str(tmp_path / "out"), safetensors=True)
    assert {names[key] for key in merged} == values.keys()
    assert all(tensor.numpy().tobytes() == values[names[key]].tobytes() for key, tensor in merged.items())


def test_a_checkpoint_of_paddles_without_our_index_gives_a_plan_its_weights(tmp_path):
    assert resharded(tmp_path, "--save-format", "flex").exit_code == 0
    out = tmp_path / "out"
    (out / "index.json").unlink()
    with pytest.raises(StateError) as caught:
        find_state(out)
    assert "pipeproof state reshard" in caught.value.findings[0].help
    plan = plan_file(tmp_path / "c.json", pp=2)
    result = invoke("state", "reshard", out, "--to", plan, "-o", tmp_path / "new")
    assert result.exit_code == 0, result.output
    state, values = find_state(tmp_path / "new"), values_of(moe_plan().plan)
    assert state.steps_done == 0
    found = read_whole(state)
    assert found.keys() == {name for name in values if not name.startswith("optimizer/")}
    assert all(one.content.tobytes() == values[name].tobytes() for name, one in found.items())


def test_states_of_another_framework_are_not_written_as_paddles(tmp_path):
    state = saved(tmp_path / "states", moe_plan())
    plan = plan_file(tmp_path / "b.json", "torch", dp=2)
    result = invoke(
        "state", "reshard", state, "--to", plan, "--weights-only", "--save-format", "flex", "-o", tmp_path / "o"
    )
    assert (result.exit_code, "PP927" in result.output) == (2, True)
    at = subject(run={"backend": "torch"})
    with pytest.raises(PipeproofError) as caught:
        prepare_checkpoint(CheckpointOptions(tmp_path / "s", by_paddle=True), at, graph_digest(at))
    assert caught.value.findings[0].code == "PP927"
    assert not (tmp_path / "s").exists()


def test_the_option_without_what_it_is_about_is_a_mistake(tmp_path):
    plan = plan_file(tmp_path / "b.json")
    assert "--save DIR" in invoke("run", plan, "--save-format", "flex").output
    assert "-o OUT" in invoke("state", "reshard", plan, plan, "--check", "--save-format", "flex").output


@pytest.fixture
def begun(tmp_path):
    """The tensors of one rank, and the directory that it saves to."""
    from pipeproof.stages.paddle.runtime import start_paddle

    start_paddle()
    import paddle

    at = moe_plan()
    values = values_of(at.plan)
    held = {
        (piece.weight, piece.slot): paddle.to_tensor(values[piece.shard.tensor]) for piece in shards_of_rank(at.plan, 0)
    }
    return at, held, partial_directory(tmp_path, 2, "job")


@pytest.mark.needs_paddle
def test_a_save_by_paddle_that_dies_leaves_no_state(begun, tmp_path, monkeypatch):
    import paddle

    from pipeproof.exec.rank.paddle.framework import write_flex_part

    at, held, directory = begun

    def dying(content, path, **given):
        del content, given
        raise OSError(path)

    monkeypatch.setattr(paddle, "save", dying)
    with pytest.raises(OSError, match="metadata"):
        write_flex_part(directory, at.plan, 0, held)
    with pytest.raises(StateError):
        find_state(tmp_path)
    remove_partial_states(tmp_path, "job")
    assert not list(tmp_path.iterdir())


@pytest.mark.needs_paddle
def test_what_paddle_did_not_write_gets_no_name(begun):
    from pipeproof.exec.rank.paddle.framework import write_flex_part
    from pipeproof.state.flex.flex_output import require_all_written

    at, held, directory = begun
    write_flex_part(directory, at.plan, 0, held)
    require_all_written(directory, at.plan)
    note = directory / "rank0.json"
    file = ShardFile.model_validate_json(note.read_bytes())
    note.write_text(file.model_copy(update={"shards": file.shards[1:]}).model_dump_json(exclude_none=True))
    with pytest.raises(StateError, match="is missing"):
        require_all_written(directory, at.plan)
