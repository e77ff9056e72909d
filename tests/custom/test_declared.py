"""Plans of declared layers are checked, simulated and shown like other plans, and `run` names the way to train them."""

import json

import pytest

from pipeproof.comm.lower import lower_loaded
from pipeproof.diagnostics.source import PlanFileError
from pipeproof.schedule.op_table import build_graph
from pipeproof.sim.simulate import simulate
from pipeproof.sim.step_memory import stage_holdings
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.stages.describe.layer import layer_kind
from pipeproof.verify.check_plan import check, check_subject
from pipeproof.verify.subject import make_subject
from tests.cli.commands import invoke
from tests.plans import plan_dict

LAYERS = [
    {"name": "stem", "out": [{"shape": ["b", 4]}], "parameters": [{"name": "weight", "shape": [3, 4]}]},
    {"name": "act", "out": [{"shape": ["b", 4]}]},
    {"name": "mid", "out": [{"shape": ["b", 4]}, {"shape": ["b", 2], "dtype": "int64"}]},
    {"name": "head", "parameters": [{"name": "bias", "shape": [3]}], "borrows": ["stem.weight"]},
]


def plan(layers=LAYERS, **sections):
    base = {
        "pipeproof": 1,
        "model": {"kind": "layers", "layers": layers},
        "topology": {"pp": 2},
        "schedule": {"kind": "1f1b", "num_micro_batches": 4, "micro_batch_size": 2},
        "loss": {"normalization": "mean_of_micro_batches"},
    }
    for name, value in sections.items():
        base[name] = {**base.get(name, {}), **value} if isinstance(value, dict) else value
    return base


def refused(**sections):
    with pytest.raises(PlanFileError) as caught:
        plan_from_dict(plan(**sections))
    return [(finding.code, finding.message) for finding in caught.value.findings]


@pytest.mark.parametrize(("pp", "schedule"), [
    (2, {"kind": "1f1b"}), (4, {"kind": "gpipe"}), (2, {"kind": "zb_v", "num_chunks": 2}), (4, {"kind": "dualpipe"}),
])  # fmt: skip
def test_check_proves_and_simulate_times_it(pp, schedule):
    report = check(plan_from_dict(plan(topology={"pp": pp, "dp": 2}, schedule={"num_micro_batches": 8, **schedule})))
    assert report.errors == ()
    assert report.certificate is not None
    assert simulate(report.subject.plan).timeline.makespan_us > 0


def test_what_crosses_is_what_the_last_layer_of_a_stage_gives():
    lowered = lower_loaded(plan_from_dict(plan(stages=[["stem", "act", "mid"], ["head"]])))
    ((states, ids),) = lowered.edges[0].variants
    assert (states.shape, states.dtype, states.has_gradient, states.member) == ((2, 4), "float32", True, "0")
    assert (ids.shape, ids.dtype, ids.has_gradient, ids.member) == ((2, 2), "int64", False, "1")
    assert lowered.boundary.shape == (2, 4)
    assert lowered.shared_weights.places(0, "stem.weight") == (0, 1)
    assert layer_kind(lowered.spec.model, "stem") == "stem"


def test_stages_take_equally_many_layers_the_first_ones_more():
    cut = [len(names) for names in lower_loaded(plan_from_dict(plan(topology={"pp": 3}))).stages]
    assert cut == [2, 1, 1]


def test_a_missing_reduction_is_found():
    subject = make_subject(plan_from_dict(plan(topology={"pp": 2, "dp": 2})))
    rows = [[row for row in rank if "0REDUCE_GRAD" not in str(row.op)] for rank in subject.graph.rows()]
    changed = subject.with_graph(build_graph(rows, subject.graph.tensors, subject.graph.groups))
    assert {finding.code for finding in check_subject(changed).errors} & {"PP601", "PP602", "PP603"}


