"""Bytes over simulated time, against a slow account of the same, counts of activations, and cases by hand."""

import base64
import json
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipeproof.comm.lower import lower, lower_loaded
from pipeproof.diagnostics.finding import BadPlanError
from pipeproof.diagnostics.units import size_text
from pipeproof.sim.memory_curve import GIB, PARTS, MemoryCurve, Part
from pipeproof.sim.outcome import SimulationError
from pipeproof.sim.simulate import simulate, simulation_to_json
from pipeproof.sim.step_memory import stage_holdings
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.stages.describe.stage_memory import Lifetime
from pipeproof.views.html.timeline_page import payload
from pipeproof.views.memory_curves import Curve, memory_held
from pipeproof.views.memory_table import make_up_text, render_memory, render_stage_memory
from tests.plans import plan_dict
from tests.schedule.drawn import plan_of, requests
from tests.sim.slow_memory import peaks

ACTIVATION = 8 * 2 * 16 * 4
"""Bytes of the tensor between stages of the base plan."""


def lowered(**sections):
    return lower_loaded(plan_from_dict(plan_dict(**sections)))


@settings(max_examples=25)
@given(requests(max_ranks=4, max_chunks=2), st.data())
def test_peaks_are_those_of_the_slow_account_on_both_engines(drawn, data):
    kind, request = drawn
    plan = plan_of(kind, request)
    plan["memory"] = {"recompute": data.draw(st.sampled_from(["none", "selective", "full"]), "recompute")}
    plan["buffers"] = {
        "free_output": data.draw(st.sampled_from(["after_backward", "after_send_done", "after_send_posted"]))
    }
    plan["cost"]["p2p"] = data.draw(st.sampled_from(["async", "rendezvous"]), "p2p")
    plan["topology"]["tp"] = data.draw(st.sampled_from([1, 2]), "tp")
    plan["transport"] = data.draw(st.sampled_from(["full", "partial"]), "transport")
    try:
        one = lower(plan_from_dict(plan).spec)
        fast, slow = simulate(one), simulate(one, engine="simpy")
    except (BadPlanError, SimulationError):
        assume(False)  # such a schedule is not made, or waits for itself where sends wait for receives
    expected = peaks(one, slow.timeline)
    assert [curve.peak for curve in slow.memory] == expected
    assert [curve.peak for curve in fast.memory] == expected
    assert [curve.peak_at_us for curve in fast.memory] == [curve.peak_at_us for curve in slow.memory]


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "eager_1f1b", "interleaved", "looped_bfs"])
def test_peaks_of_equal_stages_are_counts_of_activations(kind):
    chunks = 2 if kind in ("interleaved", "looped_bfs") else 1
    blocks = [[f"layer.{i}"] for i in range(4 * chunks)]
    stages = [["embed", *blocks[0]], *blocks[1:-1], [*blocks[-1], "norm", "head"]]
    one = lowered(
        model={"num_layers": 4 * chunks}, topology={"pp": 4}, stages=stages,
        schedule={"kind": kind, "num_chunks": chunks, "num_micro_batches": 8},
    )  # fmt: skip
    simulation = simulate(one)
    of_one = sum(held.num_bytes for held in stage_holdings(one, 1) if held.lifetime.is_from_forward)
    for rank in (1, 2):  # without embedding and head
        curve = simulation.memory[rank]
        held = [0]
        for part, change in zip(curve.part, curve.change, strict=True):
            if PARTS[part] is Part.ACTIVATIONS:
                held.append(held[-1] + int(change))
        assert max(held) == simulation.figures[rank].peak_activations * of_one
        assert held[-1] == 0


@pytest.mark.parametrize("sections", [{}, {"schedule": {"kind": "zb_h1"}}, {"memory": {"overhead_gib": 0.5}}])
def test_a_peak_is_the_sum_of_its_parts_and_all_is_given_back(sections):
    for curve in simulate(lowered(**sections)).memory:
        assert sum(curve.make_up.values()) == curve.peak
        assert curve.held[-1] == sum(curve.persistent.values())
        assert curve.held.min() >= curve.held[-1]
        times, held = curve.steps()
        assert held[list(times).index(int(curve.peak_at_us * curve.ticks_per_us))] == curve.peak


