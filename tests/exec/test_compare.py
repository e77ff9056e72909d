"""Shards and losses gathered and compared with the reference bit by bit."""

import hashlib
import io
import json
import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from pipeproof.comm.accumulation_order import accumulation_of
from pipeproof.exec.compare.compare_gradients import compare_step
from pipeproof.exec.launch.run_console import render_run, step_line
from pipeproof.exec.launch.run_report import RunReport, measured_timeline
from pipeproof.exec.rank.job_files import Job, StepOutcome, dump_plan
from pipeproof.specs.axis_layout import PlacementKind
from pipeproof.specs.load_plan import LoadedPlan, plan_from_dict
from pipeproof.verify.certificate import Verdict, certificate_of, graph_digest
from tests.exec.logs import faithful_log
from tests.plans import plan_dict, subject

LOSS = np.float32(5.5)


def whole_gradients(plan, dtype=np.float32):
    """A distinct number in every element of every parameter."""
    count, gradients = 1, {}
    for layer in plan.layers:
        for parameter in layer.parameters:
            numel = math.prod(parameter.shape)
            gradients[parameter.name] = np.arange(count, count + numel, dtype=dtype).reshape(parameter.shape)
            count += numel
    return gradients


def cut(plan, whole):
    """Shards of ``whole`` on each rank, by a second description of the layout; losses on the last stage."""
    ranks = []
    for rank in range(plan.mesh.num_ranks):
        coords = plan.mesh.coords(rank)
        mine = {}
        for layer in plan.layers_of(coords["pp"]):
            for parameter in layer.parameters:
                part = whole[parameter.name]
                if parameter.tp.kind is PlacementKind.SHARDED:
                    part = np.split(part, plan.mesh.size("tp"), axis=parameter.tp.dim)[coords["tp"]]
                mine[parameter.name] = part.copy()
        ranks.append((LOSS if coords["pp"] == plan.mesh.size("pp") - 1 else None, mine))
    return ranks


def compared(plan, ranks, *, reference=None, unpartitioned=None, loss=LOSS):
    whole = whole_gradients(plan)
    return compare_step(
        plan, 0, outcomes(ranks), *outcomes([(loss, reference or whole), (loss, unpartitioned or whole)])
    )


def outcomes(pairs):
    return [StepOutcome(*pair) for pair in pairs]


def by_name(step):
    return {gradient.name: gradient for gradient in step.gradients}


def names(plan, kind):
    return [p.name for layer in plan.layers for p in layer.parameters if p.tp.kind is kind]


@settings(max_examples=20, deadline=None)
@given(pp=st.integers(1, 3), tp=st.sampled_from([1, 2, 4]), dp=st.integers(1, 2), sp=st.booleans())
def test_shards_are_gathered_into_the_whole(pp, tp, dp, sp):
    plan = subject(topology={"pp": pp, "tp": tp, "dp": dp, "sequence_parallel": sp}).plan
    step = compared(plan, cut(plan, whole_gradients(plan)), loss=LOSS if dp == 1 else LOSS + LOSS)
    assert step.bitwise
    whole = whole_gradients(plan)
    assert set(by_name(step)) == set(whole)
    for gradient in step.gradients:
        assert gradient.md5 == hashlib.md5(whole[gradient.name].tobytes()).hexdigest()
        assert gradient.max_rel_diff == gradient.unpartitioned_max_rel_diff == 0.0
        assert len(gradient.shards) == tp * dp
        assert all(plan.mesh.coords(s.rank)["pp"] == gradient.stage for s in gradient.shards)


def test_index_of_each_shard_is_its_range_of_the_whole():
    plan = subject(topology={"pp": 1, "tp": 2}).plan
    step = compared(plan, cut(plan, whole_gradients(plan)))
    (name, *_), whole = names(plan, PlacementKind.SHARDED), whole_gradients(plan)
    for shard in by_name(step)[name].shards:
        part = whole[name][tuple(slice(a, b) for a, b in shard.index)]
        assert shard.md5 == hashlib.md5(np.ascontiguousarray(part).tobytes()).hexdigest()
        assert part.size == whole[name].size // 2


def two_by_two():
    plan = subject(topology={"pp": 2, "tp": 2}).plan
    return plan, cut(plan, whole_gradients(plan))


