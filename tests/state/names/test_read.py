"""Other tools' files come in as the plan's weights; copies that differ are found before anything is moved."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.state.names.convention_maps import map_from_convention, map_from_own_names
from pipeproof.state.names.convention_tensors import weights_of
from pipeproof.state.open_checkpoint import open_checkpoint
from pipeproof.state.state_codes import CopiesDifferError, NoNamesError
from tests.plans import plan_dict
from tests.state.names.apply_map import apply_map
from tests.state.names.models import MODELS, NAMED, plan_of

COPIED = MODELS["tied with modules"]


def theirs_of(plan, convention="huggingface"):
    draw = np.random.default_rng(3)
    ours = {name: draw.normal(size=entry.shape) for name, entry in weights_of(plan.model, "float64").items()}
    made = apply_map(map_from_own_names(convention, plan.model, "float64"), ours)
    return ours, {name: np.ascontiguousarray(array) for name, array in made.items()}


def opened(tmp_path, arrays, files=1):
    """A file, or several with Hugging Face's index."""
    names = [f"model-{number}.safetensors" for number in range(files)]
    weight_map = {name: names[number % files] for number, name in enumerate(sorted(arrays))}
    for file in names:
        save_file({name: array for name, array in arrays.items() if weight_map[name] == file}, tmp_path / file)
    if files == 1:
        return open_checkpoint(tmp_path / names[0])
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return open_checkpoint(tmp_path)


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("model", [model for _, model, convention in NAMED if convention == "huggingface"])
def test_what_went_out_comes_in(tmp_path, model, files):
    plan = plan_of(**model)
    ours, theirs = theirs_of(plan)
    state_map = map_from_convention("huggingface", opened(tmp_path, theirs, files), plan)
    returned = apply_map(state_map, theirs)
    assert returned.keys() == ours.keys()
    assert all((returned[name] == ours[name]).all() for name in ours)
    read = {copy.source for tensor in state_map.tensors.values() for copy in tensor.copies}
    assert read | state_map.removed == theirs.keys()
    assert not read & state_map.removed


def test_another_type_is_cast_once(tmp_path):
    plan = plan_of()
    _, theirs = theirs_of(plan)
    theirs = {name: array.astype(np.float16) for name, array in theirs.items()}
    state_map = map_from_convention("huggingface", opened(tmp_path, theirs), plan)
    assert {copy.casts for tensor in state_map.tensors.values() for copy in tensor.copies} == {("float64",)}
    assert {tensor.dtype for tensor in state_map.tensors.values()} == {"float64"}


def test_a_tied_head_that_is_there_and_equal_is_removed(tmp_path):
    plan = plan_of(tied_embedding=True)
    _, theirs = theirs_of(plan)
    assert "lm_head.weight" not in theirs
    theirs["lm_head.weight"] = theirs["model.embed_tokens.weight"]
    assert map_from_convention("huggingface", opened(tmp_path, theirs), plan).removed == {"lm_head.weight"}


def refused(tmp_path, theirs, plan):
    with pytest.raises(CopiesDifferError) as error:
        map_from_convention("huggingface", opened(tmp_path, theirs), plan)
    (finding,) = error.value.findings
    assert finding.code == "PP929"
    return f"{finding.message} | {finding.help}"


@pytest.mark.parametrize(("first", "last"), [(0, 0), (30 * 24 + 5, 30 * 24 + 7), (100, 31 * 24 - 1)])
def test_a_tied_head_that_differs_is_named_with_the_first_range(tmp_path, first, last):
    plan = plan_of(tied_embedding=True)
    _, theirs = theirs_of(plan)
    head = theirs["model.embed_tokens.weight"].copy()
    head.reshape(-1)[first : last + 1] += 1.0
    text = refused(tmp_path, theirs | {"lm_head.weight": head}, plan)
    assert "lm_head.weight must be a copy of model.embed_tokens.weight" in text
    assert f"first in elements {first} to {last + 1}, from row {first // 24}, column {first % 24}, on" in text
    assert "tied_embedding: false" in text


def test_a_copy_of_another_shape_or_type_is_no_copy(tmp_path):
    plan = plan_of(tied_embedding=True)
    _, theirs = theirs_of(plan)
    head = theirs["model.embed_tokens.weight"].astype(np.float32)
    assert "float64 [31, 24], float32 [31, 24]" in refused(tmp_path, theirs | {"lm_head.weight": head}, plan)


@pytest.mark.parametrize(
    ("end", "fix"),
    [("embed_tokens", "share embedding"), ("shared_head.norm", "separate norms"), ("shared_head.head", "share")],
)
def test_copies_in_each_module_are_compared(tmp_path, end, fix):
    plan = plan_of(**COPIED)
    _, theirs = theirs_of(plan)
    theirs[f"model.layers.3.{end}.weight"] = theirs[f"model.layers.3.{end}.weight"] + 1e-9
    assert fix in refused(tmp_path, theirs, plan)


def test_own_layers_have_no_names_elsewhere(tmp_path):
    model = {"kind": "layers", "layers": [{"name": "one"}]}
    loss = {"normalization": "mean_of_micro_batches"}
    own = plan_from_dict(plan_dict(topology={"pp": 1}, loss=loss) | {"model": model}).spec
    _, theirs = theirs_of(plan_of())
    with pytest.raises(NoNamesError, match="custom layers"):
        map_from_convention("huggingface", opened(tmp_path, theirs), own)
