"""Mistakes with ``pipeproof state reshard``: the message names each one, and nothing is left behind."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pipeproof.state.read_state import find_state
from pipeproof.state.state_codes import StateError
from tests.state.reshard.plans import DENSE, reshard, state_of, write_plan
from tests.state.tiny import files_below

SMALLER = {**DENSE, "ffn_size": 8}
AT_HAND = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}


@pytest.fixture
def there(tmp_path, monkeypatch):
    """A plan, its state, the merged file of that, its weights under other people's names; and it is a clean place."""
    plan = write_plan(tmp_path / "plan.yaml", "tp2_pp2", DENSE)
    state_of(plan, tmp_path / "states")
    reshard(tmp_path / "states", "-o", tmp_path / "merged.safetensors")
    reshard(tmp_path / "states", "-o", tmp_path / "theirs.safetensors", "--names", "huggingface")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(*words, status):
    """The message; all files that were there are still there, and no others."""
    before = files_below(Path())
    said = " ".join(reshard(*words, status=status).split())
    assert files_below(Path()) == before
    return said


@pytest.mark.parametrize(
    ("line", "status", "message"),
    [
        ("states --to plan.yaml -o .", 2, "is not a name for an output"),
        ("states --to plan.yaml -o /", 2, "is not a name for an output"),
        (f"states --to plan.yaml -o {'n' * 300}", 2, "File name too long"),
        ("'' --to plan.yaml -o made", 2, "the path is empty"),  # which is not the directory at hand
        ("states --to '' -o made", 2, "the path is empty"),
        ("states --to plan.yaml -o ''", 2, "the path is empty"),
        ("merged.safetensors states --check", 2, "states is a directory: --to names the plan"),
        ("states --to merged.safetensors -o made", 2, "merged.safetensors is a file of tensors: --to names the plan"),
        ("states --to plam.yaml -o made", 2,
         "cannot read `plam.yaml`: no such file or directory = help: did you mean `plan.yaml`?"),
        ("theirs.safetensors plan.yaml -o made", 1, "`--names CONVENTION`"),
        ("states -o x.safetensors --names hf", 2, "there is no naming convention `hf`"),
        ("states plan.yaml -o made --names huggingface", 2, "own names, and not the names of `huggingface`"),
        ("merged.safetensors plan.yaml -o made --names huggingface", 2, "and not the names of `huggingface`"),
        ("plan.yaml plan.yaml --check --names huggingface", 2, "leave --names out"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("there")
def test_words_that_cannot_be_meant(line, status, message):
    assert message in refused(*shlex.split(line), status=status)


def test_a_checkpoint_without_tensors(there):
    save_file({}, "empty.safetensors")
    assert "has no tensor to write" in refused("empty.safetensors", "-o", "made.safetensors", status=2)


@pytest.mark.parametrize("name", ["my model + 1.safetensors", "模型.safetensors"])
def test_one_file_may_have_any_name(there, name):
    reshard("states", "-o", name)
    assert files_below(there)[name] == (there / "merged.safetensors").read_bytes()


def test_an_index_is_for_the_checkpoint_that_it_is_of(there):
    index = next(there.glob("states/*/index.json"))
    reshard(index, "-o", "again.safetensors")
    assert (there / "again.safetensors").read_bytes() == (there / "merged.safetensors").read_bytes()


def test_one_file_of_a_state_is_not_a_checkpoint(there):
    file = next(there.glob("states/*/rank1.safetensors"))
    said = refused(file, "plan.yaml", "-o", "made", status=2)
    assert "PP924" in said
    assert f"name the state: {file.parent}" in said


def test_a_check_of_plans_asks_what_a_resume_would_ask(there):
    write_plan(there / "seed.yaml", "one", DENSE, seed=8)
    said = refused("plan.yaml", "seed.yaml", "--check", status=1)
    assert "PP920" in said
    assert "run.seed was 0 and is 8" in said
    assert "proved: 31 tensors" in reshard("plan.yaml", "seed.yaml", "--check", "--weights-only")
    write_plan(there / "torch.yaml", "one", DENSE, backend="torch")
    assert "saved by paddle, and the plan runs on torch" in refused("plan.yaml", "torch.yaml", "--check", status=1)
    assert "proved: " in reshard("plan.yaml", "torch.yaml", "--check", "--weights-only")


def test_a_model_of_other_sizes_under_other_names(there):
    write_plan(there / "smaller.yaml", "one", SMALLER)
    write_plan(there / "larger.yaml", "one", {**DENSE, "hidden_size": 16})
    said = refused("theirs.safetensors", "larger.yaml", "-o", "made", "--names", "huggingface", status=1)
    assert "error[PP214]: `model.embed_tokens.weight` of theirs.safetensors is [16, 8], and made needs it as" in said
    assert "[16, 16] (and 38 more tensors)" in said
    assert "PP210" not in said
    said = refused("theirs.safetensors", "smaller.yaml", "-o", "made", "--names", "huggingface", status=1)
    assert "use the checkpoint and the plan of one model" in said


def test_what_names_leave_out_is_reported(there):
    said = reshard("states", "-o", "x.safetensors", "--names", "megatron")
    assert "names are for weights: 124 tensors of the optimizer are left out" in said


def test_a_vocabulary_is_spoken_of_only_where_ids_alone_differ(there):
    wrong = {"embed.weight": np.zeros((16, 4), np.float32), "head.weight": np.zeros((8, 15), np.float32)}
    for name, has_padding in (("embed.weight", False), ("head.weight", True)):
        save_file({name: wrong[name]}, there / f"{name}.safetensors")
        said = refused(f"{name}.safetensors", "plan.yaml", "-o", "made", status=1)
        assert ("model.unpadded_vocab_size" in said) == has_padding


def test_types_that_are_not_cast(there):
    file, statements = there / "bytes.safetensors", there / "cast.aoa"
    save_file({"a": np.arange(6, dtype=np.uint8)}, file)
    statements.write_text('a -> b, dtype="float32"\n')
    said = refused(file, "--aoa", statements, "-o", "made.safetensors", status=1)
    assert "PP214" in said
    assert "`a` is uint8, which is not cast to float32" in said


def test_types_that_are_not_known(there):
    header = json.dumps({"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()
    (there / "new.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    said = refused("new.safetensors", "-o", "made.safetensors", status=2)
    assert "a has the type 'F4'" in said
    assert "damaged" not in said


def test_tensors_without_elements_and_numbers_go_over(there):
    arrays = {"none": np.zeros((0, 5), np.float32), "one": np.array(3.5), "few": np.arange(3, dtype=np.uint8)}
    save_file(arrays, there / "odd.safetensors")
    reshard("odd.safetensors", "-o", "made.safetensors")
    found = load_file(there / "made.safetensors")
    assert {name: (one.dtype, one.shape, one.tobytes()) for name, one in found.items()} == {
        name: (one.dtype, one.shape, one.tobytes()) for name, one in arrays.items()
    }


def test_a_models_directory_that_lacks_its_index(there):
    for name, file, said in (
        ("parts", "model-00001-of-00002.safetensors", "no model.safetensors.index.json"),
        ("pickles", "pytorch_model.bin", "safe_serialization=True"),
    ):
        (there / name).mkdir()
        (there / name / file).write_bytes(b"something")
        assert said in refused(name, "plan.yaml", "-o", "made", status=2)
    (there / "parts" / "model.safetensors.index.json").write_text("{}")
    assert "it has no `weight_map`" in refused("parts", "plan.yaml", "-o", "made", status=2)


def test_a_run_cannot_go_on_from_a_merged_file_and_is_reported_what_to_do(there):
    (there / "hf").mkdir()
    (there / "theirs.safetensors").rename(there / "hf" / "model.safetensors")
    for name in ("merged.safetensors", "hf"):
        with pytest.raises(StateError) as wrong:
            find_state(there / name)
        assert f"`pipeproof state reshard {there / name} --to PLAN -o STATE`" in wrong.value.findings[0].help


def test_the_command_that_continues_can_be_typed_as_it_is_shown(there):
    write_plan(there / "plan zwei.yaml", "one", DENSE)
    said = reshard("states", "--to", "plan zwei.yaml", "-o", "aus gabe")
    assert "resume: pipeproof run 'plan zwei.yaml' --resume 'aus gabe'\n" in said


def test_who_has_no_standard_error_is_served_all_the_same(there):
    command = [sys.executable, "-m", "pipeproof", "state", "reshard", "states", "--to", "plan.yaml", "-o", "made"]
    done = subprocess.run(["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command], env=AT_HAND, check=False)
    assert done.returncode == 0
    assert find_state(there / "made").index.steps_done == 3
