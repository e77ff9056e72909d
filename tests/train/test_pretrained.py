"""Directories of Hugging Face next to the library's: the same values after a load, the same bytes after a save."""

import gc
import json
from pathlib import Path

import pytest
import torch

from pipeproof.diagnostics.finding import PipeproofError
from pipeproof.exec.store.train_errors import PipelineError
from tests.train.launch import run

pytestmark = [pytest.mark.needs_torch, pytest.mark.needs("transformers")]

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

from pipeproof.exec.train.torch.pretrained_load import _files_of  # noqa: E402 - it needs the packages checked above
from pipeproof.torch import (  # noqa: E402 - it needs the packages checked above
    initialize_weights,
    load_pretrained,
    save_pretrained,
    stages_of_transformers,
)

SIZES = {
    "vocab_size": 37, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}  # fmt: skip
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
MODELS = {
    "one file": (transformers.LlamaConfig, {}, "50GB"),
    "many files": (transformers.LlamaConfig, {}, "20KB"),
    "tied": (transformers.LlamaConfig, {"tie_word_embeddings": True}, "20KB"),
    "fused experts": (
        transformers.Qwen3MoeConfig,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        "20KB",
    ),
    "renamed experts": (transformers.MixtralConfig, {"num_local_experts": 4}, "20KB"),
    "buffers": (transformers.DeepseekV3Config, {**EXPERTS, **LATENT, "num_key_value_heads": 4}, "20KB"),
    "two ropes": (transformers.Gemma3TextConfig, {"query_pre_attn_scalar": 8}, "20KB"),
}


def config_of(name="many files", **options):
    kind, more, _ = MODELS[name]
    return kind(**{**SIZES, **more, **options})


def whole_model(config, **options):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, **options)


def meta_stages(config, num_stages=2, **options):
    with torch.device("meta"):
        return stages_of_transformers(whole_model(config, **options), num_stages)


def files_of(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def assert_same_values(stages, model):
    expected = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    for stage in stages.values():
        for name, value in (*stage.named_parameters(), *stage.named_buffers()):
            assert value.dtype == expected[name].dtype
            assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("name", MODELS)
def test_a_directory_becomes_stages_and_stages_the_directory(name, tmp_path):
    size = MODELS[name][2]
    whole_model(config_of(name)).save_pretrained(tmp_path / "new", max_shard_size=size)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    model.save_pretrained(tmp_path / "expected", max_shard_size=size)
    stages = meta_stages(config_of(name))
    load_pretrained(stages, tmp_path / "new")
    assert_same_values(stages, model)
    save_pretrained(stages, tmp_path / "made", max_shard_size=size)
    assert files_of(tmp_path / "made") == files_of(tmp_path / "expected")
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    assert_same_values(stages, read)


@pytest.mark.parametrize("name", ["many files", "fused experts"])
def test_stages_of_a_new_model_are_saved_as_the_model(name, tmp_path):
    model = whole_model(config_of(name))
    model.save_pretrained(tmp_path / "expected", max_shard_size="20KB")
    save_pretrained(stages_of_transformers(model, 3), tmp_path / "made", max_shard_size="20KB")
    assert files_of(tmp_path / "made") == files_of(tmp_path / "expected")


def test_values_get_the_type_of_the_stages_and_the_configuration_says_it(tmp_path):
    whole_model(config_of()).save_pretrained(tmp_path / "float32")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "float32", dtype=torch.bfloat16)
    model.generation_config.max_length = 7
    model.save_pretrained(tmp_path / "expected")
    stages = stages_of_transformers(model, 2)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    load_pretrained(stages, tmp_path / "float32")  # in place
    save_pretrained(stages, tmp_path / "made")
    assert files_of(tmp_path / "made") == files_of(tmp_path / "expected")
    assert json.loads((tmp_path / "made" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_later_save_replaces_weights_and_leaves_other_files(tmp_path):
    stages = stages_of_transformers(whole_model(config_of()), 2)
    save_pretrained(stages, tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    save_pretrained(stages, tmp_path, max_shard_size="20KB")
    assert not (tmp_path / "model.safetensors").exists()
    save_pretrained(stages, tmp_path)
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]


# --- names ---


def directory_of(tmp_path, change, **options):
    """A directory of a model whose tensors were changed by name."""
    model = whole_model(config_of("one file", **options))
    model.save_pretrained(tmp_path)
    tensors = change(safetensors.load_file(tmp_path / "model.safetensors"))
    safetensors.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    return model


def without(*names):
    return lambda tensors: {name: value for name, value in tensors.items() if name not in names}


def with_more(**shapes):
    return lambda tensors: {**tensors, **{name.replace("__", "."): torch.ones(s) for name, s in shapes.items()}}


def renamed(old, new):
    return lambda tensors: {name.replace(old, new): value for name, value in tensors.items()}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (without("lm_head.weight"), r"does not have lm_head\.weight of LlamaForCausalLM"),
        (without("model.norm.weight", "lm_head.weight"), r"lm_head\.weight and 1 more \(model\.norm\.weight\)"),
        (with_more(model__extra=(2,)), r"has model\.extra, which LlamaForCausalLM does not have"),
        (renamed("layers.3.mlp.up", "layers.3.mlp.upper"), r"has model\.layers\.3\.mlp\.upper_proj\.weight"),
        (with_more(lm_head__weight=(38, 32)), r"lm_head\.weight with shape \[38, 32\], and stage 1 needs \[37, 32\]"),
    ],
)
def test_names_and_shapes_are_checked_before_anything_changes(tmp_path, change, text):
    directory_of(tmp_path, change)
    stages = meta_stages(config_of())
    with pytest.raises(PipelineError, match=text):
        load_pretrained(stages, tmp_path)
    assert all(weight.is_meta for stage in stages.values() for weight in stage.parameters())


