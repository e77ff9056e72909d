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
