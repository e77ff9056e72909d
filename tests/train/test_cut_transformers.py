"""Stages of Hugging Face models, in one process, against the whole model: loss and all gradients bit for bit."""

import copy

import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode

from pipeproof.exec.train.torch.cut_transformers import causal_lm_loss, stages_of_transformers

pytestmark = [pytest.mark.needs_torch, pytest.mark.needs("transformers")]

SIZES = {
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
}
EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": False}
MIX = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
MODELS = {
    "llama": ("Llama", {}),
    "llama_eager": ("Llama", {"attn_implementation": "eager"}),
    "llama_scaled_rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}, "attention_bias": True},
    ),
    "mistral": ("Mistral", {"sliding_window": 3}),
    "qwen2_sliding": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0, "layer_types": MIX},
    ),
    "qwen3": ("Qwen3", {}),
    "qwen3_moe": ("Qwen3Moe", {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 16, "mlp_only_layers": [1]}),
    "mixtral": ("Mixtral", {**EXPERTS, "num_local_experts": 4, "sliding_window": None}),
    "gemma3": ("Gemma3", {"sliding_window": 3, "layer_types": MIX, "query_pre_attn_scalar": 8}),
}


def model_of(name="llama", **options):
    family, more = MODELS[name]
    config_class = getattr(transformers, f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(config_class(**{**SIZES, **tokens, **more, **options})).train()


def batch(rows=2, length=10):
    """Token ids, labels with some that do not count, and a mask with padding at the right of the last row."""
    ids = torch.randint(3, 37, (rows, length), generator=torch.Generator().manual_seed(1))
    labels, mask = ids.clone(), torch.ones_like(ids)
    mask[-1, -3:] = 0
    labels[mask == 0] = -100
    labels[0, :2] = -100
    return ids, labels, mask


def whole_step(model, ids, labels, **keywords):
    model.zero_grad()
    loss = model(ids, labels=labels, use_cache=False, **keywords).loss
    loss.backward()
    return loss.detach(), grads_of(model)


def staged_step(stages, ids, labels, **keywords):
    """Forward and backward stage after stage, with hidden states and their gradients alone at the boundaries."""
    inputs, outputs = [], []
    for number, stage in stages.items():
        inputs.append(outputs[-1].detach().requires_grad_() if number else ids)
        outputs.append(stage(inputs[-1], **keywords))
    loss = causal_lm_loss(outputs[-1], labels)
    loss.backward()
    for number in reversed(range(len(stages) - 1)):
        outputs[number].backward(inputs[number + 1].grad)
    return loss.detach()


def grads_of(module):
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def assert_same_step(model, stages, ids, labels, **keywords):
    reference = copy.deepcopy(model)
    loss, grads = whole_step(reference, ids, labels, **keywords)
    model.zero_grad()
    assert torch.equal(staged_step(stages, ids, labels, **keywords), loss)
    staged = {name: grad for stage in stages.values() for name, grad in grads_of(stage).items()}
    for names in stages.tied:  # the model lists a shared weight once, by its first name
        (first, *others) = [names[number] for number in sorted(names)]
        assert all(torch.equal(staged.pop(name), staged[first]) for name in others if name != first)
    assert staged.keys() == grads.keys()
    different = [name for name, grad in grads.items() if grad is None or not torch.equal(grad, staged[name])]
    assert different == []
    assert any(grad.abs().max() > 0 for grad in grads.values())


# --- the numbers ---


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", MODELS)
def test_stages_are_the_model_bit_for_bit(name, tied):
    model = model_of(name, tie_word_embeddings=tied)
    stages = stages_of_transformers(model, 3, blocks_per_stage=[1, 2, 1])
    ids, labels, mask = batch()
    assert stages.tied == (({0: "model.embed_tokens.weight", 2: "lm_head.weight"},) if tied else ())
    assert_same_step(model, stages, ids, labels)
    assert_same_step(model, stages, ids, labels, attention_mask=mask)


@pytest.mark.parametrize(
    "sizes", [[4], [2, 2], [1, 3], [0, 4], [4, 0], [0, 1, 3, 0], [0, 2, 1, 1, 0], [1, 0, 2, 0, 1]], ids=str
)
def test_any_sizes_give_the_same_bits(sizes):
    model = model_of(tie_word_embeddings=True)
    stages = stages_of_transformers(model, len(sizes), blocks_per_stage=sizes)
    assert [len(stage.blocks) for stage in stages.values()] == sizes
    assert [number for stage in stages.values() for number in stage.blocks] == [0, 1, 2, 3]
    assert_same_step(model, stages, *batch()[:2])


@pytest.mark.parametrize(("num_stages", "sizes"), [(1, [4]), (2, [2, 2]), (3, [2, 1, 1]), (4, [1, 1, 1, 1])])
def test_the_first_stages_have_more_blocks_without_sizes(num_stages, sizes):
    stages = stages_of_transformers(model_of(), num_stages)
    assert [len(stage.blocks) for stage in stages.values()] == sizes


def test_position_ids_may_be_given():
    model = model_of()
    stages = stages_of_transformers(model, 2)
    ids, labels, _ = batch()
    positions = torch.arange(10).flip(0).expand(2, 10)
    assert_same_step(model, stages, ids, labels, position_ids=positions)
    assert not torch.equal(whole_step(model, ids, labels, position_ids=positions)[0], whole_step(model, ids, labels)[0])


def test_sequences_packed_into_one_row_stay_apart():
    model = model_of()
    stages = stages_of_transformers(model, 2)
    ids, labels, _ = batch(rows=1)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])
    assert_same_step(model, stages, ids, labels, position_ids=positions)
    after = [stages[1](stages[0](tokens, position_ids=positions), position_ids=positions) for tokens in (ids, ids * 1)]
    ids[0, 0] = 36
    changed = stages[1](stages[0](ids, position_ids=positions), position_ids=positions)
    assert torch.equal(after[0], after[1])
    assert not torch.equal(changed[0, :4], after[0][0, :4])
    assert torch.equal(changed[0, 4:], after[0][0, 4:])


