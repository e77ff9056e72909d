"""A world of one rank: Paddle makes no group for it, and a state is saved all the same."""

import pytest

pytestmark = pytest.mark.needs_paddle


def test_there_is_nobody_to_wait_for():
    from pipeproof.exec.paddle.comm import PaddleChannels, PaddleWorld

    PaddleWorld(0, PaddleChannels(0, {}), {}).barrier()