@pytest.mark.parametrize("sections", [{}, {"memory": {"overhead_gib": 0.5}}])
def test_fragmentation_is_a_share_of_the_tensors_at_the_peak(sections):
    """A quarter more than the tensors, all along; contexts and buffers outside of the allocator do not fragment."""
    plain = simulate(lowered(**sections)).memory
    memory = {**sections.get("memory", {}), "fragmentation": 0.25}
    for before, after in zip(plain, simulate(lowered(memory=memory)).memory, strict=True):
        tensors = before.peak - before.make_up[Part.OVERHEAD]
        assert after.peak - before.peak == -(-tensors // 4)
        assert after.peak_at_us == before.peak_at_us
        assert after.make_up[Part.OVERHEAD] - before.make_up[Part.OVERHEAD] == after.peak - before.peak
        assert sum(after.make_up.values()) == after.peak
        assert after.held[-1] == sum(after.persistent.values())


def test_offloaded_blocks_are_not_held_between_forward_and_backward():
    """GPipe holds all 4 micro-batches before the first backward, but of blocks only the activations of one F or I."""
    sections = {"schedule": {"kind": "gpipe", "num_micro_batches": 4}, "memory": {"offload_blocks": 2}}
    plan = lowered(**sections)

    def held(stage, *lifetimes):
        return sum(h.num_bytes for h in stage_holdings(plan, stage) if h.lifetime in lifetimes and not h.is_logits)

    expected = [
        4 * held(stage, Lifetime.TO_INPUT, Lifetime.TO_WEIGHT)
        + max(held(stage, Lifetime.IN_FORWARD), held(stage, Lifetime.IN_INPUT))
        for stage in range(2)
    ]
    assert parts_of(Part.ACTIVATIONS, **sections) == expected
    without = parts_of(Part.ACTIVATIONS, schedule=sections["schedule"])
    assert all(few < many for few, many in zip(expected, without, strict=True))


def parts_of(part, **sections):
    """The most of one part on each rank, over the whole step."""
    found = []
    for curve in simulate(lowered(**sections)).memory:
        level = most = curve.persistent.get(part, 0)
        for code, change in zip(curve.part, curve.change, strict=True):
            level += int(change) if PARTS[code] is part else 0
            most = max(most, level)
        found.append(most)
    return found


def level(curve, tick):
    """Bytes held at a time."""
    times, held = curve.steps()
    return int(held[list(times <= tick).index(False) - 1])


def test_outputs_are_given_back_when_the_plan_says():
    """1F1B on two ranks: rank 0 holds the outputs of two micro-batches, and receives a gradient next to them.

    The wait for a send stands behind that for the gradient; a send is posted as soon as there is an output.
    """
    for when, held in (("after_backward", 3), ("after_send_done", 3), ("after_send_posted", 1)):
        assert parts_of(Part.MESSAGES, buffers={"free_output": when})[0] == held * ACTIVATION
    kept, without = (
        simulate(lowered(buffers={"free_output": when})).memory[0] for when in ("after_backward", "after_send_done")
    )
    assert level(kept, 500) - level(without, 500) == ACTIVATION  # while B of the first micro-batch runs


def test_slots_are_there_all_along_and_layers_work_in_them():
    own = parts_of(Part.ACTIVATIONS)
    slots = {"buffers": {"receive_slots": 2}}
    assert parts_of(Part.MESSAGES, **slots) == [2 * ACTIVATION + 2 * ACTIVATION, 2 * ACTIVATION]
    assert parts_of(Part.ACTIVATIONS, **slots) == [own[0], own[1] - ACTIVATION]
    both = {"buffers": {"receive_slots": 2, "send_slots": 3}}
    assert parts_of(Part.MESSAGES, **both)[1] == (2 + 3) * ACTIVATION


def test_slots_leave_out_an_input_only_as_long_as_layers_would_keep_it():
    """A block with residual streams keeps its input until I, other blocks until W."""
    for model, during_w in (({}, ACTIVATION), ({"hyper_connections": {"streams": 2}}, 0)):
        sections = {"model": model, "schedule": {"kind": "zb_h1", "num_micro_batches": 1}}
        plain, slotted = (
            simulate(lowered(**sections, buffers=buffers)).memory[1] for buffers in ({}, {"receive_slots": 1})
        )
        held = [
            [level(curve, tick) - int(curve.held[-1]) for tick in (150, 250, 350)]  # F, I and W
            for curve in (plain, slotted)
        ]
        message = 2 * ACTIVATION if model else ACTIVATION
        assert [before - after for before, after in zip(*held, strict=True)] == [message, message, during_w]


def test_a_custom_layer_that_keeps_nothing_holds_nothing_in_slots():
    layers = [{"name": name, "out": [{"shape": ["b", 4]}], "activation_bytes": 0} for name in ("a", "b")]
    del layers[1]["out"]
    loss = {"normalization": "mean_of_micro_batches"}
    data = plan_dict(stages=[["a"], ["b"]], buffers={"receive_slots": 2}, loss=loss)
    data["model"] = {"kind": "layers", "layers": layers}
    for curve in simulate(lower_loaded(plan_from_dict(data))).memory:
        always = sum(curve.persistent.values())
        assert curve.held.min(initial=always) == always


def test_a_mask_beside_the_activation_stays_until_its_backward():
    boundaries = [{"name": "hidden", "dims": "sbh"}, {"name": "mask", "dims": "sb", "dtype": "bool"}]
    alone, with_mask = parts_of(Part.MESSAGES), parts_of(Part.MESSAGES, boundaries=boundaries)
    assert with_mask[1] - alone[1] == 8 * 2  # one micro-batch at a time on the last rank


def test_forwards_alone_keep_no_activations():
    """An output is there until it has arrived, an input until it has been used."""
    schedule = {"kind": "custom", "num_micro_batches": 2, "programs": [["0F0", "0F1"], ["1F0", "1F1"]]}
    for curve in simulate(lowered(schedule=schedule, cost={"p2p_latency_us": 10})).memory:
        assert curve.make_up[Part.ACTIVATIONS] == curve.make_up[Part.LOGITS] == 0
        assert curve.make_up[Part.MESSAGES] == ACTIVATION


def test_replicas_that_are_counted_once_hold_the_same():
    folded = lowered(topology={"tp": 2, "dp": 2, "sequence_parallel": True})
    whole = simulate(folded.unfolded()).memory
    assert {curve.peak for curve in simulate(folded).memory} == {curve.peak for curve in whole}


def test_two_copies_of_a_stage_are_two():
    chimera = {"kind": "chimera", "num_micro_batches": 4}
    one, two = lowered(), lowered(schedule=chimera)
    weights = [sum(curve.persistent[Part.PARAMETERS] for curve in simulate(each).memory) for each in (one, two)]
    assert weights[1] == 2 * weights[0]


def test_a_curve_that_nothing_comes_to():
    empty = MemoryCurve({Part.PARAMETERS: 7}, *[simulate(lowered()).memory[0].times[:0]] * 3, ticks_per_us=3)
    assert (empty.peak, empty.peak_at_us, empty.make_up[Part.PARAMETERS]) == (7, 0, 7)


def test_the_page_draws_bytes_in_place_of_counts():
    plan = lowered(cost={"forward_us": "1/3", "backward_us": "2/7"})
    simulation = simulate(plan)
    curve = memory_held(simulation.timeline, simulation.memory)
    page = payload("a plan", simulation.timeline, plan.graph, curve)
    assert page["held_unit"] == "bytes"
    for held, one in zip(page["held"], simulation.memory, strict=True):
        values = np.frombuffer(base64.b64decode(held["count"]["data"]), "<f8")
        assert (values.max(), values[-1]) == (one.peak, sum(one.persistent.values()))
    assert payload("a plan", simulation.timeline, plan.graph)["held_unit"] == "activations"
    with pytest.raises(ValueError, match="1 curves for 2 ranks"):
        payload("a plan", simulation.timeline, plan.graph, Curve("memory", "bytes", curve.ranks[:1]))


def test_json_has_the_peak_and_its_parts():
    one = json.loads(json.dumps(simulation_to_json(simulate(lowered()), "given")))["ranks"][0]["memory"]
    assert one["peak_bytes"] == sum(size for key, size in one.items() if key.endswith("_bytes")) - one["peak_bytes"]
    assert one["peak_at"] == 200


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "0.98 KiB"), (1024**2, "1.00 MiB"), (12 * 1024**2, "12.0 MiB"),
     (200 * GIB, "200 GiB"), (5000 * GIB, "5000 GiB")],
)  # fmt: skip
def test_sizes_as_text(num_bytes, text):
    assert size_text(num_bytes) == text


