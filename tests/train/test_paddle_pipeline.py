"""``pipeproof.paddle.Pipeline``: Fleet's results to the bit with one line changed, and the unpartitioned model's."""

from types import SimpleNamespace

import pytest

from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.module_plan import num_stages_of
from pipeproof.exec.train.plan_layers import StageFacts, merged_ties, names_in_plan
from tests.train.paddle_ranks import found_by

pytestmark = pytest.mark.needs_paddle

PLAN = {"pipeproof": 1, "schedule": {"kind": "1f1b", "num_micro_batches": 4}}


KINDS = ("zb_v", "1f1b", "dualpipe_v", "gpipe")


@pytest.mark.parametrize(
    ("num_ranks", "replicas", "cases"),
    [
        pytest.param(2, 1, ("adamw", "tuples"), id="2"),
        pytest.param(4, 1, ("tied", "interleaved"), id="4", marks=pytest.mark.slow),
        pytest.param(4, 2, ("adamw", "tuples"), id="2 replicas", marks=pytest.mark.slow),
    ],
)
def test_a_fleet_script_with_one_line_changed_trains_as_fleet_does(tmp_path, num_ranks, replicas, cases):
    classes = {"interleaved": "PipelineParallelWithInterleave"}
    found = found_by(tmp_path, "fleet_script.py", num_ranks, replicas, *cases)
    for case in cases:
        for of_rank in found:
            fleet, ours = of_rank[case]["fleet"], of_rank[case]["ours"]
            assert (fleet.pop("class"), ours.pop("class")) == (classes.get(case, "PipelineParallel"), "Pipeline")
            assert fleet["state"]  # weights and optimizer states of this rank
            assert ours == fleet  # losses, outputs, states, rates and scales, to the bit
        plan = found[0][case]["plan"]
        assert plan["topology"] == {"pp": num_ranks // replicas}
        borrowed = [name for layer in plan["model"]["layers"] for name in layer.get("borrows", ())]
        assert borrowed == (["stage.0.shared_layers.embedding.weight"] if case == "tied" else [])
    if "adamw" in cases:
        assert found[0]["adamw"]["ours"]["scale"] == 512.0  # one overflow of three steps
        kinds = {spec["gradient"] for spec in found[0]["tuples"]["plan"]["model"]["layers"][0]["out"]}
        assert kinds == {True, False}


def test_lists_of_layers_train_as_the_unpartitioned_model(tmp_path):
    found = found_by(tmp_path, "paddle_list.py", 2, "same")
    for of_rank in found:
        for case, facts in of_rank.items():
            if case.startswith("tied"):  # the sum of a weight's two uses has another order
                assert 0 < facts["greatest"] < 1e-6
            else:
                assert (facts["wrong"], facts["greatest"]) == ([], 0.0), case
        assert of_rank["again"]["digest"] == of_rank["interleaved"]["digest"]
        assert of_rank["packed"]["digest"] != of_rank["per_tensor"]["digest"]
    assert [of_rank["zb_v"]["schedule"]["num_chunks"] for of_rank in found] == [2, 2]
    assert all(of_rank[f"frozen {kind}"]["names"] for of_rank in found for kind in ("zb_v", "1f1b"))
    layers = [{int(name.partition(".")[0]) for name in of_rank["declared"]["names"]} for of_rank in found]
    assert layers == [{0, 1, 2}, {3}]


def test_compare_has_the_bits_of_the_unpartitioned_model_or_names_the_first_difference(tmp_path):
    """After a step of training, with tuples, split backwards, stages on one rank, and weights on several."""
    found = found_by(tmp_path, "paddle_list.py", 2, "compare")
    assert found[0] == found[1]
    facts = found[0]
    exact = {case for case, fact in facts.items() if isinstance(fact, dict) and fact["exact"]}
    assert exact == {*(f"{tied}{kind}" for tied in ("", "tied ") for kind in KINDS), "interleaved", "built", "unused"}
    assert facts["zb_v"]["text"].endswith("26 gradients have the reference's bits")
    assert facts["unused"]["text"].endswith("\n1 parameter received no gradient: stage.0.0.unused")
    ((stage, name, distance),) = facts["hook"]["differences"]
    assert (stage, name) == (1, "stage.1.2.linear.weight")
    assert distance > 0.1
    shared = "stage.0.shared_layers.embedding.weight"
    assert [each[:2] for each in facts["not summed"]["differences"]] == [[0, shared], [1, shared]]
    assert "pass (inputs, labels) instead of an iterator" in facts["iterator"][1]
    assert "pass the labels there too" in facts["no labels"][1]


@pytest.mark.slow
def test_every_rank_raises_the_error_of_one(tmp_path):
    found = found_by(tmp_path, "paddle_list.py", 2, "errors")
    parts = {
        "layer": ("PipelineError", "stage 0, micro-batch 2: layer `0` raised ValueError: the fifth wheel"),
        "last layer": ("PipelineError", "stage 1, micro-batch 2: layer `1` raised ValueError: the fifth wheel"),
        "shape": ("PipelineError", "stage 0, micro-batch 1 returns float32[2, 4] as output 0"),
        "example": ("PipelineError", "stage 1 fails on its first micro-batch: ValueError: the fifth wheel"),
        "rows": ("PipelineError", " has 7 rows, and the step has 4 micro-batches of 2"),
        "no data": ("PipelineError", "pass the data of the step"),
        "no loss": ("PipelineError", "loss function 0 does not exist"),
        "cut": ("PipelineError", "1 layers cannot be cut into 2 stages"),
        "count": ("PipelineError", "num_micro_batches is 4 on rank 0, 5 on rank 1"),
        "clip": ("PipelineError", "fleet.distributed_optimizer"),
        "refused": ("PlanRefused", "PP401: ranks 0, 1 deadlock"),
        "early": ("PipelineError", "give Pipeline an `example`"),
        "edge": ("PipelineError", "edges has 'skip': (1, [0], 'relay')"),
        "no tensor": ("PipelineError", "forward() got an unexpected keyword argument 'a'"),
        "twice": ("PipelineError", "`linear.weight` of layer 0 and `linear.weight` of layer 2 are one weight"),
        "stall": ("PipelineError", "rank 0 waits in step 1 for rank 1: WAIT(0RECV_B0)"),
    }
    for of_rank in found:
        assert set(of_rank) == set(parts)
        for case, (kind, part) in parts.items():
            assert of_rank[case][0] == kind, case
            assert part in of_rank[case][1], case


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_lists_with_edges_train_as_the_unpartitioned_model(tmp_path, num_ranks):
    for of_rank in found_by(tmp_path, "paddle_list.py", num_ranks, "edges"):
        assert len(of_rank) == 8
        for case, facts in of_rank.items():
            assert (facts["wrong"], facts["greatest"]) == ([], 0.0), case


@pytest.fixture(scope="module")
def paddle():
    from pipeproof.stages.paddle.runtime import start_paddle

    start_paddle()
    import paddle

    return paddle


@pytest.fixture
def pipe(paddle):
    """A pipeline of one rank with two linear layers, four micro-batches and two loss functions."""
    from paddle import nn
    from paddle.distributed.fleet.meta_parallel import LayerDesc

    from pipeproof.paddle import Pipeline

    losses = [lambda y, z: ((y - z) ** 2).mean(), lambda y, z: abs(y - z).mean()]
    with Closing(Pipeline([LayerDesc(nn.Linear, 3, 3), paddle.tanh], loss_fn=losses, num_micro_batches=4)) as made:
        yield made


class Closing:
    def __init__(self, pipe):
        self.pipe = pipe

    def __enter__(self):
        return self.pipe

    def __exit__(self, *_):
        self.pipe.close()


def of_batch(paddle, rows=8):
    numbers = paddle.arange(3 * rows, dtype="float32").reshape([rows, 3]) / 10
    return numbers, numbers.flip(0)


@pytest.mark.parametrize(
    ("make", "arguments", "part"),
    [
        (lambda nn: None, {}, "the layers are nothing: give a PipelineLayer, or a list"),
        (lambda nn: nn.Linear(3, 3), {}, "the layers are a Linear: give a PipelineLayer, or a list"),
        (lambda nn: [nn.ReLU(), nn.Linear], {}, r"layers\[1\] is the class Linear: give LayerDesc\(Linear, ..\)"),
        (lambda nn: ["relu"], {}, r"layers\[0\] is a str"),
        (lambda nn: [nn.ReLU()], {"num_micro_batches": 0}, "must be at least 1, found integer 0"),
        (lambda nn: [nn.ReLU()], {"num_micro_batches": None}, "give Pipeline a plan, or num_micro_batches"),
        (lambda nn: [nn.ReLU()], {"schedule": "gpipe"}, "the plan has a schedule, and Pipeline has one too"),
        (lambda nn: [nn.Linear(3, 3)], {"plan": PLAN | {"run": {"clip_norm": 1.0}}}, "fleet.distributed_optimizer"),
    ],
)
def test_wrong_arguments_are_named(paddle, make, arguments, part):
    from pipeproof.paddle import Pipeline

    plan = arguments.pop("plan", PLAN if "schedule" in arguments else None)
    example = {"example": paddle.ones([2, 3]), "loss_fn": paddle.mean}
    with pytest.raises(PipelineError, match=part):
        Pipeline(make(paddle.nn), plan=plan, **{"num_micro_batches": 4, **example, **arguments})


def test_data_comes_as_batches_lists_or_an_iterator(paddle, pipe):
    optimizer = paddle.optimizer.SGD(0.0, parameters=pipe.parameters())
    inputs, labels = of_batch(paddle)
    parts = [paddle.split(whole, 4) for whole in (inputs, labels)]
    losses = [pipe.train_batch(form, optimizer) for form in ((inputs, labels), parts, zip(*parts, strict=True))]
    values = [[float(loss) for loss in of_both] for of_both in losses]
    assert values[0] == values[1] == values[2]
    each = pipe.train_batch((inputs, labels), optimizer, return_micro_batch_loss=True)
    assert [loss.shape for loss in each] == [[4], [4]]
    assert [float(loss.sum()) for loss in each] == pytest.approx(values[0])
    with pytest.raises(PipelineError, match="end after 2 micro-batches"):
        pipe.train_batch(zip(parts[0][:2], parts[1][:2], strict=True), optimizer)


def test_the_loss_of_the_backward_is_the_chosen_one(paddle, pipe):
    optimizer = paddle.optimizer.SGD(1.0, parameters=pipe.parameters())
    data = of_batch(paddle)
    weight, bias = pipe.parameters()
    before, copy = weight.detach().clone(), weight.detach().clone()
    copy.stop_gradient = False
    for x, z in zip(*(paddle.split(whole, 4) for whole in data), strict=True):
        (abs(paddle.tanh(x @ copy + bias.detach()) - z).mean() / 4).backward()
    pipe.train_batch(data, optimizer, loss_fn_idx=1)
    assert float(abs(before - weight - copy.grad).max()) < 1e-6
    assert weight.grad is None or float(abs(weight.grad).max()) == 0.0  # the step has cleared it
    assert [out.shape for out in pipe.eval_batch(data)] == [[2, 3]] * 4
    assert not pipe._layers.training
    with paddle.no_grad(), pytest.raises(PipelineError, match="no_grad"):
        pipe.train_batch(data, optimizer)


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (lambda x: None, "pass the data"),
        (lambda x: (x, x, x), "3 things are given"),
        (lambda x: ([x, x], x), "inputs has 2 entries, and the step has 4 micro-batches"),
        (lambda x: ((x, [x]), x), r"inputs\[1\] has 1 entries"),
        (lambda x: (x, "labels"), "labels is str"),
        (lambda x: (x, x[:7]), "labels has 7 rows"),
        (lambda x: 3, "not an iterator"),
    ],
)
def test_wrong_data_is_named(paddle, data, part):
    from pipeproof.exec.train.paddle.step_data import MicroBatchSizes, step_data

    whole = paddle.ones([8, 3])
    with pytest.raises(PipelineError, match=part):
        step_data(data(whole), MicroBatchSizes(4, 2), is_first=True, is_last=True)
    assert step_data(data(whole), MicroBatchSizes(4, 2), is_first=False, is_last=False).inputs == [None] * 4