@pytest.mark.parametrize(
    ("change", "options"),
    [
        (with_more(model__layers__0__self_attn__rotary_emb__inv_freq=(4,)), {}),  # of old versions
        (renamed("model.", ""), {"tie_word_embeddings": True}),  # of the base model
        (renamed("model.embed_tokens", "lm_head"), {"tie_word_embeddings": True}),
    ],
)
def test_names_that_the_library_reads_are_read(tmp_path, change, options):
    directory_of(tmp_path, change, **options)
    stages = meta_stages(config_of(**options))
    load_pretrained(stages, tmp_path)
    assert_same_values(stages, transformers.AutoModelForCausalLM.from_pretrained(tmp_path))


def test_two_values_of_a_tied_weight_are_refused(tmp_path):
    directory_of(tmp_path, with_more(lm_head__weight=(37, 32)), tie_word_embeddings=True)
    with pytest.raises(PipelineError, match=r"other values for model\.embed_tokens\.weight and lm_head\.weight"):
        load_pretrained(meta_stages(config_of(tie_word_embeddings=True)), tmp_path)


def test_directories_without_safetensors_are_refused(tmp_path):
    stages = meta_stages(config_of())
    with pytest.raises(PipelineError, match="no local directory; download a model of the Hub first"):
        load_pretrained(stages, "Qwen/Qwen3-0.6B")
    with pytest.raises(PipelineError, match=r"no directory with model\.safetensors"):
        load_pretrained(stages, tmp_path)
    whole_model(config_of()).save_pretrained(tmp_path, max_shard_size="20KB")
    file = sorted(tmp_path.glob("*-of-*"))[1]
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(PipeproofError, match="cut short"):
        load_pretrained(stages, tmp_path)


def test_a_model_that_was_changed_is_refused(tmp_path):
    model = whole_model(config_of())
    model.model.layers[1].mlp.adapter = torch.nn.Linear(2, 2)
    with pytest.raises(PipelineError, match=r"stage 0 has model\.layers\.1\.mlp\.adapter\.weight, which Llama"):
        save_pretrained(stages_of_transformers(model, 2), tmp_path)


# --- new weights ---


def test_new_weights_are_those_of_the_library_and_equal_on_every_rank_of_a_stage():
    config = config_of(tie_word_embeddings=True, hidden_size=64, head_dim=16)
    stages, again, others = (meta_stages(config, 4) for _ in range(3))
    torch.empty(10**6).fill_(float("nan"))  # memory that parameters may get
    initialize_weights(stages, seed=5)
    initialize_weights({number: again[number] for number in (2, 1)}, seed=5)
    initialize_weights(others, seed=6)
    assert stages[0].get_parameter("model.embed_tokens.weight") is stages[3].get_parameter("lm_head.weight")
    names = [f"model.layers.{number}.mlp.up_proj.weight" for number in range(4)]
    up = [stages[number].get_parameter(name) for number, name in enumerate(names)]
    assert all(0.018 < weight.std() < 0.022 for weight in up)  # initializer_range is 0.02
    assert not torch.equal(up[1], up[2])
    assert all(torch.equal(up[n], again[n].get_parameter(names[n])) for n in (1, 2))
    assert not torch.equal(up[1], others[1].get_parameter(names[1]))
    assert torch.equal(stages[3].get_parameter("model.norm.weight"), torch.ones(64))
    buffers = dict(whole_model(config).named_buffers())
    assert all(torch.equal(value, buffers[name]) for n in range(4) for name, value in stages[n].named_buffers())


# --- memory, and ranks ---


def peak_of(work):
    """Bytes of memory at the peak of a call, above those before it."""

    def memory(key):
        (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
        return int(line.split()[1]) * 1024

    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak from here
    before = memory("VmRSS")
    work()
    return memory("VmHWM") - before


def test_a_rank_has_memory_for_its_own_stages_alone(tmp_path):
    config = config_of(hidden_size=512, intermediate_size=2048, vocab_size=8000, head_dim=128)
    whole_model(config).save_pretrained(tmp_path / "whole", max_shard_size="20MB")
    stages = meta_stages(config, 4)
    load_pretrained({2: stages[2]}, tmp_path / "whole")  # weights that are imported once
    own = sum(weight.nbytes for weight in stages[1].parameters())
    largest = max(weight.nbytes for weight in stages[1].parameters())
    whole = sum(weight.nbytes for stage in stages.values() for weight in stage.parameters())
    peak = peak_of(lambda: load_pretrained({1: stages[1]}, tmp_path / "whole"))
    assert peak < own + 2 * largest < whole / 3


def test_ranks_load_train_shard_and_save(tmp_path):
    done = run("pretrained_directories.py", 2, tmp_path)
    assert done.stdout.count("passed ") == 5


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "has no `weight_map`"), ("[]", "has no `weight_map`"), ('{"weight_map": 3}', "has no `weight_map`"),
     ('{"weight_map": {"w": "../w.safetensors"}}', "not a file of its directory"),
     ('{"weight_map": {"w": 3}}', "names 3")],
)  # fmt: skip
def test_an_index_that_names_no_files_is_refused(tmp_path, content, message):
    (tmp_path / "index.json").write_text(content)
    with pytest.raises(PipelineError, match=message):
        _files_of(tmp_path / "index.json")
