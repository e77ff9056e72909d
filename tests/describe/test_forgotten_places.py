"""Every place that must know a parameter: a new parameter that one of them forgot fails here, with the place's name.

The description of layers (``stages/describe/layers``) is the list of parameters with which all others are compared.
"""

from fractions import Fraction
from math import prod

import pytest

from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.stages.describe.activation_memory import Lifetime
from pipeproof.stages.describe.boundary import MicroBatchSize
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.layer import layer_kind
from pipeproof.stages.describe.layers.layer_operations import layer_operations
from pipeproof.stages.describe.layers.operations import Product, StreamWeights, weights_of
from pipeproof.stages.describe.model_family import stored_activations
from pipeproof.stages.describe.mtp_streams import mtp_streams_at
from pipeproof.stages.describe.op_work import ComputeUnit, Phase, layer_work
from pipeproof.stages.describe.typed_gpt import typed_gpt
from pipeproof.state.names.convention import OWN_NAMES
from pipeproof.state.names.convention_tables import CONVENTIONS, convention_of
from pipeproof.state.names.convention_tensors import convention_tensors
from pipeproof.state.names.convention_tensors import weights_of as own_weights
from pipeproof.state.names.name_codes import NoNamesError
from tests.plans import plan_dict

MOE = {"num_experts": 4, "top_k": 2, "ffn_size": 8, "num_shared_experts": 1, "dense_layers": 1}
MLA = {"kv_rank": 6, "nope_head_size": 4, "rope_head_size": 4, "value_head_size": 3, "q_rank": 5}
MODELS = {
    "Llama": {"num_kv_heads": 2},
    "experts": {"moe": MOE},
    "latent attention, MTP": {"mla": MLA, "mtp": {"num_modules": 1}},
    "streams": {"hyper_connections": {"streams": 2}},
    "GPT-3": {"norm": "layer", "positions": "learned", "mlp": "gelu", "biases": "all"},
    "biases, QK-norm": {"norm": "layer", "qk_norm": True, "biases": "all"},
    "Qwen": {"qk_norm": True, "biases": "qkv", "moe": MOE},
}


TO_THE_END_OF_W = (Lifetime.TO_WEIGHT, Lifetime.BETWEEN)
SIZE = MicroBatchSize(8, 2)


def spec_of(name, **topology):
    plan = plan_dict(
        model={"num_layers": 2, **MODELS[name]},
        topology={"pp": 1, **topology},
        schedule={"kind": "gpipe", "num_micro_batches": 3},
        run={"dtype": "float64", "steps": 1, "optimizer": "sgd"},
    )
    return plan_from_dict(plan).spec


def forgotten(place, names):
    """Fail with the place that lacks parameters."""
    assert not names, f"forgotten in {place}: {sorted(names)}"


def with_weights(spec, layer):
    """(Name, operation) of the layer's operations with weights; those of streams have dots in other names."""
    for operation in layer_operations(spec.model, layer.name):
        if weights_of(operation)[0]:
            is_of_streams = isinstance(operation, StreamWeights)
            yield operation.name.replace("_", ".") + ".gates" if is_of_streams else operation.name, operation


@pytest.mark.parametrize("name", MODELS)
def test_the_typed_programs_have_every_parameter(name):
    spec = spec_of(name)
    typed = typed_gpt(spec)
    for layer in describe_gpt(spec):
        own = {weight.name.removeprefix(f"{layer.name}.") for weight in (*layer.parameters, *layer.borrowed)}
        listed = {parameter.value.name for parameter in typed[layer_kind(spec.model, layer.name)].program.parameters}
        forgotten(f"stages/describe/typed_gpt.py, {layer.name}", own - listed)
        forgotten(f"stages/describe/layers/, {layer.name}", listed - own)