def test_known_memory_is_weights_and_inputs_of_layers():
    lowered = lower_loaded(plan_from_dict(plan(stages=[["stem", "act"], ["mid", "head"]])))
    assert [float(held.num_bytes) for held in stage_holdings(lowered, 0)] == [2 * 4 * 4]
    assert [float(held.num_bytes) for held in stage_holdings(lowered, 1)] == [2 * 4 * 4 + 2 * 4 * 4 + 2 * 2 * 8]


def test_sizes_of_the_sequence_length_differ_between_micro_batches():
    layers = [
        {"name": "stem", "out": [{"shape": ["b", "s", 4]}, {"shape": ["s", "s"], "dtype": "bool"}]},
        {"name": "mid", "out": [{"shape": ["b", 4]}]},
        {"name": "head"},
    ]
    content = plan(layers, topology={"pp": 3}, schedule={"seq_lengths": [5, 3, 5, 7]})
    content["model"]["layers"] = layers
    report = check(plan_from_dict(content))
    assert report.errors == ()
    first, second = report.subject.plan.edges
    shapes = [[member.shape for member in first.members(index)] for index in range(4)]
    assert shapes == [[(2, n, 4), (n, n)] for n in (5, 3, 5, 7)]
    assert {second.members(index)[0].shape for index in range(4)} == {(2, 4)}
    (held,) = stage_holdings(report.subject.plan, 1)
    assert held.num_bytes == 2 * 7 * 4 * 4 + 7 * 7  # the longest


def changed(index, **about):
    return [{**layer, **about} if number == index else layer for number, layer in enumerate(LAYERS)]


@pytest.mark.parametrize(("sections", "code", "words"), [
    ({"layers": []}, "PP106", "is empty"),
    ({"layers": changed(0, name="a b")}, "PP106", "letters, digits"),
    ({"layers": changed(1, name="stem")}, "PP106", "has the name `stem` of layer 0"),
    ({"layers": changed(1, out=[])}, "PP104", "`act` "),
    ({"layers": changed(3, out=[{"shape": ["b"]}])}, "PP106", "is the last layer"),
    ({"layers": changed(0, out=[{"shape": ["b"], "dtype": "int64"}])}, "PP106", "has a gradient"),
    ({"layers": changed(2, out=[{"shape": [2]}, {"shape": [2], "dtype": "bool", "gradient": True}])}, "PP106",
     "a tensor of bool has no gradient"),
    ({"layers": changed(0, out=[{"shape": ["c", 4]}])}, "PP106", "a size is `b`"),
    ({"layers": changed(0, out=[{"shape": [0]}])}, "PP106", "a size is `b`"),
    ({"layers": changed(0, out=[{"shape": ["b", "s"]}])}, "PP106", "schedule.seq_lengths is not given"),
    ({"schedule": {"seq_lengths": [1, 2]}}, "PP109", "has 2 entries"),
    ({"layers": changed(3, borrows=["stem.weigth"])}, "PP106", "which no layer before it has"),
    ({"layers": changed(0, parameters=[{"name": "w", "shape": [1]}] * 2)}, "PP106", "declared twice"),
    ({"topology": {"tp": 2}}, "PP106", "topology.tp is 2"),
    ({"topology": {"cp": 2}}, "PP106", "topology.cp is 2"),
    ({"topology": {"ep": 2}}, "PP106", "topology.ep is 2"),
    ({"schedule": {"last_micro_batch_size": 1}}, "PP106", "one shape"),
    ({"schedule": {"kind": "seq1f1b", "num_sequence_splits": 2}}, "PP106", "sequences"),
    ({"loss": {"normalization": "global_tokens"}}, "PP106", "micro-batch"),
    ({"boundaries": [{"name": "x", "dims": "b"}]}, "PP106", "their `out`"),
    ({"stages": "uniform"}, "PP106", "class names"),
    ({"memory": {"recompute": "full"}}, "PP106", "recompute"),
    ({"memory": {"budget_gib": 1}}, "PP106", "budget"),
    ({"cost": {"analytic": "h200"}}, "PP106", "the work of"),
    ({"run": {"main_grad_dtype": "float64"}}, "PP106", "in run.dtype"),
    ({"model": {"num_layers": 3}}, "PP102", "no key `num_layers`"),
    ({"model": {"build": "model.py:build"}}, "PP102", "no key `build`"),
])  # fmt: skip
def test_refusals(sections, code, words):
    found = refused(**sections)
    assert any(one == code and words in message for one, message in found), found


