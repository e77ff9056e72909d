"""Programs of several processes, started as ``torchrun`` starts them, but forked (``forked_ranks``)."""

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).resolve().parent / "programs"


def launch(program, num_processes, *args, timeout=400, env=()):
    """The finished launcher of ``programs/<program>`` with its output; stdout and stderr of all ranks are one text.

    The launcher and its ranks are ended after ``timeout`` seconds; the return code is then a killed process's.
    """
    command = [
        sys.executable, "-m", "tests.train.forked_ranks", str(num_processes), str(PROGRAMS / program),
        *map(str, args),
    ]  # fmt: skip
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **dict(env)},
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()  # it ends its ranks, which have sessions of their own
        try:
            output, _ = process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, output)


def run(program, num_processes, *args, timeout=400, env=()):
    """The output of a program that ended well; a failed assertion of a rank fails the test with the output of all.

    Returns the ``CompletedProcess``; its ``stdout`` has the output of all ranks.
    """
    done = launch(program, num_processes, *args, timeout=timeout, env=env)
    assert done.returncode == 0, f"exit status {done.returncode}: {' '.join(done.args)}\n{done.stdout}"
    return done
