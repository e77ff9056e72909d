"""Stages as graphs: F, I and W of modules that ``torch.compile`` captures, next to a whole backward in eager mode."""

import gc
import random
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pipeproof.exec.train.stage_boundaries import Boundaries, Form, LeafSpec
from pipeproof.exec.train.torch.module_stage import ModuleStage, StepData, trained
from pipeproof.stages.torch.backward_graphs import split_backward
from pipeproof.stages.torch.graph_capture import in_form
from pipeproof.torch import PipelineError

pytestmark = pytest.mark.needs_torch

WIDTH, ROWS = 8, 6
NUM = 3


class Block(nn.Module):
    """A norm, two products and a residual."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Attention(nn.Module):
    """A transformer block: causal attention of two heads and a gated product."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Stage:
    """A ``ModuleStage`` between two others, or the last with ``loss_fn``, and micro-batches for it."""

    def __init__(self, module, example, *, loss_fn=None, compiler="eager", has_input_gradient=True, kwargs=None):
        torch._dynamo.reset()
        self.module, self.loss_fn, self.kwargs = module, loss_fn, kwargs or {}
        self.has_input_gradient = has_input_gradient
        with torch.no_grad(), torch.random.fork_rng():
            output = module(example, **self.kwargs)
        leaves = output if isinstance(output, tuple) else (output,)
        specs = () if loss_fn else tuple(LeafSpec.of(x, has_gradient=x.is_floating_point()) for x in leaves)
        form = Form("tuple" if isinstance(output, tuple) else "tensor")
        self.stage = ModuleStage(
            1, module, Boundaries(Form("tensor"), form, specs), loss_fn, {name: name for name in trained(module)},
            splits=True, check_finite=False, compiler=compiler,
        )  # fmt: skip

    def step(self, inputs, targets=None, *, in_two=True):
        """Gradients of inputs and weights, and the losses, with W after all I, or after each."""
        self.module.zero_grad()
        kwargs = [self.kwargs] * len(inputs)
        self.stage.begin(StepData(kwargs={1: kwargs}, targets=targets))
        found, works = [], []
        for index, x in enumerate(inputs):
            leaf = x.clone().requires_grad_(self.has_input_gradient and x.is_floating_point())
            outputs = self.stage.forward((leaf,), step=0, index=index, split=0, watch=None)
            gradients = [_tangent(y) if y.requires_grad else None for y in outputs]
            works.append(self.stage.backward_input(outputs, [None] if self.loss_fn else gradients))
            found.append(leaf.grad)
            if not in_two:
                works.pop().accumulate()
        for work in works:
            work.accumulate()
        losses = [loss for _, loss in sorted(self.stage.data.terms.losses.items())]
        return [*found, *losses, *_gradients(self.module)]

    def expected(self, inputs, targets=None):
        """The same by the module itself, as autograd runs it."""
        self.module.zero_grad()
        found, losses = [], []
        for index, x in enumerate(inputs):
            leaf = x.clone().requires_grad_(self.has_input_gradient and x.is_floating_point())
            output = self.module(leaf, **self.kwargs)
            if self.loss_fn:
                returned = self.loss_fn(output, targets[index])
                loss = returned[0] if isinstance(returned, tuple) else returned
                losses.append(loss.detach())
                loss.backward()
            else:
                leaves = [y for y in (output if isinstance(output, tuple) else (output,)) if y.requires_grad]
                torch.autograd.backward(leaves, [_tangent(y) for y in leaves])
            found.append(leaf.grad)
        return [*found, *losses, *_gradients(self.module)]


def _tangent(y):
    return torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)


def _gradients(module):
    return [None if weight.grad is None else weight.grad.clone() for weight in module.parameters()]


def same_bits(found, expected):
    assert len(found) == len(expected)
    for mine, other in zip(found, expected, strict=True):
        assert (mine is None) == (other is None)
        assert mine is None or torch.equal(mine, other)


def inputs(rows=ROWS, dims=2, num=NUM):
    torch.manual_seed(1)
    return [torch.randn(*(2, rows, WIDTH)[3 - dims - (dims == 2) :][-dims:]) for _ in range(num)]