def test_the_table_has_ranks_alike_together_and_says_how_they_stand_to_the_budget(printed):
    one = lowered(topology={"tp": 2}, memory={"budget_gib": 0.00007})
    text = printed(lambda console: render_memory(simulate(one), one, console))
    assert "in KiB" in text
    assert "float32, gradients in float32, 8 optimizer bytes a parameter, flash attention" in text
    assert "\n0-1 " in text
    assert "\n2-3 " in text
    assert "memory.budget_gib is 7e-05: 2 of 4 ranks need more" in text


def test_inputs_of_products_in_fewer_bits_are_in_lowered_plans():
    """Lowering replaces ``cost.analytic`` by its times; the type therefore has to be kept elsewhere."""
    cost = {"analytic": {"device": "h100", "dtype": "bfloat16", "matmul_dtype": "float8"}}
    wide, narrow, named = (
        lowered(cost=cost, memory={"product_inputs": kind}) for kind in ("dtype", "matmul_dtype", "float8")
    )
    assert narrow.spec.cost.analytic is None
    assert plan_from_dict(narrow.spec.model_dump(mode="json")).spec == narrow.spec  # as the processes of a run read it
    sizes = [sum(held.num_bytes for held in stage_holdings(plan, 0)) for plan in (wide, narrow, named)]
    assert sizes[0] > sizes[1] == sizes[2]
    assert [curve.peak for curve in simulate(narrow).memory] == [curve.peak for curve in simulate(named).memory]


