"""Paddle starts quietly and on one thread, or reports why it cannot."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.needs_paddle


def run_python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **environment},
    )


def test_threads_are_pinned_whatever_the_environment_asks_for_and_nothing_is_printed():
    code = (
        "from pipeproof.stages.paddle.runtime import num_math_threads, start_paddle; start_paddle(); start_paddle(); "
        "import sys; sys.exit(10 + num_math_threads())"
    )
    done = run_python(code, OMP_NUM_THREADS="2", MKL_NUM_THREADS="2")
    assert (done.returncode, done.stdout, done.stderr) == (11, "", "")


def test_paddle_that_has_computed_with_more_threads_is_refused():
    code = (
        "import paddle; paddle.ones([64, 64]) @ paddle.ones([64, 64])\n"
        "from pipeproof.stages.paddle.runtime import start_paddle; start_paddle()"
    )
    done = run_python(code, OMP_NUM_THREADS="2")
    assert done.returncode == 1
    assert "Paddle computes with 2 threads" in done.stderr
    assert "OMP_NUM_THREADS=1" in done.stderr


def test_what_was_swallowed_is_shown_when_the_start_fails():
    code = (
        "import sys; from pipeproof.stages.paddle.runtime import quiet_python\n"
        "with quiet_python():\n    print('the cause', file=sys.stderr)\n    raise RuntimeError('no start')"
    )
    done = run_python(code)
    assert "the cause" in done.stderr
    assert "no start" in done.stderr
