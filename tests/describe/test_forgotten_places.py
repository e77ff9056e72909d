"""Every place that must know a parameter or a part of the model: an omission fails here, with the place's name.

``forgotten`` has the checks.
"""

import ast
import re
from fractions import Fraction
from math import prod
from pathlib import Path

import pytest

import pipeproof
from pipeproof.stages.describe.boundary import MicroBatchSize
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.layers.layer_operations import layer_operations
from pipeproof.stages.describe.layers.operations import Product, StreamWeights, weights_of
from pipeproof.stages.describe.model_family import stored_activations
from pipeproof.stages.describe.mtp_streams import mtp_streams_at
from pipeproof.stages.describe.op_work import ComputeUnit, Phase, layer_work
from pipeproof.stages.describe.stage_memory import Lifetime
from tests.describe.forgotten import (
    COMPUTED,
    MODELS,
    MOE,
    NAMED,
    PARTS,
    check_digest,
    check_gradients,
    check_importers,
    check_names,
    check_parameters,
    check_rotation,
    check_settings,
    check_types,
    check_values,
    forgotten,
    spec_of,
)

TO_THE_END_OF_W = (Lifetime.TO_WEIGHT, Lifetime.BETWEEN)
SIZE = MicroBatchSize(8, 2)


def with_weights(spec, layer):
    """(Name, operation) of the layer's operations with weights; stream operations have dots in other names."""
    for operation in layer_operations(spec.model, layer.name):
        if weights_of(operation)[0]:
            is_of_streams = isinstance(operation, StreamWeights)
            yield operation.name.replace("_", ".") + ".gates" if is_of_streams else operation.name, operation


@pytest.mark.parametrize("name", MODELS)
def test_the_typed_programs_have_every_parameter(name):
    check_types(name)


@pytest.mark.parametrize("name", MODELS)
def test_every_weight_has_work_and_memory_for_its_gradient(name):
    spec = spec_of(MODELS[name], tp=2, sequence_parallel=True)
    for layer in describe_gpt(spec):
        operations = dict(with_weights(spec, layer))
        works = {work.name for work in layer_work(spec, layer.name, SIZE, 8) if work.phase is Phase.WEIGHT}
        biases = {f"{own}.bias" for own, op in operations.items() if isinstance(op, Product) and op.biased}
        forgotten(f"stages/describe/op_work.py, {layer.name}", (operations.keys() | biases) - works)
        kept = {held.name for held in stored_activations(spec, [layer], SIZE) if held.lifetime in TO_THE_END_OF_W}
        missing = {own for own in operations if not {own, f"{own}.grad"} & kept}
        forgotten(f"stages/describe/stage_memory.py, {layer.name}", missing)


@pytest.mark.parametrize("name", MODELS)
def test_every_matrix_has_its_product(name):
    """FLOPs of the weight gradients of a layer: two for each token and element of its matrices."""
    spec = spec_of(MODELS[name])
    for layer in describe_gpt(spec):
        if layer.name == "embed":  # tokens and positions are looked up
            continue
        matrices = [weight for weight in (*layer.parameters, *layer.borrowed) if len(weight.shape) > 1]
        used = {True: Fraction(MOE["top_k"], MOE["num_experts"]), False: 1}
        elements = sum(used[".experts." in weight.name] * prod(weight.shape) for weight in matrices)
        works = layer_work(spec, layer.name, SIZE, 8)
        flops = sum(w.flops for w in works if w.phase is Phase.WEIGHT and w.unit is ComputeUnit.MATMUL)
        assert flops == 2 * mtp_streams_at(spec.model, layer.name) * SIZE.num_tokens * elements, layer.name


@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_described_twice_and_keeps_other_digests(part):
    check_parameters(part)
    check_rotation(part)
    check_digest(part)


@pytest.mark.parametrize("kind", NAMED)
def test_other_tools_have_names_and_settings_for_a_part(kind):
    check_names(kind)
    check_settings(kind)


