"""DeepSeek-V4 as Hugging Face's files have it: out, into transformers, and in again; its tables of experts."""

import hashlib
import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pipeproof.diagnostics.source import PlanFileError
from pipeproof.interop.importers.imported import Flags
from pipeproof.interop.importers.model_sizes import read_model_config
from pipeproof.interop.importers.plan_builder import PlanBuilder
from pipeproof.stages.describe.synthetic import hash_tables
from pipeproof.state.names.part_tables import config_of
from tests.state.names.models import DEEPSEEK_V4, plan_of
from tests.state.reshard.plans import files_of, reshard, state_of, subject_of, write_plan

WITH_MODULE = {
    "compressed_attention": {
        **DEEPSEEK_V4["compressed_attention"],
        "layer_types": [*DEEPSEEK_V4["compressed_attention"]["layer_types"], *["sliding_attention"] * 2],
    },
    "mtp": {"num_modules": 1, "reads": "streams", "magic_send": True},
}
MODEL = DEEPSEEK_V4 | {"hidden_size": 8, "num_heads": 4, "vocab_size": 16, "seq_length": 8}
TABLES = "model-00002-of-00002.safetensors"
TABLE = "layers.1.ffn.gate.tid2eid"


def plan_file(path, topology="one", model=MODEL, seed=7):
    return write_plan(path, topology, model, backend="torch", seed=seed)


def written(tmp_path, topology="one", model=MODEL):
    """A state, and the directory that it becomes under Hugging Face's names."""
    state, out = state_of(plan_file(tmp_path / "a.yaml", topology, model), tmp_path / "of_a"), tmp_path / "model"
    reshard(state, "-o", out, "--names", "huggingface")
    return state, out


@pytest.mark.parametrize(
    "more", [{}, {"unpadded_vocab_size": 13}, WITH_MODULE], ids=["plain", "padded", "with the module"]
)
def test_a_state_goes_out_and_comes_in_bit_for_bit_for_another_topology(tmp_path, more):
    state, out = written(tmp_path, "tp2_pp2", MODEL | more)
    assert sorted(path.name for path in out.glob("*.json")) == [
        "config.json", "model-00001-of-00002.safetensors.provenance.json", "model.safetensors.index.json",
    ]  # fmt: skip
    plan = subject_of(tmp_path / "a.yaml").plan.spec
    expected = hash_tables(plan)["layer.1.mlp"][: plan.gpt.num_token_ids]
    np.testing.assert_array_equal(load_file(out / TABLES)[TABLE], expected)
    b = plan_file(tmp_path / "b.yaml", "ep2_pp2", MODEL | more)
    reshard(out, "--to", b, "--names", "huggingface", "-o", tmp_path / "in")
    reshard(state, "--weights-only", "--to", b, "-o", tmp_path / "direct")
    came, direct = files_of(tmp_path / "in"), files_of(tmp_path / "direct")
    if "unpadded_vocab_size" not in more:  # padding is dropped, and comes back as zeros
        assert came == direct
    assert len(came) == len(direct) == 4


