"""Paddle's own engine with wrong checkpoints, in one process; docs/flex.md has the table.

A test that fails here says that Paddle has changed, and that the table needs a fix.
"""

import os
import pickle

import numpy as np
import pytest

from pipeproof.state.open_checkpoint import open_checkpoint
from pipeproof.state.state_codes import StateError
from tests.state.flex.paddle_checkpoints import (
    names_by_key,
    require_equal,
    whole_tensors,
    write_checkpoint,
    written_shards,
)
from tests.state.flex.ranks import moe_plan, values_of

pytestmark = pytest.mark.needs_paddle
NUMBERS = np.arange(24, dtype=np.float32).reshape(4, 6) + 1


@pytest.fixture
def paddle():
    from pipeproof.stages.paddle.runtime import start_paddle

    start_paddle()
    import paddle
    from paddle.distributed.fleet.utils.log_util import logger
    from paddle.distributed.flex_checkpoint.dcp import load_state_dict as engine

    logger.setLevel("ERROR")
    engine._metadata_manager.clear()
    yield paddle
    engine._metadata_manager.clear()
    engine.PATH_TO_CHECKPOINT_FILES.clear()


def whole(paddle, key, array):
    from paddle.distributed import ShardedWeight

    shape = tuple(array.shape)
    return ShardedWeight(key, paddle.to_tensor(array), shape, shape, (0,) * len(shape))


def save(paddle, place, **arrays):
    paddle.distributed.save_state_dict(
        {key: whole(paddle, key, one) for key, one in arrays.items()}, str(place), safetensors=True
    )
    return place


def load(paddle, place, **targets):
    """Return the targets after loading; they begin as -1."""
    weights = {key: whole(paddle, key, np.full(shape, -1, dtype)) for key, (shape, dtype) in targets.items()}
    paddle.distributed.load_state_dict(weights, str(place), safetensors=True)
    return {key: one.local_tensor.numpy() for key, one in weights.items()}


def refused(place):
    with pytest.raises(StateError) as caught:
        open_checkpoint(place)
    return caught.value.findings[0].message


def test_it_reads_metadata_that_was_written_without_it(paddle, tmp_path):
    plan = moe_plan().plan
    place = write_checkpoint(tmp_path / "c", *written_shards(plan))
    loaded = paddle.distributed.load_merged_state_dict(str(place), safetensors=True)
    names = names_by_key(open_checkpoint(place))
    values = values_of(plan)
    assert loaded.keys() == names.keys()
    for key, tensor in loaded.items():
        assert tensor.numpy().tobytes() == values[names[key]].tobytes(), key


@pytest.mark.parametrize("safetensors", [True, False])
def test_what_it_writes_is_opened(paddle, tmp_path, safetensors):
    values = {"a": NUMBERS, "z": np.float32(2.5).reshape(()), "one": np.ones(1, np.float64)}
    weights = {key: whole(paddle, key, one) for key, one in values.items()}
    paddle.distributed.save_state_dict(weights, str(tmp_path), safetensors=safetensors)
    require_equal(whole_tensors(open_checkpoint(tmp_path)), values)


def test_a_shard_that_is_missing_leaves_the_old_values_silently(paddle, tmp_path):
    from paddle.distributed import ShardedWeight

    half = ShardedWeight("w", paddle.to_tensor(NUMBERS[:2]), (2, 6), (4, 6), (0, 0))
    paddle.distributed.save_state_dict({"w": half}, str(tmp_path), safetensors=True)
    (loaded,) = load(paddle, tmp_path, w=((4, 6), np.float32)).values()
    assert (loaded[:2] == NUMBERS[:2]).all()
    assert (loaded[2:] == -1).all()
    from pipeproof.state.checkpoint import require_tiled

    with pytest.raises(StateError, match="w"):
        require_tiled(open_checkpoint(tmp_path), "w")


@pytest.mark.parametrize(("shape", "num_left"), [((5, 7), 11), ((2, 3), 0), ((6, 4), 8)])
def test_a_tensor_of_another_shape_is_filled_as_far_as_both_go(paddle, tmp_path, shape, num_left):
    save(paddle, tmp_path, w=NUMBERS)
    (loaded,) = load(paddle, tmp_path, w=(shape, np.float32)).values()
    rows, columns = min(shape[0], 4), min(shape[1], 6)
    assert (loaded[:rows, :columns] == NUMBERS[:rows, :columns]).all()
    assert (loaded == -1).sum() == num_left