def test_the_importers_know_every_part(tmp_path):
    check_importers(tmp_path)


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(at, marks=getattr(pytest.mark, f"needs_{'torch' if 'torch' in at else 'paddle'}"))
        for at in COMPUTED
    ],
)
@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_gets_a_gradient(name, place):
    check_gradients(place, name)


@pytest.mark.needs_paddle
@pytest.mark.needs_torch
@pytest.mark.parametrize("part", PARTS)
def test_every_place_computes_the_same(part):
    check_values(part)


KEY = r"\b(?:model|gpt|_model)\.{0}\b(?!\.weight)|\b{0}: (?:bool|Literal)"
"""A file reads the key of a part from a plan's model, or declares it."""
ALSO = {
    "qk_norm": r"'qk_norm'|_head_norm|qk[-_]layernorm",
    "mlp": r"\('model', 'mlp'\)|'mlp': \(|gelu",
    "biases": r"'biases'|self\.used\.get\(|\{name\}\.bias' not in",
    "norm": r"\('model', 'norm'\)|'norm': \(?'(layer|rms)'|layer_norm\(",
    "positions": r"'positions'|'(embed\.)?positions\.weight'|(?<!action == )(?<!ction'\): )'learned'",
}
"""Other lines of a part: names of its weights, values and settings, and the function that only it needs."""
EVERY = ("specs/model", "stages/describe/typed_gpt", "state/names/part_tables", "interop/importers/model_parts")
REFERENCES = ("stages/reference/layer_math", "stages/reference/torch_model")
DESCRIBED = "stages/describe/layers"
PLACES = {
    "qk_norm": (*REFERENCES, f"{DESCRIBED}/attention", "stages/common/stage"),
    "mlp": (*REFERENCES, f"{DESCRIBED}/mlp", "stages/paddle/functional", "stages/torch/functional"),
    "biases": (
        "stages/reference/ordered_layers", "stages/reference/torch_reference_weights",
        f"{DESCRIBED}/layer_operations", "stages/common/stage",
    ),
    "norm": (*REFERENCES, f"{DESCRIBED}/operations", "stages/paddle/weights", "stages/torch/weights"),
    "positions": (
        *REFERENCES, f"{DESCRIBED}/layer_operations", f"{DESCRIBED}/attention", "stages/common/embedding_and_head",
    ),
}  # fmt: skip
"""By part, the files that must know it, in addition to `EVERY`."""
NOT_COUNTED = (
    "interop/tune_models.py",  # plans of published trainings: they give keys values, as plan files do
    "interop/importers/megatron/model_flags.py",  # it sets parts from a tool's own keys: PP177 has the others
    "analysis/align/record_map.py",  # the model that names in a record show: a part that it lacks has no partner
    "state/names/deepseek_v4.py",  # one model's names: it refuses every other part
)
GENERAL = {"biases": {"stages/common/stage.py"}}
"""Places without such a line: they use all weights that the description gives an operation."""


def is_written_in(text, lines):
    """True if the code of a file, without comments and docstrings, has one of the lines."""
    if not lines.search(text.replace('"', "'")):
        return False
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            node.value.value = ""
    return lines.search(ast.unparse(tree)) is not None


def test_a_part_is_written_in_the_listed_places_and_in_no_others():
    root = Path(pipeproof.__file__).parent
    texts = {file.relative_to(root).as_posix(): file.read_text(encoding="utf-8") for file in root.rglob("*.py")}
    texts = {file: text for file, text in texts.items() if file not in NOT_COUNTED}
    for part, places in PLACES.items():
        lines = re.compile(f"{KEY.format(part)}|{ALSO[part]}")
        found = {file for file, text in texts.items() if is_written_in(text, lines)}
        assert found | GENERAL.get(part, set()) == {f"{place}.py" for place in (*EVERY, *places)}, part