def test_one_wrong_bit_in_one_shard_is_found_in_its_parameter_alone():
    plan, ranks = two_by_two()
    name = next(n for n in names(plan, PlacementKind.SHARDED) if n in ranks[3][1])
    flat = ranks[3][1][name].view(np.uint32).reshape(-1)
    flat[-1] ^= 1
    step = compared(plan, ranks)
    assert [g.name for g in step.gradients if not g.bitwise] == [name]
    wrong = by_name(step)[name]
    assert wrong.replicas_agree
    assert 0 < wrong.max_rel_diff < 1e-6
    assert not step.bitwise
    assert step.loss_is_bitwise


@pytest.mark.parametrize("wrong", [(0,), (1,), (0, 1)])
def test_replicas_with_a_wrong_value_are_found_whichever_are_wrong(wrong):
    """Only the last one written ends up in the gathered tensor; the flag must not depend on it."""
    plan, ranks = two_by_two()
    name = next(n for n in ranks[0][1] if n not in names(plan, PlacementKind.SHARDED))
    for rank in wrong:
        ranks[rank][1][name].flat[0] += 1
    gradient = by_name(compared(plan, ranks))[name]
    assert gradient.replicas_agree == (wrong == (0, 1))
    assert not gradient.bitwise


def test_swapped_shards_are_found():
    plan, ranks = two_by_two()
    name = next(n for n in names(plan, PlacementKind.SHARDED) if n in ranks[0][1])
    first, second = ranks[0][1], ranks[1][1]
    first[name], second[name] = second[name], first[name]
    assert [g.name for g in compared(plan, ranks).gradients if not g.bitwise] == [name]


@pytest.mark.parametrize("wrong", [lambda a: a[:1], lambda a: a.astype(np.float64), lambda a: a[..., None]])
def test_a_shard_of_another_shape_or_dtype_is_refused_and_not_broadcast(wrong):
    plan, ranks = two_by_two()
    name = next(n for n in names(plan, PlacementKind.SHARDED) if n in ranks[1][1])
    ranks[1][1][name] = wrong(ranks[1][1][name])
    with pytest.raises(ValueError, match=f"gradient of {name} on rank 1: "):
        compared(plan, ranks)


def special(value, reference_value):
    """One gradient with one special element, against a reference with another."""
    plan = subject(topology={"pp": 1}).plan
    ours, reference = whole_gradients(plan), whole_gradients(plan)
    name = next(iter(ours))
    ours[name].flat[3], reference[name].flat[3] = value, reference_value
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = compared(plan, cut(plan, ours), reference=reference, unpartitioned=reference)
    return by_name(step)[name]


@pytest.mark.parametrize(
    ("value", "reference", "bitwise", "difference"),
    [
        (0.0, -0.0, False, 0.0),
        (-0.0, -0.0, True, 0.0),
        (np.nan, 4.0, False, np.inf),
        (4.0, np.nan, False, np.inf),
        (np.nan, np.nan, True, np.inf),
        (np.inf, 4.0, False, np.inf),
        (np.inf, -np.inf, False, np.inf),
        (np.inf, np.inf, True, np.inf),
    ],
)
def test_special_values(value, reference, bitwise, difference):
    gradient = special(value, reference)
    assert gradient.bitwise is bitwise
    assert gradient.max_rel_diff == gradient.unpartitioned_max_rel_diff == difference


# --- losses ---


def test_the_loss_is_the_last_stages_summed_over_dp_in_order():
    plan = subject(topology={"pp": 2, "tp": 2, "dp": 2}).plan
    ranks = cut(plan, whole_gradients(plan))
    losses = {(0, 0): 1e8, (0, 1): 7.0, (1, 0): 3.0, (1, 1): 7.0}
    for rank in range(plan.mesh.num_ranks):
        coords = plan.mesh.coords(rank)
        if coords["pp"] == 1:
            ranks[rank] = (np.float32(losses[coords["dp"], coords["tp"]]), ranks[rank][1])
    step = compared(plan, ranks, loss=np.float32(1e8) + np.float32(3.0))
    assert step.loss == np.float32(1e8) + np.float32(3.0)
    assert step.loss.dtype == np.float32
    assert step.bitwise