def masks_of_attention(stage, *args, **kwargs):
    """The masks that attention gets in a stage that is captured whole."""
    masks = []

    def backend(graph, _):
        calls = graph.graph.find_nodes(op="call_function", target=torch.nn.functional.scaled_dot_product_attention)
        masks.extend(call.kwargs.get("attn_mask") for call in calls)
        return graph.forward

    torch.compile(stage, backend=backend, fullgraph=True)(*args, **kwargs)
    return masks


@pytest.fixture(params=[False, True], ids=["", "exporting"])
def compiled_anew(request, monkeypatch):
    """Before 2.14, PyTorch says of every compilation that it exports; ``transformers`` makes a mask then."""
    torch.compiler.reset()
    stages_of_transformers(model_of(), 2)
    if request.param:
        monkeypatch.setattr("transformers.masking_utils.is_torchdynamo_exporting", torch.compiler.is_compiling)


@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.parametrize(("window", "has_mask"), [(None, False), (11, False), (10, True), (4, True)])
def test_a_captured_stage_has_a_mask_only_for_a_window(window, has_mask):
    model = model_of("mistral", sliding_window=window)
    stages = stages_of_transformers(model, 2)
    ids, labels, _ = batch()
    assert [mask is not None for mask in masks_of_attention(stages[0], ids)] == [has_mask] * 2
    assert_same_step(model, stages, ids, labels)


@pytest.mark.usefixtures("compiled_anew")
def test_a_captured_stage_has_no_mask_without_packed_sequences():
    stages = stages_of_transformers(model_of(), 2)
    ids, _, _ = batch(1)
    assert masks_of_attention(stages[0], ids) == [None, None]
    positions = torch.arange(10).expand(1, -1)
    assert None not in masks_of_attention(stages[0], ids, position_ids=positions)


def test_dropout_is_that_of_the_model():
    model = model_of(attention_dropout=0.5)
    stages = stages_of_transformers(model, 2)
    ids, labels, _ = batch()
    torch.manual_seed(5)
    loss, _ = whole_step(model, ids, labels)
    torch.manual_seed(5)
    assert torch.equal(staged_step(stages, ids, labels), loss)
    assert not torch.equal(staged_step(stages, ids, labels), loss)
    for stage in stages.values():
        stage.eval()
    assert torch.equal(staged_step(stages, ids, labels), model.eval()(ids, labels=labels).loss.detach())


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("after_the_cut", [False, True])
def test_gradient_checkpointing_works_as_in_the_model(reentrant, after_the_cut):
    model = model_of()
    ids, labels, mask = batch()
    plain, _ = whole_step(model, ids, labels, attention_mask=mask)
    stages = stages_of_transformers(model, 2) if after_the_cut else None
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    stages = stages or stages_of_transformers(model, 2)
    calls = []
    model.model.layers[3].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    assert torch.equal(staged_step(stages, ids, labels, attention_mask=mask), plain)
    assert len(calls) == 2
    assert_same_step(model, stages, ids, labels, attention_mask=mask)


