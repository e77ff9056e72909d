"""Layers of stages that were cut: their names, weights, outputs and bytes, and plans in this cut or another."""

import pytest
import torch
import transformers
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.plan_layers import declared_cut, planned_cut
from pipeproof.exec.train.torch.block_layers import described_layers, layer_names, layers_of
from pipeproof.exec.train.torch.boundary_inference import run_stage
from pipeproof.exec.train.torch.cut_transformers import stages_of_transformers
from pipeproof.exec.train.torch.model_stages import stages_of_sequential
from pipeproof.exec.train.torch.module_stage import trained
from tests.train.launch import run
from tests.train.test_cut_transformers import model_of

pytestmark = [pytest.mark.needs_torch, pytest.mark.needs("transformers")]
IDS = torch.zeros(2, 10, dtype=torch.long)


def t5():
    tokens = {"decoder_start_token_id": 0, "pad_token_id": 0}
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2}
    config = transformers.T5Config(vocab_size=37, **sizes, **tokens)
    return transformers.T5ForConditionalGeneration(config)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([4], [["embed", "layer.0", "layer.1", "layer.2", "layer.3", "head"]]),
        ([2, 2], [["embed", "layer.0", "layer.1"], ["layer.2", "layer.3", "head"]]),
        ([0, 3, 0, 1, 0], [["embed"], ["layer.0", "layer.1", "layer.2"], ["stage.2"], ["layer.3"], ["head"]]),
    ],
)
def test_blocks_are_layers_by_their_number_in_the_model(sizes, expected):
    stages = stages_of_transformers(model_of(), len(sizes), blocks_per_stage=sizes)
    assert [layer_names(number, stage) for number, stage in stages.items()] == expected


def test_an_encoder_and_a_decoder_have_their_own_names():
    stages = stages_of_transformers(t5(), 3, blocks_per_stage=[2, 1, 1])
    assert [layer_names(number, stage) for number, stage in stages.items()] == [
        ["encoder.embed", "encoder.layer.0", "encoder.layer.1", "encoder.head"],
        ["decoder.embed", "decoder.layer.0"],
        ["decoder.layer.1", "decoder.head"],
    ]


@pytest.mark.parametrize("sizes", [[4], [1, 3], [0, 4, 0]], ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_each_weight_belongs_to_one_layer_of_its_stage(sizes, tied):
    stages = stages_of_transformers(model_of(tie_word_embeddings=tied), len(sizes), blocks_per_stage=sizes)
    for number, stage in stages.items():
        layers = described_layers(number, stage, layers_of(stage))
        assert sorted(name for layer in layers for name in layer["names"]) == sorted(trained(stage))
        for layer in layers:
            for name, weight in zip(layer["names"], layer["parameters"], strict=True):
                assert weight["shape"] == list(trained(stage)[name].shape)
                is_block = layer["name"].startswith("layer.")
                assert name == (f"model.layers.{layer['name'][6:]}." if is_block else "") + weight["name"]
        kinds = {layer["name"]: layer["kind"] for layer in layers}
        assert kinds.get("embed", "Embedding") == "Embedding"
        assert kinds.get("head", "LlamaRMSNorm") in ("LlamaRMSNorm", "LlamaRMSNorm+Linear")


def test_a_weight_of_two_layers_of_a_stage_belongs_to_the_first():
    (stage,) = stages_of_transformers(model_of(tie_word_embeddings=True), 1).values()
    embed, *_, head = described_layers(0, stage, layers_of(stage))
    assert embed["names"] == head["shared"] == ["model.embed_tokens.weight"]
    assert head["names"] == ["model.norm.weight"]


@pytest.mark.parametrize("num_words", [37, 40_000], ids=["with_values", "without_values"])
@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
def test_outputs_of_blocks_are_seen_and_their_bytes_add_up(num_words, checkpointed):
    model = model_of(vocab_size=num_words)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": True} if num_words == 37 else None)
    (stage,) = stages_of_transformers(model, 1).values()
    seen, whole = (
        run_stage(0, stage, (IDS,), {}, torch.device("cpu"), is_last=True, layers=layers)
        for layers in (layers_of(stage), None)
    )
    assert [[(spec.shape, spec.has_gradient) for spec in outputs] for outputs in seen.inner] == [
        [((2, 10, 32), True)] for _ in range(5)
    ]
    assert sum(seen.kept) == sum(whole.kept)
    assert len(seen.kept) == 6
    assert whole.inner is None


def test_a_compiled_stage_is_seen_uncompiled():
    (stage,) = stages_of_transformers(model_of(), 1).values()
    for block in stage.blocks.values():
        block.compile(backend=not_called)
    seen = run_stage(0, stage, (IDS,), {}, torch.device("cpu"), is_last=True, layers=layers_of(stage))
    assert len(seen.inner) == 5
    assert seen.kept is None


def not_called(*_):
    raise AssertionError


class Tupled(nn.Linear):
    def forward(self, x):
        return super().forward(x), {"not": "a tensor"}


class Untupled(nn.Linear):
    def forward(self, values):
        return super().forward(values[0])


@pytest.mark.parametrize(
    ("modules", "num_seen"),
    [
        ([nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)], 2),
        ([Tupled(4, 4), Untupled(4, 4)], None),
        ([(shared := nn.Linear(4, 4)), nn.ReLU(), shared, shared], 3),
        ([(inner := nn.Linear(4, 4)), nn.Sequential(inner, nn.ReLU())], None),
    ],
    ids=["plain", "not_tensors", "repeated", "inside"],
)
def test_modules_of_a_sequential_are_layers_where_their_outputs_can_cross(modules, num_seen):
    (stage,) = stages_of_sequential(nn.Sequential(*modules), 1).values()
    layers = layers_of(stage)
    assert layers.names == tuple(f"layer.{number}" for number in range(len(modules)))
    seen = run_stage(0, stage, (torch.zeros(2, 4),), {}, torch.device("cpu"), is_last=True, layers=layers)
    assert (None if seen.inner is None else len(seen.inner)) == num_seen


