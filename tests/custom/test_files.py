"""Files of custom layers with mistakes: the reported line and the suggested fix."""

import hashlib
import json
import textwrap

import numpy as np
import pytest

from pipeproof.diagnostics.finding import BadPlanAtError
from pipeproof.exec.launch.custom_layers_check import require_same_start, try_layers
from pipeproof.exec.launch.job_files import Job
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.verify.certificate import Certificate, Verdict
from tests.cli.commands import invoke, process
from tests.custom.plans import described, own_dict

pytestmark = pytest.mark.needs_paddle

GOOD = """
import paddle
from paddle import nn

def loss(output, labels):
    return (output - labels).square().mean()

def data(step, index, rng):
    x = rng.standard_normal((2, 3)).astype("float32")
    return x, x

def build():
    return [nn.Linear(3, 4), nn.functional.relu, nn.Linear(4, 3)], loss, data
"""
LAYERS = [
    {"name": "up", "out": [{"shape": ["b", 4]}],
     "parameters": [{"name": "weight", "shape": [3, 4]}, {"name": "bias", "shape": [4]}]},
    {"name": "act", "out": [{"shape": ["b", 4]}]},
    {"name": "down", "parameters": [{"name": "weight", "shape": [4, 3]}, {"name": "bias", "shape": [3]}]},
]  # fmt: skip


def tried(tmp_path, text, layers=LAYERS):
    """The error of a file's text."""
    file = tmp_path / "mine.py"
    file.write_text(textwrap.dedent(text))
    with pytest.raises(BadPlanAtError) as caught:
        try_layers(plan_from_dict(own_dict(f"{file}:build", 2, layers)).spec)
    return caught.value