def test_the_loss_is_that_of_transformers():
    model = model_of()
    ids, labels, _ = batch()
    output = model(ids, labels=labels)
    assert torch.equal(causal_lm_loss(output.logits, labels), output.loss)
    assert torch.equal(causal_lm_loss(output, labels), output.loss)
    half = output.logits.bfloat16()
    assert torch.equal(causal_lm_loss(half, labels), model.loss_function(half, labels, 37))
    assert causal_lm_loss(half, labels).dtype == torch.float32


# --- names, objects, devices ---


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_stages_have_the_parameters_and_names_of_the_model(tied):
    model = model_of(tie_word_embeddings=tied)
    before = model.state_dict()
    stages = stages_of_transformers(model, 3)
    weights = dict(model.named_parameters(remove_duplicate=False))
    for stage in stages.values():
        assert all(parameter is weights[name] for name, parameter in stage.named_parameters())
    states = [stage.state_dict() for stage in stages.values()]
    assert sum(map(len, states)) == len(before)
    assert {name for state in states for name in state} == before.keys() == model.state_dict().keys()
    assert "model.layers.2.self_attn.q_proj.weight" in states[1]
    assert next(iter(states[0])) == "model.embed_tokens.weight"
    assert list(states[2])[-2:] == ["model.norm.weight", "lm_head.weight"]


def test_the_model_itself_is_not_changed():
    model = model_of()
    model.model.layers[1].eval()
    described, (loss, grads) = repr(model), whole_step(model, *batch()[:2])
    stages = stages_of_transformers(model, 3)
    stages[0].model.register_forward_pre_hook(lambda *_: pytest.fail("a hook of a stage is called by the model"))
    assert repr(model) == described
    assert [block.training for block in model.model.layers] == [True, False, True, True]
    again, grads_again = whole_step(model, *batch()[:2])
    assert torch.equal(again, loss)
    assert all(torch.equal(grad, grads_again[name]) for name, grad in grads.items())


@pytest.mark.parametrize("name", ["llama", "llama_eager", "qwen2_sliding", "qwen3_moe", "mixtral", "gemma3"])
def test_a_model_on_the_meta_device_is_cut_and_gives_shapes(name):
    with torch.device("meta"):
        stages = stages_of_transformers(model_of(name, tie_word_embeddings=True), 2)
        ids, mask = torch.zeros(2, 10, dtype=torch.long), torch.ones(2, 10, dtype=torch.long)
    for keywords in ({}, {"attention_mask": mask}):
        hidden = stages[0](ids, **keywords)
        assert (hidden.device.type, tuple(hidden.shape)) == ("meta", (2, 10, 32))
        assert tuple(stages[1](hidden, **keywords).shape) == (2, 10, 37)
    assert len(stages.tied) == 1


@pytest.mark.parametrize("name", ["llama", "qwen2_sliding"])
def test_shapes_are_found_with_fake_tensors(name):
    stages = stages_of_transformers(model_of(name), 2)
    with FakeTensorMode(allow_non_fake_inputs=True):
        hidden = stages[0](torch.zeros(2, 10, dtype=torch.long), attention_mask=torch.ones(2, 10, dtype=torch.long))
        assert tuple(stages[1](hidden).shape) == (2, 10, 37)