def test_losses_of_copies_are_added_before_those_of_data_parallel_ranks():
    """1e8 + 3 + 3 is another float32 than 1e8 + (3 + 3)."""
    plan = subject(topology={"pp": 2, "dp": 2}, schedule={"kind": "dualpipe"}).plan
    whole = whole_gradients(plan)
    losses = {(0, 0): 1e8, (0, 1): 0.0, (1, 0): 3.0, (1, 1): 3.0}
    coords = [plan.mesh.coords(rank) for rank in range(plan.mesh.num_ranks)]
    ranks = [(np.float32(losses[at["dp"], at["pp"]]), whole) for at in coords]
    assert np.float32(1e8) + np.float32(3) + np.float32(3) != np.float32(1e8) + np.float32(6)
    step = compared(plan, ranks, loss=np.float32(1e8) + np.float32(6))
    assert step.bitwise
    ranks[0] = (ranks[0][0], {name: gradient + 1 for name, gradient in whole.items()})
    assert not any(gradient.bitwise for gradient in compared(plan, ranks).gradients), "both copies have to be right"


@pytest.mark.parametrize(
    ("loss", "reference", "bitwise"),
    [
        (5.5, 5.5, True),
        (5.5, np.nextafter(np.float32(5.5), np.float32(6)), False),
        (0.0, -0.0, False),
        (np.nan, np.nan, True),
        (np.nan, 5.5, False),
    ],
)
def test_loss_bits(loss, reference, bitwise):
    plan = subject(topology={"pp": 1}).plan
    whole = whole_gradients(plan)
    ours, theirs = StepOutcome(np.float32(loss), whole), StepOutcome(np.float32(reference), whole)
    step = compare_step(plan, 0, [ours], theirs, theirs)
    assert step.loss_is_bitwise is bitwise
    assert step.bitwise is bitwise


# --- files between processes ---


def test_a_step_file_gives_back_every_bit(tmp_path):
    gradients = {"a.b": np.array([0.0, -0.0, np.nan, np.inf, 1e-45], np.float32), "c": np.zeros((2, 0), np.float64)}
    path = tmp_path / "rank0.step0.npz"
    for loss in (None, np.float32(-0.0), np.float64(1) / 3):
        StepOutcome(loss, gradients).save(path)
        found = StepOutcome.load(path)
        read_loss, read = found.loss, found.gradients
        assert (loss is None) == (read_loss is None)
        if loss is not None:
            assert (read_loss.tobytes(), read_loss.dtype) == (loss.tobytes(), loss.dtype)
        assert {n: (a.tobytes(), a.dtype, a.shape) for n, a in read.items()} == {
            n: (a.tobytes(), a.dtype, a.shape) for n, a in gradients.items()
        }
    assert [p.name for p in tmp_path.iterdir()] == ["rank0.step0.npz"]


@settings(max_examples=30, deadline=None)
@given(
    tp=st.sampled_from([1, 2]),
    order=st.permutations(["tp", "cp", "ep", "dp", "pp"]),
    forward=st.sampled_from([100, 0.1, "1/3", ["2/7", 3]]),
    learning_rate=st.floats(1e-6, 1.0),
    transport=st.sampled_from(["full", {"forward": "partial", "backward": "full"}]),
)
def test_workers_derive_the_very_plan(tp, order, forward, learning_rate, transport):
    data = plan_dict(
        topology={"pp": 2, "tp": tp, "order": list(order)},
        cost={"forward_us": forward},
        run={"learning_rate": learning_rate},
        transport=transport,
    )
    plan = plan_from_dict(data)
    sent = json.loads(json.dumps(dump_plan(LoadedPlan(plan.spec))))
    assert plan_from_dict(sent).spec == plan.spec


def test_a_saved_job_is_read_back(tmp_path):
    from pipeproof.exec.rank.job_files import CheckpointOptions, Fault, RecordOptions, RunOptions

    one = subject()
    job = Job(
        tmp_path,
        dump_plan(one.loaded),
        certificate_of(one, graph_digest(one), Verdict.PROVED),
        RunOptions(
            fault=Fault(1, "1F0", "die"),
            logs=tmp_path / "logs",
            record=RecordOptions(tmp_path, layers=True),
            checkpoint=CheckpointOptions(tmp_path, 2, by_paddle=True),
            rehearses=True,
        ),
    )
    job.save()
    assert Job.load(tmp_path) == job


# --- the report ---