@pytest.mark.slow(only=["inductor"])
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_graphs_do_not_hold_the_weights_of_a_stage_that_is_gone(compiler):
    """Dynamo keeps its compiled code. A second Pipeline would have the weights of the first one next to its own."""
    module = Block()
    weights = [weakref.ref(weight) for weight in module.parameters()]
    stage = Stage(module, inputs()[0], compiler=compiler)
    for _ in range(2):
        stage.step(inputs())
    assert stage.stage.split == "graph"
    del module, stage
    gc.collect()
    assert [weight() for weight in weights] == [None] * 6


def check_graph(module, values=None, **options):
    """A stage that runs as graphs, with the bits of eager mode."""
    values = values or inputs()
    stage = Stage(module, values[0], **options)
    targets = [torch.zeros(ROWS, WIDTH)] * len(values) if options.get("loss_fn") else None
    expected = stage.expected(values, targets)
    same_bits(stage.step(values, targets), expected)
    same_bits(stage.step(values, targets, in_two=False), expected)
    assert stage.stage.split == "graph"
    return stage


def with_metrics(output, target):
    distance = output - target
    return distance.pow(2).mean(), {"largest": distance.abs().amax(), "rows": distance.mean(1)}


@pytest.mark.slow(only=["inductor"])
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_a_graph_returns_the_metrics_of_its_loss_function(compiler):
    module, values, targets = Block(), inputs(), [torch.ones(ROWS, WIDTH)] * NUM
    stage = Stage(module, values[0], loss_fn=with_metrics, compiler=compiler)
    found, expected = stage.step(values, targets), stage.expected(values, targets)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other)
    assert stage.stage.split == "graph"
    for index, x in enumerate(values):
        _, metrics = with_metrics(module(x), targets[index])
        torch.testing.assert_close(stage.stage.data.terms.metrics[index], {n: v.detach() for n, v in metrics.items()})


def random_module(seed):
    """Linear layers, norms, activations, weights that are used again, several outputs."""
    choose = random.Random(seed)
    torch.manual_seed(seed)

    class Random(nn.Module):
        def __init__(self):
            super().__init__()
            self.steps = nn.ModuleList(
                choose.choice([
                    lambda: nn.Linear(WIDTH, WIDTH), lambda: nn.Linear(WIDTH, WIDTH, bias=False), nn.GELU, nn.Tanh,
                    lambda: nn.LayerNorm(WIDTH), lambda: nn.RMSNorm(WIDTH), Block,
                ])()
                for _ in range(choose.randint(2, 6))
            )  # fmt: skip
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
            self.shift = nn.ParameterList(nn.Parameter(torch.randn(WIDTH)) for _ in range(2))
            self.again = [choose.random() < 0.3 for _ in self.steps]
            self.is_product = [choose.random() < 0.5 for _ in self.steps]
            self.outputs = choose.randint(1, 2)

        def forward(self, x):
            for step, again, is_product in zip(self.steps, self.again, self.is_product, strict=True):
                y = step(x)
                if again:
                    y = step(y)
                if is_product:
                    y = y @ self.weight
                x = x + y
            x = x + (self.shift[0] + self.shift[1])
            return x if self.outputs == 1 else (x, x[..., :4].sum(-1))

    return Random()


@pytest.mark.parametrize("seed", range(4))
def test_random_modules_have_the_bits_of_a_whole_backward(seed):
    check_graph(random_module(seed), has_input_gradient=bool(seed % 2))


def test_a_transformer_block_keeps_no_more_than_eager_mode():
    values = inputs(dims=3)
    stage = check_graph(Attention(), values)
    storages = {}
    weights = {weight.untyped_storage()._cdata for weight in stage.module.parameters()}

    def see(tensor):
        if tensor.untyped_storage()._cdata not in weights:
            storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
        stage.module(values[0].clone().requires_grad_())
    (kept,) = stage.stage.kept
    assert 0 < kept.by_graph <= sum(storages.values())


class Tied(nn.Module):
    """One weight in three uses, one transposed; a frozen layer; an output without a gradient."""

    def __init__(self):
        super().__init__()
        self.weight, self.frozen = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4), nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        x = torch.tanh(x @ self.weight) @ self.weight
        x = F.linear(self.frozen(x), self.weight)
        return x, x.argmax(-1)


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, *, mask=None, shift=0):
        x = self.layer(x) + shift
        return x if mask is None else x * mask


class Recomputed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Block()

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


