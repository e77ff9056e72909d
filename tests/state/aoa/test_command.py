"""``pipeproof state aoa``: its output, in the words of its page, and its refusals."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from pipeproof.state.aoa.aoa_engine import program_map
from pipeproof.state.aoa.read_statements import read_file, read_statements
from pipeproof.state.aoa.tensor_families import metas_of_plan
from pipeproof.state.names.convention_maps import statements_between
from tests.cli.commands import invoke
from tests.state.runs import plan_of
from tests.state.tiny import write_state

ROOT = Path(__file__).parents[3]
FILE, PLAN = "examples/aoa/names.aoa", "examples/gpt_pp2_tp2_sp_full.yaml"


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)


aoa = functools.partial(invoke, "state", "aoa")


def test_the_page_has_the_example():
    assert (ROOT / FILE).read_text() in (ROOT / "docs" / "aoa.md").read_text()


def test_the_inverse_can_be_written_to_a_file_and_used(tmp_path):
    for options in ((), ("--expand",)):
        back = aoa(FILE, "--source", PLAN, "--inverse", *options).stdout
        made = made_metas(program_map(read_file(Path(FILE)), _metas(), None).tensors)
        assert set(program_map(read_statements(back, "back.aoa"), made, _metas()).tensors) == set(_metas())


def made_metas(tensors):
    from pipeproof.state.aoa.tensor_families import TensorMeta

    return {name: TensorMeta(tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


def _metas():
    from pipeproof.comm.lower import lower_loaded
    from pipeproof.specs.load_plan import load_plan

    return metas_of_plan(lower_loaded(load_plan(PLAN)))


def test_json_has_every_region_copy():
    shown = json.loads(aoa(FILE, "--source", PLAN, "--format", "json").stdout)
    query = shown["tensors"]["model.layers.3.self_attn.q_proj.weight"]
    assert [copy["source_offsets"] for copy in query["slabs"]] == [[0, 0], [0, 48], [0, 96], [0, 144]]
    assert query["slabs"][0]["permutation"] == [1, 0]
    assert json.loads(aoa(FILE, "--source", PLAN, "--format", "json", "--inverse").stdout).keys() == {"aoa_statements"}


def test_mistakes_is_shown_in_its_line(tmp_path):
    file = tmp_path / "map.aoa"
    file.write_text("# names\nlayer.$LAYER_ID.attn.qvk.weight -> a.$LAYER_ID\n")
    refused = aoa(file, "--source", PLAN)
    assert refused.exit_code == 2
    assert "error[PP181]: `layer.$LAYER_ID.attn.qvk.weight` matches no tensor of the source" in refused.stderr
    assert "2 | layer.$LAYER_ID.attn.qvk.weight -> a.$LAYER_ID" in refused.stderr
    assert "did you mean `layer.0.attn.qkv.weight`?" in refused.stderr
    findings = json.loads(aoa(file, "--source", PLAN, "--format", "json").stdout)["findings"]
    assert [finding["code"] for finding in findings] == ["PP181"]


def test_a_source_that_is_no_checkpoint_is_bad_input(tmp_path):
    for file, source, code in ((FILE, tmp_path, "PP9"), (FILE, "nowhere.yaml", "PP100"), ("nowhere", PLAN, "PP180")):
        refused = aoa(file, "--source", source)
        assert refused.exit_code == 2
        assert f"error[{code}" in refused.stderr


def test_statements_between_two_conventions_are_written(tmp_path):
    from pipeproof.specs.load_plan import load_plan

    text = statements_between("huggingface", "paddleformers", load_plan(PLAN).spec.model)
    words = (PLAN, "--names", "huggingface", "--to-names", "paddleformers")
    assert aoa(*words).stdout == text
    assert json.loads(aoa(*words, "--format", "json").stdout) == {"aoa_statements": text.splitlines()}
    saved = write_state(plan_of(model={"num_layers": 2}), tmp_path, 1)
    of_state = aoa(saved, "--names", "pipeproof", "--to-names", "megatron")
    assert (of_state.exit_code, "linear_qkv.weight" in of_state.stdout) == (0, True)


def test_what_cannot_be_written_between_conventions_is_refused(tmp_path):
    save_file({"a": np.zeros(2)}, tmp_path / "bare.safetensors")
    for location, code, why in (
        (PLAN, "PP928", "no naming convention `gguf`"),
        (tmp_path / "bare.safetensors", "PP924", "name the plan of the model"),
        (tmp_path / "none.yaml", "PP100", "none.yaml"),
        (tmp_path, "PP920", str(tmp_path)),
    ):
        refused = aoa(location, "--names", "gguf", "--to-names", "pipeproof")
        assert refused.exit_code == 2
        assert f"error[{code}" in refused.stderr
        assert why in refused.stderr
    for words in ((PLAN, "--names", "huggingface"), (PLAN, "--to-names", "huggingface"),
                  (PLAN, "--names", "huggingface", "--to-names", "pipeproof", "--inverse"),
                  (PLAN, "--names", "huggingface", "--to-names", "pipeproof", "--source", PLAN)):  # fmt: skip
        assert "--names and --to-names need each other" in aoa(*words).stderr
    assert "--source PLACE is missing" in aoa(FILE).stderr


@pytest.mark.parametrize("text", ["", "# nothing yet\n\n", "\ufeff \n"])
def test_a_file_without_statements_is_a_mistake(tmp_path, text):
    file = tmp_path / "map.aoa"
    file.write_text(text, encoding="utf-8")
    refused = aoa(file, "--source", PLAN)
    assert refused.exit_code == 2
    said = " ".join(refused.stderr.split())
    assert "map.aoa has no statement" in said
    assert "`aoa_statements: []` keeps every tensor unchanged" in said