def test_wrappers_do_not_matter(monkeypatch):
    monkeypatch.setattr(DistributedDataParallel, "__init__", lambda self, module: nn.Module.__init__(self))
    (stage,) = stages_of_sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), 1).values()
    wrapped = DistributedDataParallel(stage)
    wrapped.module = stage
    assert layer_names(0, wrapped) == layer_names(0, torch.compile(stage)) == ["layer.0", "layer.1"]
    assert layer_names(3, nn.Linear(2, 2)) == ["stage.3"]


OWN = [["embed", "layer.0"], ["layer.1", "layer.2", "head"]]


def plan_of(stages=None, layers=None):
    model = {} if layers is None else {"model": {"layers": [{"name": name} for name in layers]}}
    return model | ({} if stages is None else {"stages": stages})


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (None, OWN),
        (plan_of(), OWN),
        (plan_of(OWN), OWN),
        (plan_of(OWN, [*OWN[0], *OWN[1]]), OWN),
        (plan_of(layers=["stage.0", "stage.1"]), [["stage.0"], ["stage.1"]]),
        (plan_of(layers=["a", "b"]), [["stage.0"], ["stage.1"]]),
        (plan_of(layers=["a", "b", "c"]), OWN),
        ({"stages": 3, "model": {"layers": [3]}}, OWN),
    ],
)
def test_a_plan_has_the_layers_of_the_cut_or_one_for_each_stage(plan, expected):
    assert planned_cut(plan, OWN) == expected


def test_layers_without_stages_are_cut_evenly():
    assert declared_cut(plan_of(layers=list("abcde")), 2) == [["a", "b", "c"], ["d", "e"]]


@pytest.mark.parametrize(
    ("own", "planned", "fix"),
    [
        (
            OWN,
            [["embed", "layer.0", "layer.1"], ["layer.2", "head"]],
            r"transformers\(.., 2, blocks_per_stage=\[2, 1\]",
        ),
        (
            OWN,
            [["embed"], ["layer.0", "layer.1", "layer.2"], ["stage.2"], ["head"]],
            r"\(.., 4, blocks_per_stage=\[0, 3, 0, 0\]",
        ),
        (
            [["layer.0"], ["layer.1", "layer.2"]],
            [["layer.0", "layer.1"], ["layer.2"]],
            r"sequential\(.., 2, sizes=\[2, 1\]",
        ),
    ],
)
def test_the_same_layers_in_another_cut_are_refused_with_the_sizes_that_fit(own, planned, fix):
    with pytest.raises(PipelineError, match=fix):
        planned_cut(plan_of(planned), own)


@pytest.mark.slow(but=["zb_v"])
@pytest.mark.parametrize("kind", ["1f1b", "zb_v", "dualpipe"])
def test_a_saved_plan_trains_again_and_another_cut_is_refused(kind):
    run("block_layers.py", 2, kind)