@pytest.mark.parametrize("name", MODELS)
def test_every_weight_has_work_and_memory_for_its_gradient(name):
    spec = spec_of(name, tp=2, sequence_parallel=True)
    for layer in describe_gpt(spec):
        operations = dict(with_weights(spec, layer))
        works = {work.name for work in layer_work(spec, layer.name, SIZE, 8) if work.phase is Phase.WEIGHT}
        biases = {f"{own}.bias" for own, op in operations.items() if isinstance(op, Product) and op.biased}
        forgotten(f"stages/describe/op_work.py, {layer.name}", (operations.keys() | biases) - works)
        kept = {held.name for held in stored_activations(spec, [layer], SIZE) if held.lifetime in TO_THE_END_OF_W}
        missing = {own for own in operations if not {own, f"{own}.grad"} & kept}
        forgotten(f"stages/describe/activation_memory.py, {layer.name}", missing)


@pytest.mark.parametrize("name", MODELS)
def test_every_matrix_has_its_product(name):
    """FLOPs of the weight gradients of a layer: two for each token and element of its matrices."""
    spec = spec_of(name)
    for layer in describe_gpt(spec):
        if layer.name == "embed":  # tokens and positions are looked up
            continue
        matrices = [weight for weight in (*layer.parameters, *layer.borrowed) if len(weight.shape) > 1]
        used = {True: Fraction(MOE["top_k"], MOE["num_experts"]), False: 1}
        elements = sum(used[".experts." in weight.name] * prod(weight.shape) for weight in matrices)
        works = layer_work(spec, layer.name, SIZE, 8)
        flops = sum(w.flops for w in works if w.phase is Phase.WEIGHT and w.unit is ComputeUnit.MATMUL)
        assert flops == 2 * mtp_streams_at(spec.model, layer.name) * SIZE.num_tokens * elements, layer.name


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("convention", [name for name in CONVENTIONS if name != OWN_NAMES])
def test_conventions_name_every_parameter_or_refuse_the_model(name, convention):
    model = spec_of(name).model
    own = {name: entry.shape for name, entry in own_weights(model, "float32").items()}
    try:
        tensors = convention_tensors(model, own, convention_of(convention, model), {})
    except NoNamesError:
        return
    forgotten(f"state/names/, {convention}", own.keys() - {view.source for tensor in tensors for view in tensor.views})


def in_torch_stage(spec):
    from tests.stages.torch.staged_run import StagedRun

    return next(StagedRun(spec).steps()).gradients


def in_torch_reference(spec):
    from pipeproof.stages.reference.torch_unpartitioned import run_unpartitioned

    return next(run_unpartitioned(spec)).gradients


def in_paddle_stage(spec):
    from tests.stages.staged_run import StagedRun

    return next(StagedRun(spec).steps()).gradients


def in_paddle_reference(spec):
    from pipeproof.stages.reference.unpartitioned import run_unpartitioned

    return next(run_unpartitioned(spec)).gradients


def in_ordered_reference(spec):
    from tests.stages.staged_run import run_in_order

    return next(iter(run_in_order(spec))).gradients


COMPUTED = {
    "stages/torch": (in_torch_stage, "torch"),
    "stages/reference/torch_model.py": (in_torch_reference, "torch"),
    "stages/paddle": (in_paddle_stage, "paddle"),
    "stages/reference/unpartitioned.py": (in_paddle_reference, "paddle"),
    "stages/reference/ordered_model.py": (in_ordered_reference, "paddle"),
}
"""Places that compute a model: its gradients by parameter, and the framework."""


@pytest.mark.parametrize(
    "place", [pytest.param(place, marks=getattr(pytest.mark, f"needs_{who}")) for place, (_, who) in COMPUTED.items()]
)
@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_gets_a_gradient(name, place):
    """A parameter that is not used keeps the zeros with which its gradient begins."""
    spec = spec_of(name)
    gradients = COMPUTED[place][0](spec)
    listed = {weight.name for layer in describe_gpt(spec) for weight in layer.parameters}
    forgotten(place, {name for name in listed if name not in gradients or not gradients[name].any()})