def test_a_budget_is_checked_where_every_layer_has_its_activations():
    known = [{**layer, "activation_bytes": 2**20} for layer in plan()["model"]["layers"]]
    for budget, codes in ((1, []), (0.0001, ["PP701"])):
        loaded = plan_from_dict(plan(layers=known, memory={"budget_gib": budget}))
        found = check(loaded).errors
        assert [finding.code for finding in found] == codes
        assert not any("recompute" in str(finding.help) for finding in found)  # not for custom layers
    partly = refused(layers=[*known[:-1], plan()["model"]["layers"][-1]], memory={"budget_gib": 1})
    assert [code for code, _ in partly] == ["PP106"]


def test_the_cut_is_refused_at_its_place():
    for sections, code in (
        ({"topology": {"pp": 5}}, "PP110"),
        ({"stages": [["stem", "act", "middle"], ["head"]]}, "PP111"),
    ):
        with pytest.raises(PlanFileError) as caught:
            lower_loaded(plan_from_dict(plan(**sections)))
        assert caught.value.findings[0].code == code


def test_the_digest_has_what_operations_read():
    one = check(plan_from_dict(plan())).digest
    assert one == check(plan_from_dict(plan(layers=changed(0, kind="Stem")))).digest
    assert one != check(plan_from_dict(plan(layers=changed(1, name="relu")))).digest


