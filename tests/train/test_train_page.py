"""The page for training scripts and the script of the README: their code is run."""

import re
import shlex
import sys

import pytest

from tests.train.launch import ROOT, launch

pytestmark = [pytest.mark.needs_torch, pytest.mark.slow]

PAGE = (ROOT / "docs" / "train.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def blocks(validation_script):
    return validation_script("console_blocks")


def test_the_page_can_be_followed(blocks, tmp_path):
    """Its script is saved and started, and its commands read the script's files."""
    work, programs, state = tmp_path / "work", tmp_path / "bin", tmp_path / "state"
    for folder in (work, programs, state):
        folder.mkdir()
    for name, module in (("pipeproof", "pipeproof"), ("torchrun", "torch.distributed.run")):
        (programs / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m {module} "$@"\n')
        (programs / name).chmod(0o755)
    variables = {"PATH": f"{programs}:/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    session = blocks.Session(work, state, {**variables, "OMP_NUM_THREADS": "1"})
    steps = list(blocks.steps_of(PAGE))
    assert [step.name for step in steps if isinstance(step, blocks.PageFile)] == ["train.py"]
    for step in steps:
        session.follow(step)
    assert {path.name for path in work.iterdir()} >= {"plan.yaml", "profile.json", "record", "checkpoint"}


PRELUDE = """
import torch, transformers

torch.set_num_threads(1)
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
)
model = transformers.LlamaForCausalLM(config)
batches = [torch.randint(32, (8, 6)) for _ in range(3)]
"""


@pytest.mark.needs("transformers")
def test_the_script_of_the_readme_runs(tmp_path):
    (script,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    after = "    if loss is not None: print('loss', float(loss))\ntorch.distributed.destroy_process_group()\n"
    (tmp_path / "script.py").write_text(PRELUDE + script + after)
    done = launch(tmp_path / "script.py", 2)
    assert done.returncode == 0, done.stdout
    assert len(re.findall(r"^loss \d", done.stdout, re.MULTILINE)) == 3