def report_of(ours, reference, *, verified=True, loss=LOSS, reference_loss=LOSS):
    one = subject(topology={"pp": 1})
    theirs = StepOutcome(reference_loss, reference)
    step = compare_step(one.plan, 0, [StepOutcome(loss, ours)], theirs, theirs)
    logs = {0: faithful_log(one.graph, 0, num_steps=1)}
    timeline = measured_timeline(one, logs)
    return RunReport(one, graph_digest(one), verified, (step,), (), timeline, 0.0, 1, accumulation_of(one.plan))


def whole_of_one():
    return whole_gradients(subject(topology={"pp": 1}).plan)


def test_a_run_that_matches_passes_only_if_it_was_verified():
    report = report_of(whole_of_one(), whole_of_one())
    assert report.passed
    assert report.findings == ()
    unsafe = report_of(whole_of_one(), whole_of_one(), verified=False)
    assert unsafe.matches
    assert not unsafe.passed
    assert [(f.code, f.severity.value) for f in unsafe.findings] == [("PP905", "warning")]


def test_a_mismatch_names_the_first_gradient_with_both_digests():
    ours = whole_of_one()
    name = list(ours)[2]
    ours[name].flat[0] += 1
    report = report_of(ours, whole_of_one())
    assert not report.passed
    mismatch = report.findings[0]
    assert mismatch.code == "PP904"
    assert "the loss has the reference's bits; gradients that differ: 1 of" in mismatch.message
    gradient = by_name(report.steps[0])[name]
    assert f"first: {name}, md5 {gradient.md5}, reference {gradient.reference_md5}" in mismatch.message


def refuse_constant(name):
    raise AssertionError(f"{name} is not JSON")


def test_json_of_a_run_that_diverged_is_json():
    ours = whole_of_one()
    next(iter(ours.values())).flat[0] = np.nan
    report = report_of(ours, whole_of_one(), loss=np.float32(np.nan), reference_loss=np.float32(np.inf))
    content = json.loads(json.dumps(report.to_json()), parse_constant=refuse_constant)
    assert content["steps"][0]["loss"] is None
    assert content["steps"][0]["reference_loss"] is None
    assert content["gradients"][0]["max_rel_diff"] is None
    assert content["passed"] is False


@pytest.mark.parametrize(
    ("verified", "differs", "verdict"),
    [
        (True, False, "matches: every loss"),
        (False, False, "matches, but was not verified"),
        (True, True, "does not match"),
    ],
)
def test_the_verdict_is_the_last_line(verified, differs, verdict):
    ours = whole_of_one()
    if differs:
        next(iter(ours.values())).flat[0] += 1
    report, stream = report_of(ours, whole_of_one(), verified=verified), io.StringIO()
    render_run(report, Console(file=stream, width=200))
    assert verdict in stream.getvalue().splitlines()[-1]


def printed(report, **options):
    stream = io.StringIO()
    render_run(report, Console(file=stream, width=200), **options)
    return stream.getvalue()


def test_a_run_that_matches_prints_the_log_and_the_verdict_alone():
    report = report_of(whole_of_one(), whole_of_one())
    log, verdict = printed(report).splitlines()
    assert log.startswith("executed log equals the verified graph")
    assert verdict == "matches: every loss and every gradient, bit for bit"
    assert all(name in printed(report, verbose=True) for name in whole_of_one())


def test_a_run_lists_only_the_gradients_that_differ():
    ours = whole_of_one()
    first, second = list(ours)[1], list(ours)[3]
    ours[first].flat[0] += 1
    ours[second].flat[0] += 1
    report = report_of(ours, whole_of_one())
    short = printed(report)
    table = short[short.index("gradients of step 0") :]
    assert f"gradients of step 0: 2 of {len(ours)} differ" in table
    assert {name for name in ours if f" {name} " in table} == {first, second}
    verbose = printed(report, verbose=True)
    assert {name for name in ours if f" {name} " in verbose[verbose.index("gradients of step 0") :]} == set(ours)


def test_a_step_line_counts_the_gradients():
    ours = whole_of_one()
    next(iter(ours.values())).flat[0] += 1
    line = step_line(report_of(ours, whole_of_one()).steps[0])
    assert line.startswith("step 0  loss 5.5")
    assert f"{len(ours) - 1}/{len(ours)}" in line
