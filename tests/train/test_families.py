"""The known models of ``stages_of_transformers``, cut in one process, against the whole model: bits of all gradients.

``validation/families.py`` has the models, and trains all families under schedules on two ranks.
"""

import json
from pathlib import Path

import pytest
import torch

from pipeproof.exec.train.torch.cut_transformers import KNOWN_MODELS, stages_of_transformers

pytestmark = [pytest.mark.needs_torch, pytest.mark.needs("transformers")]

ROOT = Path(__file__).parents[2]
FAMILIES = {
    "BERT": "bert (masked LM)",
    "BLOOM": "bloom",
    "DeepSeek-V3": "deepseek_v3",
    "DeepSeek-V4": "deepseek_v4",
    "Falcon": "falcon",
    "Gemma 3": "gemma3 (images)",
    "GLM-4": "glm4",
    "GPT-2": "gpt2 (sequence classification)",
    "GPT-NeoX": "gpt_neox",
    "gpt-oss": "gpt_oss",
    "Granite": "granite",
    "Llama": "llama (sequence classification)",
    "Llava": "llava",
    "Mistral": "mistral",
    "Mixtral": "mixtral",
    "OPT": "opt",
    "Qwen2": "qwen2",
    "Qwen2-VL": "qwen2_vl",
    "Qwen3": "qwen3",
    "Qwen3-MoE": "qwen3_moe",
    "T5": "t5",
    "ViT": "vit",
    "Whisper": "whisper",
}


@pytest.fixture
def families(validation_script):
    return validation_script("families")


def staged(stages, batch, target, families, family):
    """Loss and gradients of the stages in a loop over micro-batches; boundaries carry tensors and gradients alone."""
    num, losses = families.NUM_MICRO_BATCHES, []
    inputs, keywords = families.arguments(family, batch)
    for index in range(num):
        received = [tuple(value.chunk(num)[index] for value in inputs)]
        sent = []
        for stage in stages.values():
            output = stage(*received[-1], **{key: value.chunk(num)[index] for key, value in keywords.items()})
            sent.append(output if isinstance(output, tuple) else (output,))
            received.append(tuple(x.detach().requires_grad_(x.requires_grad) for x in sent[-1]))
        loss = families.loss_of(output, target.chunk(num)[index])
        losses.append(loss.detach())
        (loss / num).backward()
        for number in reversed(range(len(stages) - 1)):
            pairs = [(x, y.grad) for x, y in zip(sent[number], received[number + 1], strict=True) if y.grad is not None]
            torch.autograd.backward(*zip(*pairs, strict=True))
    gradients = {name: weight.grad for stage in stages.values() for name, weight in stage.named_parameters()}
    return torch.stack(losses).sum() / num, gradients


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_a_known_model_has_the_bits_of_the_whole(name, families):
    family = families.families()[FAMILIES[name]]
    model = families.model_of(family)
    batch, target = families.batch_of(family, model)
    reference = families.expected(model, batch, target)
    model = families.model_of(family)
    stages = stages_of_transformers(model, 3, **families.options(family, batch))
    shared = families.tied_names(model)
    result = families.verdict(reference, [staged(stages, batch, target, families, family)], shared)
    assert result == "right" or (shared and result.startswith("bound")), result


def test_known_models_train_under_all_schedules_by_the_table():
    rows = {
        row["name"]: row for row in json.loads((ROOT / "validation" / "results" / "families.json").read_text())["rows"]
    }
    assert FAMILIES.keys() == set(KNOWN_MODELS)
    for name in FAMILIES.values():
        assert {rows[name][kind].split(":")[0] for kind in ("1f1b", "interleaved", "zb_v")} <= {"right", "bound"}


@pytest.mark.parametrize(("num_stages", "sizes"), [(1, None), (2, [3, 5]), (2, [8, 0])])
def test_an_encoder_ends_with_a_stage(num_stages, sizes, families):
    model = families.model_of(families.families()["t5"])
    with pytest.raises(ValueError, match=r"at least 2 stages|no stage ends with the last of the 4 encoder blocks"):
        stages_of_transformers(model, num_stages, blocks_per_stage=sizes)


def test_a_stage_asks_for_what_the_model_reads_in_every_stage(families):
    model = families.model_of(families.families()["llama (sequence classification)"])
    stages = stages_of_transformers(model, 2)
    hidden = stages[0](torch.full((2, 5), 7), input_ids=torch.full((2, 5), 7))
    with pytest.raises(ValueError, match=r"every stage of this model reads 'input_ids': pass it by name"):
        stages[1](hidden)


def test_a_compiled_model_is_unwrapped(families):
    model = families.model_of(families.families()["llama"])
    compiled = torch.compile(model, backend="eager")
    model.compile(backend="eager")
    ids = torch.full((2, 5), 7)
    stages = stages_of_transformers(compiled, 2)
    weights = dict(model.named_parameters())
    assert all(weight is weights[name] for stage in stages.values() for name, weight in stage.named_parameters())
    assert stages[0](ids).shape == (2, 5, 32)


def test_adapters_inside_of_blocks_are_trained_and_prompts_are_refused(families):
    peft = pytest.importorskip("peft")
    model = families.model_of(families.families()["llama"])
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    stages = stages_of_transformers(adapted, 2)
    trained = [name for stage in stages.values() for name, p in stage.named_parameters() if p.requires_grad]
    assert len(trained) == 8
    assert trained[0] == "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    prompts = peft.get_peft_model(
        families.model_of(families.families()["llama"]),
        peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
    )
    with pytest.raises(ValueError, match="adds tokens to the prompt outside of the model"):
        stages_of_transformers(prompts, 2)
