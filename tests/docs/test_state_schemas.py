"""The JSON of ``pipeproof state`` and its commands fits the published schemas."""

import json
from pathlib import Path

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from safetensors.numpy import save_file

from tests.cli.commands import invoke
from tests.state.reshard.plans import DENSE, state_of, write_plan

FOLDER = Path(__file__).parents[2] / "docs" / "schemas"
SLOTS = ("beta1_power", "beta2_power", "moment1", "moment2")


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    """Two plans, the state of one, and files with tensors that differ in elements, in form, and by name."""
    place = tmp_path_factory.mktemp("states")
    write_plan(place / "a.yaml", "sd4", DENSE)
    write_plan(place / "deeper.yaml", "one", {**DENSE, "num_layers": 5})
    state_of(place / "a.yaml", place / "of_a")
    save_file({"x": np.arange(4.0), "y": np.zeros(3), "z": np.ones(2)}, place / "one.safetensors")
    save_file(
        {"x": np.array([0.0, 2.0, 2.0, 3.0]), "y": np.zeros((3, 1)), "w": np.ones(2)}, place / "other.safetensors"
    )
    return place


def written(there, *words, schema, status=0):
    words = [str(there / word) if (there / word).exists() or word == "made" else word for word in words]
    result = invoke(*words, "--format", "json")
    assert result.exit_code == status, result.output
    content = json.loads(result.stdout)
    Draft202012Validator(json.loads((FOLDER / f"{schema}.schema.json").read_text())).validate(content)
    return content


def test_what_reshard_proves_and_makes(there):
    assert "output" not in written(there, "state", "reshard", "a.yaml", "a.yaml", "--check", schema="reshard")
    assert (
        written(there, "state", "reshard", "of_a", "a.yaml", "-o", "made", schema="reshard")["output"]["num_files"] == 4
    )
    content = written(there, "state", "reshard", "a.yaml", "deeper.yaml", "--check", schema="reshard", status=1)
    assert {finding["code"] for finding in content["findings"]} == {"PP213", "PP920"}
    written(there, "state", "reshard", "nothing", "a.yaml", "--check", schema="check", status=2)


def test_what_a_checkpoint_holds(there):
    assert written(there, "state", "show", "of_a", schema="checkpoint")["steps_done"] == 3
    assert written(there, "state", "show", "one.safetensors", schema="checkpoint")["steps_done"] is None
    assert "md5" in written(there, "state", "show", "of_a", "--md5", schema="checkpoint")


def test_what_statements_make(there):
    (there / "map.aoa").write_text("embed.weight^T -> c\nhead.weight -> _\n")
    content = written(there, "state", "aoa", "map.aoa", "--source", "a.yaml", schema="aoa")
    assert content["removed"] == ["head.weight", *(f"optimizer/{slot}/head.weight" for slot in SLOTS)]
    assert content["tensors"]["c"]["slabs"][0]["permutation"] == [1, 0]
    assert written(there, "state", "aoa", "map.aoa", "--source", "of_a", "--expand", schema="aoa").keys() == {
        "aoa_statements"
    }
    written(there, "state", "aoa", "a.yaml", "--names", "pipeproof", "--to-names", "huggingface", schema="aoa")
    written(there, "state", "aoa", "nothing", "--source", "a.yaml", schema="check", status=2)


def test_how_two_differ_and_what_is_at_fault(there):
    content = written(there, "state", "diff", "one.safetensors", "other.safetensors", schema="checkpoint", status=1)
    assert [sorted(one) for one in content["differ"]] == [
        ["elements", "farthest", "from", "tensor"],
        ["first", "second", "tensor"],
    ]
    assert written(there, "state", "diff", "of_a", "of_a", schema="checkpoint")["equal"]
    (there / "cut.safetensors").write_bytes((there / "one.safetensors").read_bytes()[:-1])
    assert "faults" in written(there, "state", "show", "cut.safetensors", "--verify", schema="checkpoint", status=1)