@pytest.mark.parametrize(
    ("plan", "schedule", "chunks", "expected"),
    [
        (None, {"kind": "1f1b"}, None, 4),
        (None, {"kind": "zb_v"}, None, 8),
        (None, {"kind": "interleaved"}, 3, 12),
        (None, {"kind": "interleaved", "num_chunks": 2}, None, 8),
        (None, {"kind": "custom", "programs": [["0F0", "10F0"], ["1F0"]]}, None, 11),
        ({"stages": [["a"], ["b"], ["c"]]}, {"kind": "1f1b"}, None, 3),
        ({"schedule": {"kind": "optimal", "placement": [[0, 3], [1, 2]]}}, {"kind": "1f1b"}, None, 4),
    ],
)
def test_the_number_of_stages_comes_from_the_plan_or_the_schedule(plan, schedule, chunks, expected):
    assert num_stages_of(plan, schedule, 4, chunks) == expected


def test_a_file_does_not_say_its_number_of_stages():
    with pytest.raises(PipelineError, match="num_virtual_pipeline_stages"):
        num_stages_of(None, {"kind": "file", "path": "x.csv"}, 4, None)


def test_layers_are_cut_as_fleet_cuts_them(paddle):
    from pipeproof.exec.train.paddle.stage_layers import cut_layers

    layers = [paddle.nn.Embedding(4, 4), *(paddle.nn.Linear(4, 4) for _ in range(4)), paddle.nn.LayerNorm(4)]
    assert cut_layers(layers, 4, "uniform") == [0, 1, 2, 4, 6]
    assert cut_layers(layers, 2, "layer:Linear") == [0, 3, 6]
    assert cut_layers(layers, 2, [0, 1]) == [0, 1, 6]
    with pytest.raises(PipelineError, match="does not cut 6 layers into 3"):
        cut_layers(layers, 3, "layer:Linear")


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("zb_v", r"has 2 stages, and zb_v has 2 on each rank: give Pipeline the list of layers"),
        ("chimera", r"has stages \[0\] on rank 0, and the schedule puts stages \[0, 1\] there: give Pipeline the list"),
    ],
)
def test_a_schedule_with_other_stages_than_a_pipeline_layer_needs_the_list(paddle, kind, part):
    from pipeproof.exec.train.paddle.start_phases import _require_placement

    skeleton = {
        "pipeproof": 1, "model": {"kind": "layers"}, "topology": {"pp": 2},
        "schedule": {"kind": kind, "num_micro_batches": 4}, "run": {"backend": "paddle", "dtype": "float32"},
        "loss": {"normalization": "mean_of_micro_batches"},
    }  # fmt: skip
    stages = SimpleNamespace(parts=[0, 1, 2], numbers=(0,))
    with pytest.raises(PipelineError, match=part):
        _require_placement(skeleton, stages, 0, 2)


