"""Requests for dumps over pipes, with readers that do as PyTorch's ranks do."""

import os
import shutil
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeproof.diagnostics.source import PlanFileError
from pipeproof.interop.hang.dump_trigger import request_dumps
from tests.cli.commands import invoke

DUMPS = Path(__file__).parents[3] / "examples" / "importing" / "dumps"


@contextmanager
def ranks_that_answer(stem, directory, ranks):
    """Make and read a pipe for each rank, and dump after a byte, in two writes."""
    directory.mkdir(exist_ok=True)
    sources = {int(path.stem[-1]): path for path in DUMPS.glob("nccl_trace_rank_*")}
    pipes = {}
    for rank in ranks:
        name = f"{stem}{rank}.pipe"
        os.mkfifo(name)
        pipes[rank] = os.open(name, os.O_RDONLY | os.O_NONBLOCK)
    end = threading.Event()

    def serve():
        waiting = dict(pipes)
        while not end.wait(0.05):
            for rank, pipe in list(waiting.items()):
                if os.read(pipe, 128):
                    content = sources[rank].read_bytes()
                    with (directory / sources[rank].name).open("wb") as file:
                        file.write(content[:100])
                        file.flush()
                        time.sleep(0.6)
                        file.write(content[100:])
                    del waiting[rank]

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
        for pipe in pipes.values():
            os.close(pipe)


def test_the_command_asks_all_ranks_and_reads_their_dumps(tmp_path):
    with ranks_that_answer(tmp_path / "pipe_", tmp_path / "dumps", (0, 1)):
        result = invoke("job", "hang", tmp_path / "dumps", "--trigger", tmp_path / "pipe_")
    assert result.exit_code == 1
    assert "PP931" in result.output
    assert "2 ranks, 6 launches" in result.output


def test_a_rank_that_does_not_answer_is_named_and_its_old_dump_is_left_out(tmp_path):
    shutil.copytree(DUMPS, tmp_path / "dumps")
    os.mkfifo(tmp_path / "pipe_1.pipe")  # without a reader
    with ranks_that_answer(tmp_path / "pipe_", tmp_path / "dumps", (0,)):
        ranks, problems = request_dumps(tmp_path / "pipe_", tmp_path / "dumps")
    assert ranks == {0}
    assert len(problems) == 1
    assert problems[0].startswith("rank 1 does not read")


def test_without_pipes_and_without_answers_the_input_is_refused(tmp_path):
    result = invoke("job", "hang", tmp_path, "--trigger", tmp_path / "pipe_")
    assert result.exit_code == 2
    assert "TORCH_NCCL_DEBUG_INFO_PIPE_FILE" in result.output
    (tmp_path / "pipe_0.pipe").touch()  # a file, no pipe
    with pytest.raises(PlanFileError, match="there is no pipe"):
        request_dumps(tmp_path / "pipe_", tmp_path)
    os.mkfifo(tmp_path / "pipe_2.pipe")
    pipe = os.open(tmp_path / "pipe_2.pipe", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(PlanFileError, match="has written no whole dump"):
        request_dumps(tmp_path / "pipe_", tmp_path, wait_s=0.6)
    os.close(pipe)


@pytest.mark.parametrize("option", [("--ras", "host"), ("--follow",)])
def test_a_trigger_goes_with_dumps_only(tmp_path, option):
    directory = [] if option[0] == "--ras" else [tmp_path]
    result = invoke("job", "hang", *directory, *option, "--trigger", tmp_path / "pipe_")
    assert result.exit_code == 2
    assert "--trigger" in result.output


@pytest.mark.needs_torch
def test_the_installed_pytorch_has_these_names():
    import torch

    header = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"
    if not header.exists():
        pytest.skip("this build of PyTorch has no headers")
    text = header.read_text()
    assert "TORCH_NCCL_DEBUG_INFO_PIPE_FILE" in text
    assert 'c10::str(fileStem, rank, ".pipe")' in text