@pytest.mark.needs_torch
@pytest.mark.needs("transformers")
@pytest.mark.parametrize("more", [{}, {"tied_embedding": True}, {"unpadded_vocab_size": 13}])
def test_transformers_loads_the_directory_strictly(tmp_path, more):
    from transformers import AutoModelForCausalLM

    _, out = written(tmp_path, model=MODEL | more)
    network, loading = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert type(network).__name__ == "DeepseekV4ForCausalLM"
    assert not any(loading[keys] for keys in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    theirs, (weights, tables) = network.state_dict(), (load_file(path) for path in sorted(out.glob("*.safetensors")))
    np.testing.assert_array_equal(theirs["model.layers.1.mlp.gate.tid2eid"].numpy(), tables[TABLE])
    bias = theirs["model.layers.3.mlp.gate.e_score_correction_bias"].numpy()
    np.testing.assert_array_equal(bias, weights["layers.3.ffn.gate.bias"])
    assert weights["layers.3.ffn.gate.bias"].any()
    network.save_pretrained(tmp_path / "saved")
    for directory, came in ((out, "from_ours"), (tmp_path / "saved", "from_theirs")):
        reshard(directory, "--to", tmp_path / "a.yaml", "--names", "huggingface", "-o", tmp_path / came)
    assert files_of(tmp_path / "from_ours") == files_of(tmp_path / "from_theirs")
    numbers = sum(tensor.numel() for name, tensor in theirs.items() if "inv_freq" not in name)
    copies = theirs["lm_head.weight"].numel() if "tied_embedding" in more else 0
    assert numbers - copies == sum(array.size for array in (weights | tables).values())


CHANGES = {
    "another table": (lambda table: {TABLE: np.roll(table, 1, axis=0)}, "token id 0 is sent to"),
    "one expert": (lambda table: {TABLE: table + (np.arange(table.size).reshape(table.shape) == 7)}, "token id 2 is"),
    "no table": (lambda _: {}, "the checkpoint has none"),
    "a row more": (lambda table: {TABLE: np.concatenate([table, table[:1]])}, "int64 [17, 3]"),
    "another type": (lambda table: {TABLE: table.astype(np.float32)}, "it is float32"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_table_that_is_not_the_plans_is_refused(tmp_path, change):
    _, out = written(tmp_path)
    changed, wanted = CHANGES[change]
    tables = load_file(out / TABLES)
    index = out / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    tables |= changed(tables.pop(TABLE))
    content["weight_map"] = {
        name: file for name, file in content["weight_map"].items() if file != TABLES or name in tables
    }
    save_file(tables, out / TABLES)
    index.write_text(json.dumps(content))
    words = (out, "--to", tmp_path / "a.yaml", "--names", "huggingface", "-o", tmp_path / "in")
    said = reshard(*words, status=2)
    assert "PP929" in said
    assert wanted in said.replace("\n  ", " ").replace("\n", " ")
    assert not (tmp_path / "in").exists()


def with_tables(path, out, sha256="0" * 64, model=MODEL):
    tables = {"path": str(out), "sha256": sha256}
    return plan_file(path, model={**model, "moe": {**model["moe"], "hash_tables": tables}}, seed=8)


def sha256_of(*tables):
    return hashlib.sha256(b"".join(table.astype("<i8").tobytes() for table in tables)).hexdigest()


@pytest.mark.parametrize("more", [{}, {"unpadded_vocab_size": 13}], ids=["plain", "padded"])
def test_released_weights_with_their_tables_are_continued(tmp_path, more):
    """A plan that names the files takes their weights whatever its seed, and gives the same files again."""
    model = MODEL | more
    _, out = written(tmp_path, model=model)
    tables = load_file(out / TABLES)
    digest = sha256_of(*(tables[f"layers.{n}.ffn.gate.tid2eid"] for n in range(model["moe"]["hash_layers"])))
    said = reshard(out, "--to", with_tables(tmp_path / "b.yaml", out, model=model), "--names", "huggingface", "-o",
                   tmp_path / "in", status=2)  # fmt: skip
    assert f"set it to {digest}" in said.replace("\n", " ")
    plan = with_tables(tmp_path / "b.yaml", out, digest, model)
    spec = subject_of(plan).plan.spec
    expected = np.concatenate([tables[TABLE], np.repeat(tables[TABLE][:1], 16 - len(tables[TABLE]), axis=0)])
    np.testing.assert_array_equal(hash_tables(spec)["layer.1.mlp"], expected)
    reshard(out, "--to", plan, "--names", "huggingface", "-o", tmp_path / "in")
    reshard(tmp_path / "in", "-o", tmp_path / "again", "--names", "huggingface")
    np.testing.assert_array_equal(load_file(tmp_path / "again" / TABLES)[TABLE], tables[TABLE])
    said = reshard(tmp_path / "in", "--weights-only", "--to", plan_file(tmp_path / "c.yaml", model=model), "-o",
                   tmp_path / "other", status=2)  # fmt: skip
    assert "hash_tables.sha256 was" in said.replace("\n", " ")


def with_an_unknown_expert(table):
    changed = table.copy()
    changed[1, 2] = 99
    return {TABLE: changed}


TABLE_FAULTS = {
    "no table": (lambda table: {}, "is missing"),
    "a row more": (lambda table: {TABLE: np.concatenate([table, table[:1]])}, "is [17, 3], and for the model [16, 3]"),
    "an expert that is none": (with_an_unknown_expert, "sends token id 1 to"),
    "an expert twice": (lambda table: {TABLE: np.stack([table[:, 0]] * 3, 1)}, "sends token id 0 to"),
    "another type": (lambda table: {TABLE: table.astype(np.float32)}, "cannot be read"),
}


@pytest.mark.parametrize("fault", TABLE_FAULTS)
def test_tables_of_a_file_are_those_of_the_model(tmp_path, fault):
    _, out = written(tmp_path)
    changed, wanted = TABLE_FAULTS[fault]
    tables = load_file(out / TABLES)
    save_file(tables | changed(tables.pop(TABLE)), tmp_path / "tables.safetensors")
    with pytest.raises(PlanFileError) as caught:
        subject_of(with_tables(tmp_path / "b.yaml", "tables.safetensors")).plan  # noqa: B018 - it is computed
    (finding,) = caught.value.findings
    assert finding.code == "PP106"
    assert wanted in finding.message
    assert finding.location.file.endswith("b.yaml")


def test_a_plan_with_another_seed_takes_neither_the_files_nor_the_weights(tmp_path):
    state, out = written(tmp_path)
    other = plan_file(tmp_path / "other.yaml", seed=8)
    said = reshard(out, "--to", other, "--names", "huggingface", "-o", tmp_path / "in", status=2)
    assert "PP929" in said
    said = reshard(state, "--weights-only", "--to", other, "-o", tmp_path / "in", status=2)
    assert "run.seed was 7 and is 8" in said.replace("\n", " ")
    scored = {**MODEL, "moe": {**MODEL["moe"], "hash_layers": 0}}  # no table: weights mean the same with any seed
    state = state_of(plan_file(tmp_path / "c.yaml", model=scored), tmp_path / "of_c")
    reshard(state, "--weights-only", "--to", plan_file(tmp_path / "d.yaml", model=scored, seed=8), "-o", tmp_path / "d")


def test_one_file_has_no_place_for_tables(tmp_path):
    state = state_of(plan_file(tmp_path / "a.yaml"), tmp_path / "of_a")
    said = reshard(state, "-o", tmp_path / "model.safetensors", "--names", "huggingface", status=2)
    assert "name a directory" in said.replace("\n", " ")
    reshard(state, "--weights-only", "-o", tmp_path / "own.safetensors")  # pipeproof's own names have no tables


@pytest.mark.parametrize("rope", [2, 30, 44])
def test_the_importer_reads_the_configuration_back_and_transformers_rotates_as_many_elements(tmp_path, rope):
    sizes = {"head_size": 44, "compressed_attention": {**MODEL["compressed_attention"], "qk_rope_head_dim": rope}}
    sizes["compressed_attention"] |= {"index_head_dim": 48, "rope_theta": 5e3, "compress_rope_theta": 7e4}
    yarn = {"factor": 16.0, "original_max_position_embeddings": 65536, "beta_fast": 30.0, "beta_slow": 2.0}
    sizes["compressed_attention"]["rope_scaling"] = yarn
    model = plan_of(**MODEL | sizes).model
    config = config_of(model, "float64")
    assert int(config["head_dim"] * config["partial_rotary_factor"]) == rope
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = PlanBuilder("model config", Flags())
    read_model_config(plan, tmp_path / "config.json")
    assert not plan.imported("", ()).ignored
    for key in ("num_layers", "hidden_size", "num_heads", "head_size", "vocab_size", "ffn_size", "swiglu_limit",
                "swiglu_formula"):  # fmt: skip
        assert plan.get("model", key) == getattr(model, key), key
    spec = model.compressed_attention.model_dump(mode="json", exclude={"rope_scaling"})
    assert {key: plan.get("model", "compressed_attention", "rope_scaling", key) for key in yarn} == yarn
    for key, value in spec.items():
        expected = [model.compressed_attention.type_of(n) for n in range(4)] if key == "layer_types" else value
        assert plan.get("model", "compressed_attention", key) == expected, key
    for key in ("num_experts", "top_k", "ffn_size", "num_shared_experts", "score", "routed_scale", "hash_layers"):
        assert plan.get("model", "moe", key) == getattr(model.moe, key), key
    for key, value in model.hyper_connections.model_dump().items():
        assert plan.get("model", "hyper_connections", key) == value, key
    assert ("model", "mtp") not in plan
