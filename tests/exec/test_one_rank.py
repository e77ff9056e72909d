"""A world of one rank: Paddle makes no group for it, and its state is saved."""

import pytest

pytestmark = pytest.mark.needs_paddle


def test_there_is_no_rank_to_wait_for():
    from pipeproof.exec.rank.paddle.comm import PaddleChannels, PaddleWorld

    PaddleWorld(0, PaddleChannels(0, {}), {}).barrier()