def test_a_tensor_of_another_type_gets_bytes_that_are_none_of_its_numbers(paddle, tmp_path):
    save(paddle, tmp_path, w=NUMBERS)
    (loaded,) = load(paddle, tmp_path, w=((4, 6), np.float64)).values()
    assert loaded.dtype == np.float64
    assert loaded.ravel()[:12].tobytes() == NUMBERS.tobytes()


def test_a_changed_byte_is_loaded(paddle, tmp_path):
    file = save(paddle, tmp_path, w=NUMBERS) / "0_0.safetensors"
    content = bytearray(file.read_bytes())
    content[-2] ^= 0x40
    file.write_bytes(content)
    (loaded,) = load(paddle, tmp_path, w=((4, 6), np.float32)).values()
    assert (loaded != NUMBERS).sum() == 1


def test_a_file_that_is_cut_is_an_error_that_names_no_tensor(paddle, tmp_path):
    file = save(paddle, tmp_path, weight=NUMBERS) / "0_0.safetensors"
    os.truncate(file, file.stat().st_size - 4)
    with pytest.raises(Exception, match="incomplete metadata") as caught:
        load(paddle, tmp_path, weight=((4, 6), np.float32))
    assert "weight" not in str(caught.value)
    assert "0_0.safetensors is cut short" in refused(tmp_path)


def test_a_file_that_is_gone_is_an_error_that_names_no_tensor(paddle, tmp_path):
    save(paddle, tmp_path, weight=NUMBERS)
    (tmp_path / "0_0.safetensors").unlink()
    with pytest.raises(AssertionError, match="not complete"):
        load(paddle, tmp_path, weight=((4, 6), np.float32))
    assert "0_0.safetensors cannot be read" in refused(tmp_path)


def test_a_key_that_is_missing_is_a_key_error_and_one_too_many_a_warning(paddle, tmp_path):
    save(paddle, tmp_path, w=NUMBERS, more=NUMBERS)
    (loaded,) = load(paddle, tmp_path, w=((4, 6), np.float32)).values()
    assert (loaded == NUMBERS).all()
    with pytest.raises(KeyError, match="other"):
        load(paddle, tmp_path, w=((4, 6), np.float32), other=((4, 6), np.float32))


def test_after_a_load_that_failed_the_next_one_goes_by_the_metadata_of_the_failed_one(paddle, tmp_path):
    save(paddle, tmp_path / "one", w=NUMBERS)
    save(paddle, tmp_path / "two", v=NUMBERS)
    with pytest.raises(KeyError):
        load(paddle, tmp_path / "one", v=((4, 6), np.float32))
    with pytest.raises(KeyError, match="v"):
        load(paddle, tmp_path / "two", v=((4, 6), np.float32))


def test_a_second_save_into_a_directory_keeps_the_metadata_of_the_first(paddle, tmp_path):
    save(paddle, tmp_path, w=NUMBERS)
    save(paddle, tmp_path, w=NUMBERS[:2, :3] + 100)
    assert {path.name for path in tmp_path.iterdir()} == {"0.metadata", "0_0.safetensors"}
    (loaded,) = load(paddle, tmp_path, w=((4, 6), np.float32)).values()
    assert not (loaded == NUMBERS).any()
    assert "0_0.safetensors has w as float32 [2, 3], and the metadata lists float32 [4, 6]" in refused(tmp_path)


def test_metadata_that_asks_for_a_call_is_executed(paddle, tmp_path):
    class Asks:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    save(paddle, tmp_path / "c", w=NUMBERS)
    (tmp_path / "c" / "0.metadata").write_bytes(pickle.dumps(Asks(), protocol=4))
    assert "names posix.mkdir" in refused(tmp_path / "c")
    assert not (tmp_path / "made").exists()
    with pytest.raises(AttributeError):
        load(paddle, tmp_path / "c", w=((4, 6), np.float32))
    assert (tmp_path / "made").exists()


def test_a_save_that_dies_leaves_metadata_of_what_is_not_there(paddle, tmp_path, monkeypatch):
    write = paddle.save

    def dying(content, path, **given):
        if path.endswith(".safetensors"):
            raise OSError("no room")
        write(content, path, **given)

    monkeypatch.setattr(paddle, "save", dying)
    with pytest.raises(OSError, match="no room"):
        save(paddle, tmp_path, w=NUMBERS)
    assert [path.name for path in tmp_path.iterdir()] == ["0.metadata"]
    assert "0_0.safetensors cannot be read" in refused(tmp_path)
