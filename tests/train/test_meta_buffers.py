"""Buffers that no state dict has, after the meta device: computed by models of Hugging Face, else refused by name."""

import pytest
import torch
from torch import nn

from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.torch.meta_buffers import note_empty_buffers, require_computed_buffers

pytestmark = pytest.mark.needs_torch
note_empty_buffers()


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", self.computed(), persistent=False)
        self.register_buffer("counted", torch.zeros(2))  # a state dict has it

    def computed(self):
        return 1e4 ** -torch.arange(0, 1, 0.25)


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.rotary, self.linear = Rotary(), nn.Linear(4, 4)


def empty_stage():
    with torch.device("meta"):
        stage = Stage()
    stage.to_empty(device="cpu")
    stage.load_state_dict(Stage().state_dict())
    return stage


@pytest.mark.parametrize(
    "moved",
    [
        lambda stage: stage,
        lambda stage: stage.to(torch.bfloat16),
        lambda stage: stage.double().float(),
        lambda stage: nn.Sequential(stage).to_empty(device="cpu")[0],
    ],
)
def test_a_buffer_that_to_empty_made_is_refused_by_name(moved):
    with pytest.raises(PipelineError, match=r"stage 3: buffer rotary\.frequencies has no values"):
        require_computed_buffers({3: moved(empty_stage())})


def test_to_empty_of_a_part_and_of_a_module_with_values_counts_too():
    part, whole = Stage(), Stage()
    part.rotary.to_empty(device="cpu")
    whole.to_empty(device="cpu")
    for stage in (part, whole):
        with pytest.raises(PipelineError, match=r"rotary\.frequencies"):
            require_computed_buffers({0: stage})


def assign(rotary):
    rotary.frequencies = rotary.computed()


def register_again(rotary):
    rotary.register_buffer("frequencies", rotary.computed(), persistent=False)


def copy(rotary):
    rotary.frequencies.copy_(rotary.computed())


@pytest.mark.parametrize("compute", [assign, register_again, copy])
def test_a_buffer_that_was_computed_is_accepted(compute):
    stage = empty_stage()
    compute(stage.rotary)
    require_computed_buffers({0: stage})
    require_computed_buffers({0: stage.to(torch.bfloat16)})


def test_other_modules_are_accepted():
    with torch.device("meta"):
        on_meta = Stage()
    require_computed_buffers({0: Stage().to(torch.bfloat16), 1: on_meta, 2: nn.BatchNorm1d(3).to_empty(device="cpu")})


# --- models of Hugging Face ---

ROPES = [
    {},
    {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
    {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 16},
    {
        "rope_type": "llama3", "factor": 2.0, "rope_theta": 1e4, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
]  # fmt: skip
FAMILIES = {
    **{f"Llama {rope.get('rope_type', 'default')}": ("Llama", {"rope_parameters": rope or None}) for rope in ROPES},
    "Gemma3": ("Gemma3", {"layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 8}),
    "Qwen3Moe": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}),
}


def config_of(family, **options):
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")
    sizes = {"vocab_size": 37, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    return kind(**{**sizes, **heads, "pad_token_id": 0, **options}), getattr(transformers, f"{family}ForCausalLM")


def stages_of(config, kind, *, num_stages=2, device="meta"):
    from pipeproof.exec.train.torch.cut_transformers import stages_of_transformers

    with torch.device(device):
        return stages_of_transformers(kind(config), num_stages)


@pytest.mark.needs("transformers")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_stage_of_hugging_face_computes_its_buffers_in_to_empty(name):
    family, options = FAMILIES[name]
    config, kind = config_of(family, **options)
    expected = {number: dict(stage.named_buffers()) for number, stage in stages_of(config, kind, device="cpu").items()}
    stages = stages_of(config, kind)
    for number, stage in stages.items():
        torch.empty(1000).fill_(float("nan"))  # memory that to_empty may get
        assert stage.to_empty(device="cpu") is stage
        buffers = dict(stage.named_buffers())
        assert buffers.keys() == expected[number].keys()
        assert all(torch.equal(buffers[key], expected[number][key]) for key in buffers)
    assert any(expected.values())
    require_computed_buffers(stages)


@pytest.mark.needs("transformers")
def test_to_empty_of_one_block_of_a_stage_computes_nothing_and_is_refused():
    stages = stages_of(*config_of("Llama"))
    stages[1].get_submodule("model.rotary_emb").to_empty(device="cpu")
    with pytest.raises(PipelineError, match=r"stage 1: buffer model\.rotary_emb\.inv_freq and 1 more"):
        require_computed_buffers({1: stages[1]})


@pytest.mark.needs("transformers")
def test_a_tied_weight_of_one_stage_stays_one_parameter_in_to_empty():
    config, kind = config_of("Llama", tie_word_embeddings=True)
    stage = stages_of(config, kind, num_stages=1)[0].to_empty(device="cpu")
    assert stage.get_parameter("lm_head.weight") is stage.get_parameter("model.embed_tokens.weight")
    assert not stage.get_parameter("lm_head.weight").is_meta