def test_run_names_the_pipelines_that_train_the_layers(tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text(json.dumps(plan()))
    done = invoke("run", file)
    assert done.exit_code == 2
    assert "error[PP909]: the plan declares the layers of a training script" in done.output
    assert "pipeproof.torch.Pipeline or pipeproof.paddle.Pipeline; `compare`" in done.output


F, B, INPUT, W = "forward_us", "backward_us", "backward_input_us", "backward_weight_us"
FACTORS = {F: 1, B: 2, INPUT: 3, W: 4}
CUT = [["stem"], ["act", "mid", "head"]]


def timed(times, keys=(F, B)):
    """LAYERS with times: ``times`` for a forward, and multiples of them for the other phases."""
    return [layer | {key: FACTORS[key] * time for key in keys} for layer, time in zip(LAYERS, times, strict=True)]


@pytest.mark.parametrize("kind", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("keys", [(F, B), (F, INPUT, W)])
def test_a_stage_takes_the_time_of_its_layers_wherever_the_cut_is(keys, kind):
    layers, schedule = timed([10, 0, 7, 5], keys), {"kind": kind}
    for stages, sums in ((CUT, [10, 12]), ([["stem", "act", "mid"], ["head"]], [17, 5]), (None, [10, 12])):
        cut = {} if stages is None else {"stages": stages}
        cost = {key: [FACTORS[key] * time for time in sums] for key in keys}
        of_layers = plan_from_dict(plan(layers, schedule=schedule, **cut))
        of_stages = plan_from_dict(plan(schedule=schedule, cost=cost, **cut))
        assert simulate(lower_loaded(of_layers)).timeline.spans == simulate(lower_loaded(of_stages)).timeline.spans
        assert of_layers.spec.cost_source == "given"
        assert not of_layers.spec.placeholder_note


@pytest.mark.parametrize(
    ("change", "code", "index"),
    [
        (lambda layers: layers[2].pop(B), "PP104", 2),
        (lambda layers: layers[3].pop(F), "PP104", 3),
        (lambda layers: layers[1].update({INPUT: 1}), "PP106", 1),
        (lambda layers: layers.__setitem__(3, LAYERS[3]), "PP104", 3),
        (lambda layers: [layer.pop(F) for layer in layers], "PP104", 0),
    ],
    ids=["backward", "forward", "both", "none", "only_backwards"],
)
def test_layers_have_the_same_times(change, code, index):
    layers = timed([10, 0, 7, 5])
    change(layers)
    with pytest.raises(PlanFileError) as caught:
        plan_from_dict(plan(layers))
    first = caught.value.findings[0]
    assert (first.code, first.message.split("`")[1]) == (code, LAYERS[index]["name"])


def test_commands_move_the_cut(tmp_path):
    file = tmp_path / "plan.yaml"
    file.write_text(json.dumps(plan(timed([10, 0, 7, 5]), stages=CUT)))
    before, moved = (
        json.loads(invoke("simulate", str(file), *change, "--format", "json").stdout)
        for change in ((), ("--set", "stages=[[stem, act, mid], [head]]"))
    )
    assert [before[key] for key in ("cost_source", "makespan")] == ["given", 10 + 12 * 3 * 4 + 20]
    assert moved["makespan"] == 17 * 3 * 4
    compared = invoke("compare", str(file), str(file))
    assert "placeholder" not in compared.stdout
    assert invoke("tune", str(file)).exit_code == 0
    assert "12" in invoke("schedule", "show", str(file)).stdout


SKIP = {"name": "skip", "producer": "stem", "consumers": ["mid", "head"], "shape": ["b", 8]}


def test_an_edge_crosses_each_boundary_from_its_producer_to_its_last_consumer():
    lowered = lower_loaded(
        plan_from_dict(plan(topology={"pp": 4}, edges=[SKIP, {**SKIP, "name": "short", "consumers": ["act"]}]))
    )
    assert [[tensor.member for tensor in edge.variants[0]] for edge in lowered.edges] == [
        ["", "skip", "short"], ["", "skip"], ["0", "1", "skip"],
    ]  # fmt: skip
    skip = lowered.edges[1].variants[0][1]
    assert (skip.shape, skip.dtype, skip.has_gradient) == ((2, 8), "float32", True)
    assert [
        len(edge.variants[0])
        for edge in lower_loaded(plan_from_dict(plan(edges=[{**SKIP, "consumers": ["act"]}]))).edges
    ] == [1]


@pytest.mark.parametrize(("edge", "code", "word"), [
    ({"consumers": ["stem"]}, "PP106", "does not come after `stem`"),
    ({"producer": "head", "consumers": ["mid"]}, "PP106", "does not come after `head`"),
    ({"consumers": []}, "PP106", "(none)"),
    ({"consumers": ["mid", "mid"]}, "PP106", "mid, mid"),
    ({"producer": "steam"}, "PP106", "`steam`, which is not a layer"),
    ({"name": "a-b"}, "PP106", "a name of its own"),
    ({"shape": ["s", 2]}, "PP106", "has the size `s`"),
    ({"dtype": "int64", "gradient": True}, "PP106", "has no gradient"),
    ({"route": "far"}, "PP106", "route"),
])  # fmt: skip
def test_an_edge_that_does_not_fit_is_refused(edge, code, word):
    assert [found for found, text in refused(edges=[{**SKIP, **edge}]) if word in text] == [code]


def test_a_second_edge_needs_its_own_name_and_a_gpt_has_none():
    assert refused(edges=[SKIP, SKIP])[0][0] == "PP106"
    with pytest.raises(PlanFileError) as caught:
        plan_from_dict({**plan_dict(), "edges": [SKIP]})
    assert [(finding.code, finding.location) for finding in caught.value.findings] == [("PP106", None)]
    assert "custom layers" in caught.value.findings[0].message