class Whole(nn.Module):
    """A weight as large as the activation: its gradient is the tensor that is the input's."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.randn(ROWS, WIDTH))

    def forward(self, x):
        return x + self.shift


@pytest.mark.parametrize("make", [Tied, Recomputed, Whole, lambda: nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, 8))])
def test_tied_frozen_recomputed_and_full_weights(make):
    torch.manual_seed(0)
    check_graph(make())


@pytest.mark.parametrize("make", [lambda: random_module(0), Whole])
def test_one_gradient_of_several_weights_is_added_to_each_with_split_linear(make):
    stage = Stage(make(), inputs()[0], compiler=None)
    assert stage.stage.split == "linear"
    same_bits(stage.step(inputs()), stage.expected(inputs()))


def test_keyword_arguments_and_a_loss():
    check_graph(Masked(), kwargs={"mask": torch.randn(ROWS, WIDTH), "shift": 2}, loss_fn=F.mse_loss)


def test_autocast_has_the_bits_of_eager_mode():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stage = Stage(nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH)), inputs()[0])
        found = stage.step(inputs())
        stage.module.zero_grad()
        leaves = [x.clone().requires_grad_() for x in inputs()]
        outputs = [stage.module(x) for x in leaves]
    for y in outputs:
        y.backward(_tangent(y))
    assert stage.stage.split == "graph"
    same_bits(found, [*(x.grad for x in leaves), *_gradients(stage.module)])


def test_dropout_and_the_statistics_of_a_batch_norm():
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))
    start = {name: value.clone() for name, value in module.state_dict().items()}
    stage = Stage(module, inputs()[0])
    results = []
    for run in (stage.step, stage.expected):
        module.load_state_dict(start)
        torch.manual_seed(3)
        results.append([*run(inputs()), *(value.clone() for value in module.buffers())])
    assert stage.stage.split == "graph"
    same_bits(*results)


def test_an_embedding_is_left_to_w():
    tokens = [torch.randint(0, 5, (ROWS,)) for _ in range(NUM)]
    check_graph(nn.Sequential(nn.Embedding(5, WIDTH), Block()), tokens)


def test_each_length_has_a_graph():
    stage = Stage(Block(), inputs()[0])
    stage.stage._boundaries = Boundaries(
        Form("tensor"), Form("tensor"), stage.stage._boundaries.outputs,
        tuple((LeafSpec((rows, WIDTH), "float32", True),) for rows in (6, 4, 6)),
    )  # fmt: skip
    values = [inputs(rows)[0] for rows in (6, 4, 6)]
    same_bits(stage.step(values), stage.expected(values))
    assert len(stage.stage.kept) == 2


class Convolutions(nn.Sequential):
    """Three convolutions, one transposed, with a batch norm."""

    def __init__(self):
        super().__init__(
            nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 4, 3, padding=1, groups=2), nn.BatchNorm2d(4), nn.GELU(),
            nn.ConvTranspose2d(4, 4, 2, bias=False), nn.Conv2d(4, 2, 2), nn.Flatten(1),
        )  # fmt: skip


@pytest.mark.parametrize("has_input_gradient", [True, False])
def test_weight_gradients_of_convolutions_are_left_to_w(has_input_gradient):
    check_graph(Convolutions(), has_input_gradient=has_input_gradient)
    torch._dynamo.reset()
    x = torch.randn(ROWS, WIDTH).requires_grad_(has_input_gradient)
    backward, weights = _backward_graph(Convolutions(), x)
    graphs = split_backward(backward, weights, in_product=False)
    masks = [
        [node.args[-1] for node in graph.graph.nodes if "convolution_backward" in str(node.target)]
        for graph in (graphs.input_graph, graphs.weight_graph)
    ]
    assert masks[0] == [[True, False, False]] * (3 if has_input_gradient else 2)
    assert masks[1] == [[False, True, True], [False, True, False], [False, True, True]]


class Scaled(nn.Module):
    """A weight times the sum of another, whose gradient is one number in all elements."""

    def __init__(self):
        super().__init__()
        self.scale, self.weight = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        return x @ (self.weight * self.scale.sum())


class Matrices(nn.Module):
    """Matrices of a batch, used transposed, and one whose rows are not its memory's."""

    def __init__(self):
        super().__init__()
        self.each = nn.Parameter(torch.randn(2, WIDTH, WIDTH))
        self.columns = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH).t())

    def forward(self, x):
        y = torch.bmm(F.linear(x, self.columns).view(2, -1, WIDTH), self.each.transpose(1, 2))
        return y.reshape(x.shape[0], -1)