def test_a_good_file_is_the_base_of_the_others(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(GOOD)
    weights = try_layers(plan_from_dict(own_dict(f"{file}:build", 2, LAYERS)).spec)
    assert list(weights) == ["up.weight", "up.bias", "down.weight", "down.bias"]


@pytest.mark.parametrize(("old", "new", "message", "help"), [
    ("def build", "def make", "has no function `build`", "def build():"),
    ("import paddle\n", "import paddel\n", "raised ModuleNotFoundError: No module named 'paddel'", "mine.py:2"),
    ("def loss(", "def loss(:", "raised SyntaxError", "mine.py:5"),
    ("    return [nn", "    return [nn.Nope, nn", "raised AttributeError", "in build: return [nn.Nope"),
    (", loss, data", ", loss", "returned 2 things", "return `layers"),
    ("[nn.Linear(3, 4), nn.functional.relu, nn.Linear(4, 3)], loss", "[], loss", "an empty list", "one or more"),
    ("nn.functional.relu", "7", "item 1 of the layers is integer 7", "LayerDesc"),
    ("loss, data\n", "None, data\n", "there is no loss function", "PipelineLayer"),
    ("return x, x", "return x", "the data function returned ndarray", "inputs, labels"),
    ("return x, x", "return x / undefined, x", "the data function raised NameError", "in data: return x / und"),
    (".mean()", "", "the loss function returned a tensor of shape [2, 3]", "one number"),
    ("(output - labels)", "labels", "without a gradient", "one number"),
    ("nn.functional.relu", "lambda x: None", "layer `act` returned NoneType", "a tensor"),
    ("nn.functional.relu", "lambda x: x @ x", "layer `act` raised ValueError", "mine.py:13"),
    ("nn.Linear(3, 4)", "nn.Linear(3, 4, weight_attr=nn.initializer.Assign(__import__('os').urandom(12)))",
     "raised", "mine.py:13"),
])  # fmt: skip
def test_what_is_wrong_with_a_file(tmp_path, old, new, message, help):
    assert old in GOOD
    error = tried(tmp_path, GOOD.replace(old, new, 1))
    finding = error.findings[0]
    assert (finding.code, error.path) == ("PP911", ("model", "build"))
    assert message in finding.message
    assert help in finding.help


def test_a_missing_file():
    with pytest.raises(BadPlanAtError, match="there is no file"):
        try_layers(plan_from_dict(own_dict("nowhere.py", 2, LAYERS)).spec)


def test_a_build_that_depends_on_more_than_the_seed(tmp_path):
    text = GOOD.replace("def build():", "def build():\n    paddle.seed(__import__('time').perf_counter_ns() % 2**31)")
    assert "built twice from seed 0, 2 of 4 weights and buffers differ" in str(tried(tmp_path, text))


def changed(index, **about):
    return [{**layer, **about} if number == index else layer for number, layer in enumerate(LAYERS)]


@pytest.mark.parametrize(("text", "layers", "path", "message"), [
    (GOOD, LAYERS[:1] + LAYERS[2:], (), "3 layers, and the plan declares 2"),
    (GOOD, changed(0, out=[{"shape": ["b", 5]}]), (0, "out", 0),
     "layer `up` returns float32 [2, 4], and float32 [2, 5] is declared"),
    (GOOD, changed(1, out=[{"shape": ["b", 4], "dtype": "float64"}]), (1, "out", 0), "float64 [2, 4] is declared"),
    (GOOD, changed(1, out=[{"shape": ["b", 4]}] * 2), (1, "out"), "1 tensors, and 2 are declared"),
    (GOOD, changed(0, parameters=LAYERS[0]["parameters"][:1]), (0,), "`up.bias` [4], which is not declared"),
    (GOOD, changed(0, parameters=LAYERS[0]["parameters"][::-1]), (0,), "in the order up.weight, up.bias"),
    (GOOD, changed(1, parameters=[{"name": "slope", "shape": [1]}]), (1,), "has nothing for the weight `act.slope`"),
    (GOOD, changed(2, borrows=["up.weight"]), (2,), "nothing from earlier layers, and up.weight is declared"),
    (GOOD.replace("nn.Linear(4, 3)]", "nn.Linear(4, 3).to(dtype='float64')]"), LAYERS, (2,), "is float64"),
])  # fmt: skip
def test_layers_that_are_not_as_declared(tmp_path, text, layers, path, message):
    error = tried(tmp_path, text, layers)
    assert (error.findings[0].code, error.path) == ("PP912", ("model", "layers", *path))
    assert message in error.findings[0].message


SHARED = """
import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.distributed.fleet.meta_parallel import SharedLayerDesc

class Embed(nn.Layer):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(5, 4), nn.Embedding(3, 4)

    @property
    def table(self):
        return self.words.weight

    def forward(self, ids):
        return self.words(ids) + self.places(paddle.arange(3))

def logits(layer, x):
    return paddle.matmul(x, layer.table, transpose_y=True)

def data(step, index, rng):
    return rng.integers(0, 5, (2, 3)), rng.integers(0, 5, (2, 3))

def build():
    ends = [SharedLayerDesc("embed", Embed, function, "table") for function in (None, logits)]
    return [ends[0], nn.Linear(4, 4), ends[1]], F.cross_entropy, data
"""


def test_a_shared_layer_may_have_weights_that_one_end_alone_needs(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(SHARED)
    first, _, last = described(f"{file}:build", 2)
    assert [weight["name"] for weight in first["parameters"]] == ["words.weight", "places.weight"]
    assert last == {"name": "embed.2", "kind": "Embed", "borrows": ["embed.0.words.weight"]}
    both = SHARED.replace("return paddle.matmul(x", "return paddle.matmul(x + layer.places.weight")
    assert "uses places.weight, which it does not share" in str(tried(tmp_path, both, DECLARED))


DECLARED = [
    {"name": "first", "out": [{"shape": ["b", 3, 4]}],
     "parameters": [{"name": "words.weight", "shape": [5, 4]}, {"name": "places.weight", "shape": [3, 4]}]},
    {"name": "mid", "out": [{"shape": ["b", 3, 4]}],
     "parameters": [{"name": "weight", "shape": [4, 4]}, {"name": "bias", "shape": [4]}]},
    {"name": "last", "borrows": ["first.words.weight"]},
]  # fmt: skip


def test_every_process_must_begin_with_the_same_weights(tmp_path):
    job = Job(tmp_path, {}, Certificate("", 1, "", Verdict.PROVED))
    weight = np.ones(3)
    job.custom_layers_file.write_text(json.dumps({"weights": {"w": hashlib.md5(weight.tobytes()).hexdigest()}}))
    require_same_start(job, {"w": weight})
    with pytest.raises(RuntimeError, match="`w` begins with other values"):
        require_same_start(job, {"w": weight + 1})


PLAN = """\
pipeproof: 1
model:
  kind: layers
  build: mine.py:build  # mine
# of the mesh
topology: {pp: 2}
schedule: {kind: zb_h1, num_micro_batches: 2, micro_batch_size: 2}
loss: {normalization: mean_of_micro_batches}
run: {steps: 2}
"""


@pytest.fixture
def plan(tmp_path):
    (tmp_path / "mine.py").write_text(GOOD)
    file = tmp_path / "plan.yaml"
    file.write_text(PLAN)
    return file


@pytest.mark.slow
def test_describe_writes_what_check_and_run_take(plan):
    refused = invoke("check", plan)
    assert refused.exit_code == 2
    assert "pipeproof import layers" in refused.output
    shown = invoke("import", "layers", plan)
    assert shown.exit_code == 0
    assert plan.read_text() == PLAN
    assert invoke("import", "layers", plan, "--write").exit_code == 0
    block = "".join(f"  {line}\n" for line in shown.output.splitlines() if line)
    assert plan.read_text() == PLAN.replace("# mine\n", f"# mine\n{block}")
    assert invoke("check", plan).exit_code == 0
    ran = process("run", plan)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "matches: every loss and every gradient, bit for bit" in ran.stdout


def test_describe_keeps_names_and_replaces_what_is_stale(plan):
    layers = "  layers:\n    - {name: first, out: [{shape: [9]}]}\n    - name: second\n    - {name: third}\n"
    plan.write_text(PLAN.replace("  build:", f"{layers}  build:"))
    assert invoke("import", "layers", plan, "--write").exit_code == 0
    text = plan.read_text()
    assert "{name: first, kind: Linear, out: [{shape: [b, 4]}]" in text
    assert "{name: second, kind: relu, out: [{shape: [b, 4]}]}" in text
    assert text.index("layers:\n") < text.index("  build: mine.py:build  # mine\n# of the mesh\n")


def test_describe_does_not_write_into_what_it_cannot(plan):
    flow = PLAN.replace(
        "model:\n  kind: layers\n  build: mine.py:build  # mine\n", "model: {kind: layers, build: 'mine.py:build'}\n"
    )
    plan.write_text(flow)
    refused = invoke("import", "layers", plan, "--write")
    assert refused.exit_code == 2
    assert "without --write" in refused.output
    assert plan.read_text() == flow


def test_describe_is_for_custom_layers(tmp_path):
    file = tmp_path / "gpt.yaml"
    file.write_text("pipeproof: 1\nmodel: {kind: gpt}\n")
    assert "custom layers are of kind layers" in invoke("import", "layers", file).output


def test_run_refuses_before_any_rank_starts_and_shows_the_place(plan):
    assert invoke("import", "layers", plan, "--write").exit_code == 0
    plan.write_text(plan.read_text().replace("shape: [b, 4]", "shape: [b, 6]", 1))
    ran = process("run", plan)
    assert ran.returncode == 2
    assert "PP912" in ran.stdout
    assert "plan.yaml:6:" in ran.stdout
    assert "Traceback" not in ran.stdout + ran.stderr
    assert "rank" not in ran.stdout.replace("2 processes", "")
