"""The page about a model cut by hand: its script is run, and its checkpoint becomes one file."""

import re

import pytest

from pipeproof.cli.main import main
from tests.train.launch import ROOT, launch

pytestmark = pytest.mark.needs_torch
PAGE = (ROOT / "docs" / "cut-by-hand.md").read_text(encoding="utf-8")


def test_the_script_trains_and_its_checkpoint_becomes_one_file(tmp_path, monkeypatch):
    (script,) = re.findall(r'```python title="hand.py"\n(.*?)```', PAGE, re.DOTALL)
    (tmp_path / "hand.py").write_text(script)
    monkeypatch.chdir(tmp_path)
    done = launch(tmp_path / "hand.py", 2)
    assert done.returncode == 0, done.stdout
    losses = [float(loss) for loss in re.findall(r"^step \d: loss (.*)$", done.stdout, re.MULTILINE)]
    assert len(losses) == 5
    assert losses[4] < losses[0]
    (command,) = re.findall(r"^\$ pipeproof (state .*)$", PAGE, re.MULTILINE)
    with pytest.raises(SystemExit) as ended:
        main(command.split())
    assert ended.value.code == 0
    assert (tmp_path / "model.safetensors").stat().st_size > 10**6