@pytest.mark.parametrize("compiler", [None, "eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", [Scaled, Matrices])
def test_gradients_have_the_layout_of_their_weights(make, compiler):
    torch.manual_seed(0)
    stage = Stage(make(), inputs()[0], compiler=compiler)
    found = stage.step(inputs())
    assert stage.stage.split == ("graph" if compiler else "linear")
    assert all(weight.grad.stride() == weight.stride() for weight in stage.module.parameters())
    expected = stage.expected(inputs())
    if compiler != "inductor":
        same_bits(found, expected)
    torch.testing.assert_close(found, expected)


class Half(nn.Module):
    """Half of a product is needed by the backward, as a view of all of it."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x):
        first, second = self.up(x).chunk(2, -1)
        return first.square() + second


def test_a_view_counts_as_the_memory_that_it_keeps():
    stage = check_graph(Half())
    (kept,) = stage.stage.kept
    assert kept.by_graph == 4 * ROWS * (WIDTH + 2 * WIDTH)


class Tempered(nn.Module):
    """A layer divided by a Python number, which a graph has as a constant."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, temperature):
        return self.layer(x) / temperature


def test_more_variants_than_the_limit_run_as_modules_from_then_on():
    with torch._dynamo.config.patch(recompile_limit=2), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stage = Stage(Tempered(), inputs()[0], kwargs={"temperature": 1.0})
        for temperature in (1.0, 1.5, 2.0, 1.0):
            stage.kwargs = {"temperature": temperature}
            same_bits(stage.step(inputs()), stage.expected(inputs()))
    assert sum("stage 1 does not run as graphs" in str(each.message) for each in caught) == 1
    assert stage.stage.split == "linear: Unsupported: Dynamo recompile limit exceeded"


class Branches(nn.Module):
    """Control flow that depends on values."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.layer(x) if x.sum() > 0 else self.layer(-x)


def hooked_weight():
    module = Block()
    module.up.weight.register_hook(lambda gradient: 2 * gradient)
    return module


def hooked_module():
    module = Block()
    module.up.register_full_backward_hook(lambda *_: None)
    return module


def after_accumulation():
    module = Block()
    module.up.weight.register_post_accumulate_grad_hook(lambda _: None)
    return module


@pytest.mark.parametrize(
    ("make", "split", "words"),
    [
        (Branches, "linear", "Data-dependent branching"),
        (hooked_weight, "linear", "`up.weight` has a hook"),
        (hooked_module, "linear", "module `up` has a backward hook"),
        (after_accumulation, "whole", "`up.weight` has a hook"),
    ],
)
def test_what_cannot_be_captured_runs_as_modules_with_the_reason(make, split, words):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stage = Stage(make(), inputs()[0])
        found = stage.step(inputs())
    assert sum("stage 1 does not run as graphs" in str(each.message) for each in caught) == 1
    same_bits(found, stage.expected(inputs()))
    assert stage.stage.split.startswith(f"{split}: ")
    assert words in stage.stage.split


class Reduced(nn.Module):
    """A sum over a process group."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.layer(x)
        total = x.detach().clone()
        dist.all_reduce(total)
        return x + total


def test_a_stage_that_communicates_runs_as_modules():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.warns(UserWarning, match="it communicates with other ranks"):  # noqa: PT031 - the stage and its step
            stage = Stage(Reduced(), inputs()[0])
            found = stage.step(inputs())
        same_bits(found, stage.expected(inputs()))
        assert stage.stage.split.startswith("linear: it communicates")
    finally:
        dist.destroy_process_group()


def test_a_sharded_stage_has_a_whole_backward():
    boundaries = Boundaries(Form("tensor"), Form("tensor"), (LeafSpec((ROWS, WIDTH), "float32", has_gradient=True),))
    with pytest.warns(UserWarning, match="stage 1 does not run as graphs, but as split=whole"):
        stage = ModuleStage(
            1, Block(), boundaries, None, {name: name for name in trained(Block())},
            splits=True, check_finite=False, compiler="eager",
            is_sharded=True,
        )  # fmt: skip
    assert stage.split == "whole: it is sharded by fully_shard"


def test_a_hook_that_is_added_after_the_capture_is_called():
    stage = check_graph(Block())
    for factor in (2, 3):  # the second may be where the first was in memory
        hook = stage.module.up.register_forward_hook(lambda _, __, output, factor=factor: factor * output)
        same_bits(stage.step(inputs()), stage.expected(inputs()))
        hook.remove()
        del hook
    same_bits(stage.step(inputs()), stage.expected(inputs()))
    assert stage.stage.split == "graph"


@pytest.mark.parametrize("is_last", [True, False])
def test_an_error_inside_of_a_graph_names_the_operation_and_the_module(is_last):
    module = nn.Sequential(nn.Embedding(5, WIDTH), nn.Linear(WIDTH, WIDTH))
    tokens = torch.arange(ROWS) % 5
    stage = Stage(module, tokens, loss_fn=F.mse_loss if is_last else None)
    targets = [torch.zeros(ROWS, WIDTH)] * 2 if is_last else None
    words = "stage 1, micro-batch 1: `aten.embedding` of module `0` in the graph of the forward raised IndexError"
    with pytest.raises(PipelineError, match=words):
        stage.step([tokens, tokens + 4], targets)


def _backward_graph(module, x):
    """The backward graph of a module, and the positions of its weights."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    found = {}

    def keep(graph, _):
        found["backward"] = graph
        return make_boxed_func(graph.forward)

    def backend(graph, example):
        found["weights"] = {n for n, value in enumerate(example) if isinstance(value, nn.Parameter)}
        forward = lambda graph, _: make_boxed_func(graph.forward)  # noqa: E731
        return aot_autograd(fw_compiler=forward, bw_compiler=keep)(graph, example)

    torch.compile(module, backend=backend, fullgraph=True)(x).sum().backward()
    return found["backward"], found["weights"]


def _operations(graph):
    return [node.target._opname for node in graph.graph.nodes if hasattr(node.target, "_opname")]


@pytest.mark.parametrize("has_input_gradient", [True, False])
def test_products_of_weights_are_in_w_and_the_rest_in_i(has_input_gradient):
    torch._dynamo.reset()
    x = torch.randn(ROWS, WIDTH).requires_grad_(has_input_gradient)
    backward, weights = _backward_graph(nn.Sequential(Block(), Block()), x)
    graphs = split_backward(backward, weights, in_product=False)
    assert _operations(graphs.weight_graph).count("mm") == 4
    assert _operations(graphs.input_graph).count("mm") == 4  # as far as the first norm
    assert "native_layer_norm_backward" in _operations(graphs.input_graph)
    factors = split_backward(backward, weights, in_product=True)
    assert "mm" not in _operations(factors.weight_graph)
    assert sorted(len(addend.outputs) for addend in factors.addends) == [1] * 8 + [2] * 4
    assert {addend.weight for addend in factors.addends} == weights


@pytest.mark.slow
@pytest.mark.parametrize("make", [Attention, Tied])
def test_inductor_is_deterministic_equal_when_split_and_near_eager_mode(make):
    torch.manual_seed(0)
    values = inputs(dims=3 if make is Attention else 2)
    stage = Stage(make(), values[0], compiler="inductor")
    found = stage.step(values)
    assert stage.stage.split == "graph"
    same_bits(stage.step(values), found)
    same_bits(stage.step(values, in_two=False), found)
    expected = stage.expected(values)
    exact = Stage(stage.module.double(), values[0].double(), compiler=None).expected([x.double() for x in values])
    for mine, eager, true in zip(found, expected, exact, strict=True):
        if true is not None:
            size = float(true.abs().max())
            bound = 8 * float((eager - true).abs().max()) + 64 * torch.finfo(torch.float32).eps * size
            assert float((mine - true).abs().max()) <= bound
    (kept,) = stage.stage.kept
    assert 0 < kept.by_graph <= kept.by_eager


class Scale(nn.Module):
    """A weight with leading dims of size 1 and one without, whose gradients are sums over rows and columns."""

    def __init__(self):
        super().__init__()
        self.whole, self.norm = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return torch.tanh(self.norm * (self.whole * x))


def _padded(x):
    """A copy with two more elements of memory after each row."""
    return x.new_empty(*x.shape[:-1], x.shape[-1] + 2)[..., :-2].copy_(x) if x.dim() else x


def change_outputs(monkeypatch, graph, change):
    """Replace Inductor by a compiler that changes the results of ``graph`` (F, I or W); list its graphs.

    It checks inputs as Inductor's code does: that reads memory in the form of the example.
    """
    compiled, changed = [], []

    def compile_graph(module, example, *, is_backward=False, **_):
        name = "F" if not is_backward else "I" if compiled[-1] == "F" else "W"
        compiled.append(name)
        code = fx.GraphModule(module, module.graph)
        forms = [(tuple(x.shape), x.stride(), x.dtype) for x in example]

        def run(inputs):
            for n, (x, (shape, stride, dtype)) in enumerate(zip(inputs, forms, strict=True)):
                torch._C._dynamo.guards.assert_size_stride(x, shape, stride, f"input {n} of {name}")
                assert x.dtype == dtype
            visible, *others = code(*inputs)  # the output of the stage, or the gradient of its input
            inputs.clear()
            results = [change(x) for x in others] if name == graph else others
            changed.extend(x for x, y in zip(others, results, strict=True) if x is not y)
            return [visible, *results]

        run._boxed_call = True
        return run

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", compile_graph)
    return compiled, changed


CHANGES = {
    "no dims of size 1": torch.squeeze,
    "one dim": lambda x: x.flatten() if x.is_contiguous() else x,
    "columns first": lambda x: x.mT.contiguous().mT if x.dim() > 1 else x,
    "padded": _padded,
    "float64": lambda x: x.double() if x.is_floating_point() else x,
}


@pytest.mark.slow(but=["padded-I"])
@pytest.mark.parametrize("graph", ["F", "I"])
@pytest.mark.parametrize("change", CHANGES)
def test_graphs_get_tensors_in_the_form_that_they_were_compiled_for(monkeypatch, change, graph):
    """A compiler may return tensors that no user sees in another form."""
    compiled, changed = change_outputs(monkeypatch, graph, CHANGES[change])
    torch.manual_seed(0)
    values = inputs(dims=3)
    stage = Stage(nn.Sequential(Scale(), Attention()), values[0], compiler="inductor")
    found = stage.step(values)
    assert stage.stage.split == "graph"
    assert compiled == ["F", "I", "W"]
    assert changed
    torch.testing.assert_close(found, stage.expected(values))


@pytest.mark.slow(only=["F-input gradients"])
@pytest.mark.parametrize(("graph", "name"), [("F", "input gradients"), ("I", "weight gradients")])
def test_a_graph_whose_input_has_other_elements_fails_with_its_stage_and_adds_nothing(monkeypatch, graph, name):
    change_outputs(monkeypatch, graph, lambda x: x.flatten()[1:])
    values = inputs(dims=3)
    stage = Stage(nn.Sequential(Scale(), Attention()), values[0], compiler="inductor")
    words = rf"stage 1, micro-batch 0: .* in the graph of the {name} raised ValueError: `\w+` came as "
    with pytest.raises(PipelineError, match=words):
        stage.step(values)
    assert [weight.grad for weight in stage.module.parameters()] == [None] * 9


def _compiled_for(example):
    """A call that returns its input, in the form of ``example``."""
    graph = fx.Graph()
    graph.output((graph.placeholder("sum_7"),))
    return in_form(lambda inputs: inputs, fx.GraphModule({}, graph), [example])


def test_a_repeated_row_and_a_dense_copy_of_it_have_each_others_form():
    repeated = torch.arange(4.0).expand(3, 4)
    (dense,) = _compiled_for(torch.empty(3, 4))([repeated])
    assert dense.stride() == (4, 1)
    assert torch.equal(dense, repeated)
    (again,) = _compiled_for(repeated)([dense])
    assert again.stride() == (0, 1)
    assert torch.equal(again, repeated)


@pytest.mark.parametrize("shape", [(4, 3), (2, 6), (11,), ()])
def test_another_order_of_dims_or_number_of_elements_is_refused(shape):
    with pytest.raises(ValueError, match=r"`sum_7` came as \[.*\], and the graph was compiled for \[3, 4\]"):
        _compiled_for(torch.empty(3, 4))([torch.empty(shape)])