def test_a_copied_stage_is_complete():
    model = model_of()
    stages = stages_of_transformers(model, 2)
    ids, labels, _ = batch()
    twin = copy.deepcopy(stages[1])
    hidden = stages[0](ids).detach()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert torch.equal(stages[1](hidden), torch.zeros(2, 10, 37))
    causal_lm_loss(twin(hidden), labels).backward()
    assert all(parameter.grad is not None for parameter in twin.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_module_replaced_in_a_stage_is_used():
    stages = stages_of_transformers(model_of(), 2)
    stages[1].lm_head = torch.nn.Linear(32, 5, bias=False)
    assert stages[1](stages[0](batch()[0])).shape == (2, 10, 5)


# --- refusals ---


@pytest.mark.parametrize(
    ("num_stages", "sizes", "expected"),
    [
        (0, None, "from 1 to 4"),
        (5, None, "from 1 to 4"),
        (2, [1, 2, 1], "has 3 sizes, and num_stages is 2"),
        (2, [1, 2], "adds up to 3, and the model has 4 blocks"),
        (3, [5, -2, 1], "leaves stage 1 -2 blocks"),
        (2, [5, -1], "leaves stage 1 -1 blocks"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(num_stages, sizes, expected):
    with pytest.raises(ValueError, match=expected):
        stages_of_transformers(model_of(), num_stages, blocks_per_stage=sizes)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_a_router_loss_is_refused(name):
    with pytest.raises(ValueError, match=r"config.output_router_logits = False"):
        stages_of_transformers(model_of(name, output_router_logits=True), 2)


def changed_layers(model):
    del model.model.layers[3]


def no_head(model):
    model.lm_head = None


def replaced_forward(model):
    model.model.forward = model.model.forward


def blocks_that_talk(model):
    """The last block adds the input of the first one: no tensor at a boundary has it."""
    first, last = model.model.layers[0], model.model.layers[3]
    kept = []

    class First(type(first)):
        def forward(self, hidden_states, **kwargs):
            kept[:] = [hidden_states]
            return super().forward(hidden_states, **kwargs)

    class Last(type(last)):
        def forward(self, hidden_states, **kwargs):
            return super().forward(hidden_states + kept[0], **kwargs)

    first.__class__, last.__class__ = First, Last


def embedding_in_every_block(model):
    class Repeating(type(model.model)):
        def forward(self, input_ids=None, inputs_embeds=None, **kwargs):
            inputs_embeds = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
            return super().forward(inputs_embeds=inputs_embeds, residual=inputs_embeds, **kwargs)

    class Block(type(model.model.layers[0])):
        def forward(self, hidden_states, residual=None, **kwargs):
            return super().forward(hidden_states + residual, **kwargs)

    model.model.__class__ = Repeating
    for block in model.model.layers:
        block.__class__ = Block


def blocks_in_another_order(model):
    class Reversed(type(model.model)):
        def forward(self, *args, **kwargs):
            usual, self.layers = self.layers, torch.nn.ModuleList(reversed(self.layers))
            try:
                return super().forward(*args, **kwargs)
            finally:
                self.layers = usual

    model.model.__class__ = Reversed


def blocks_left_out(model):
    model.model.layerdrop = 0.1


def weights_between_blocks(model):
    class Block(type(model.model.layers[0])):
        def forward(self, hidden_states, **kwargs):
            return super().forward(model.model.norm(hidden_states), **kwargs)

    model.model.layers[2].__class__ = Block


def own_parameter(model):
    model.model.scale = torch.nn.Parameter(torch.ones(()))


def other_arguments(model):
    class Closed(type(model.model)):
        def forward(self, input_ids):
            return super().forward(input_ids)

    model.model.__class__ = Closed


DIFFERENT = "its stages would not compute what its forward does"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (changed_layers, r"one list of 4 blocks, such as `model.layers`; its lists: `model.layers` of 3"),
        (no_head, r"does not run on input_ids \[3, 11\]"),
        (replaced_forward, "forward of `model` was replaced"),
        (blocks_that_talk, DIFFERENT),
        (embedding_in_every_block, DIFFERENT),
        (blocks_in_another_order, "does not call each block of `model.layers` once, in order"),
        (blocks_left_out, "set model.model.layerdrop = 0.0"),
        (weights_between_blocks, "weights between blocks: model.norm"),
        (own_parameter, "`model` has parameters of its own: scale"),
        (other_arguments, r"does not run on input_ids \[3, 11\]"),
    ],
)
def test_a_model_of_another_structure_is_refused(change, expected):
    model = model_of()
    change(model)
    with pytest.raises(ValueError, match=expected) as refused:
        stages_of_transformers(model, 2)
    assert "Error" not in str(refused.value)
    assert "object" not in str(refused.value)


def test_a_module_that_is_not_of_transformers_is_refused():
    with pytest.raises(ValueError, match=r"Linear cannot be cut: it is not a model of transformers"):
        stages_of_transformers(torch.nn.Linear(2, 2), 2)


def scaled_embeddings(model):
    class Scaled(type(model.model)):
        def forward(self, input_ids=None, inputs_embeds=None, **kwargs):
            inputs_embeds = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
            return super().forward(inputs_embeds=torch.nn.functional.dropout(inputs_embeds * 2.0, 0.0), **kwargs)

    model.model.__class__ = Scaled


def norm_of_embeddings(model):
    model.model.first_norm = torch.nn.LayerNorm(32)

    class Normed(type(model.model)):
        def forward(self, input_ids=None, inputs_embeds=None, **kwargs):
            inputs_embeds = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
            return super().forward(inputs_embeds=self.first_norm(inputs_embeds), **kwargs)

    model.model.__class__ = Normed


def two_norms(model):
    model.model.norm = torch.nn.Sequential(model.model.norm, torch.nn.LayerNorm(32))


@pytest.mark.parametrize("change", [scaled_embeddings, norm_of_embeddings, two_norms])
@pytest.mark.parametrize("sizes", [[2, 2], [0, 3, 1], [4, 0]], ids=str)
def test_what_surrounds_the_blocks_runs_in_the_first_and_last_stage(change, sizes):
    model = model_of()
    change(model)
    assert_same_step(model, stages_of_transformers(model, len(sizes), blocks_per_stage=sizes), *batch()[:2])


@pytest.mark.parametrize("family", ["GPTNeoX", "GPT2"])
def test_dropout_of_embeddings_runs_once_where_the_model_was_cut_in_eval_mode(family):
    """On the old code of a GPT-NeoX, every stage dropped 99 % of its input in training."""
    config = getattr(transformers, f"{family}Config")(
        vocab_size=37, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    config.hidden_dropout = config.embd_pdrop = 0.99
    config.attention_dropout = config.attn_pdrop = config.resid_pdrop = 0.0
    causal = f"{family}ForCausalLM" if family == "GPTNeoX" else "GPT2LMHeadModel"
    model = getattr(transformers, causal)(config).eval()
    stages = stages_of_transformers(model, 2, blocks_per_stage=[0, 2])
    assert not any(module.training for stage in stages.values() for module in stage.modules())
    for module in (model, *stages.values()):
        module.train()
    ids, labels, _ = batch()
    assert 0.95 < float((stages[0](ids) == 0).float().mean()) < 1.0
    torch.manual_seed(5)
    loss, _ = whole_step(model, ids, labels)
    torch.manual_seed(5)
    assert torch.equal(staged_step(stages, ids, labels), loss)


def test_the_cut_leaves_modes_dropout_generators_and_buffers():
    model = model_of(attention_dropout=0.25)
    model.model.layers[1].eval()
    model.model.layers[0].mlp.register_buffer("count", torch.zeros(()))
    model.model.layers[0].mlp.register_forward_hook(lambda module, *_: module.count.add_(1))
    state = torch.get_rng_state()
    stages = stages_of_transformers(model, 2)
    assert torch.equal(torch.get_rng_state(), state)
    assert float(model.model.layers[0].mlp.count) == 0
    assert [block.training for block in model.model.layers] == [True, False, True, True]
    assert [block.training for block in stages[0].blocks.values()] == [True, False]
    assert not model.model.layers[1].self_attn.training


def test_arguments_that_the_cut_was_not_checked_with_are_refused():
    stages = stages_of_transformers(model_of(), 2)
    with pytest.raises(ValueError, match=r"not checked with 'cu_seq_lens_q'.* `example`"):
        stages[0](batch()[0], cu_seq_lens_q=torch.zeros(3))


def test_a_stage_that_leaves_out_a_block_says_so():
    stages = stages_of_transformers(model_of(), 2)
    stages[1].model.layers = stages[1].model.layers[2:]
    with pytest.raises(RuntimeError, match=r"did not run the blocks \[2, 3\] of this stage"):
        stages[1](stages[0](batch()[0]))