def test_the_table_of_a_stage_has_every_operation(printed):
    one = lowered(memory={"recompute": "selective", "shard_optimizer": "dp"})
    text = printed(lambda console: render_stage_memory(one, console))
    for held in stage_holdings(one, 0):
        assert held.name in text
    assert "selective recompute" in text
    assert "shared by dp ranks" in text
    assert Lifetime.IN_INPUT.value in text


def test_the_parts_of_a_peak_in_words_begin_with_the_largest():
    curve = simulate(lowered()).memory[0]
    assert make_up_text(curve).startswith("activations 57.8 KiB, optimizer 44.5 KiB")
    assert Fraction(curve.peak, 1024) > 57


@pytest.fixture
def printed():
    """Output on a console of 120 columns."""
    from io import StringIO

    from rich.console import Console

    def text_of(show):
        stream = StringIO()
        show(Console(file=stream, width=120))
        return stream.getvalue()

    return text_of


@pytest.mark.parametrize(
    ("cross_entropy", "kept", "added"),
    [("separate", 4, 4), ("in_place", 4, 2), ("compiled", 4, 6), ("fused", 2, 0)],
)
def test_buffers_of_the_loss(cross_entropy, kept, added):
    """Bytes of an element of the logits from F on, and while I runs; the label has eight more from F on."""
    one = lowered(memory={"dtype": "bfloat16", "cross_entropy": cross_entropy})
    held = {h.lifetime: h.num_bytes for h in stage_holdings(one, 1) if h.name == "head.loss"}
    model, size = one.spec.model, one.spec.schedule.micro_batch_size
    tokens = model.seq_length * size
    assert held[Lifetime.TO_INPUT] == tokens * (kept * model.vocab_size + 8)
    assert held.get(Lifetime.IN_INPUT, 0) == tokens * added * model.vocab_size