def test_ties_of_all_ranks_are_merged_by_their_key():
    reports = [
        {"embedding.weight": {"0": "a"}, "own": {"1": "x", "3": "y"}},
        {"embedding.weight": {"5": "b"}},
        {"b": {"2": "c"}},
    ]
    ties = merged_ties(reports)
    assert ties == [{0: "a", 5: "b"}, {1: "x", 3: "y"}]
    weights = {0: ["a"], 5: ["b", "d"]}
    facts = [StageFacts.whole(n, "", [{"name": name} for name in weights.get(n, ["x", "y"])]) for n in range(6)]
    assert names_in_plan(facts, ties)[5] == {"b": "stage.0.a", "d": "stage.5.d"}


@pytest.mark.parametrize(
    ("environment", "address"),
    [
        ({"PADDLE_MASTER": "a:1", "PADDLE_TRAINER_ENDPOINTS": "b:2,c:3"}, ("a", 1)),
        ({"PADDLE_TRAINER_ENDPOINTS": "b:2,c:3"}, ("b", 2)),
        ({"PADDLE_MASTER": "a:1", "MASTER_ADDR": "d", "MASTER_PORT": "4"}, ("d", 4)),
        ({"PADDLE_MASTER": "a:1", "MASTER_ADDR": "d"}, ("a", 1)),
        ({"MASTER_ADDR": "d"}, "there is no PADDLE_MASTER"),
        ({"PADDLE_MASTER": "a"}, "PADDLE_MASTER=a: 'a' is not host:port"),
    ],
)
def test_the_store_is_where_init_parallel_env_finds_it(paddle, environment, address, monkeypatch):
    from pipeproof.exec.store.paddle_store import store_address

    monkeypatch.setattr("os.environ", environment)
    if isinstance(address, tuple):
        assert store_address() == address
    else:
        with pytest.raises(PipelineError, match=address):
            store_address()
