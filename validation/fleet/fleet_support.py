"""Plan features that Fleet's pipeline does not support (PP917), checked before a process starts."""

from __future__ import annotations

from collections.abc import Iterator

from pipeproof.diagnostics.finding import PipeproofError
from pipeproof.diagnostics.problems import KeyPath
from pipeproof.verify.subject import Subject
from validation.fleet.fleet_codes import NOT_FOR_FLEET

Refusal = tuple[KeyPath, str, str]
"""Key path in the plan, the reason why Fleet does not support it, and the suggested fix."""


def require_fleet_support(subject: Subject) -> None:
    """Refuse a plan that Fleet would train in another way than the plan states.

    Raises:
        PipeproofError: PP917, with the location in the plan.
    """
    for path, fact, fix in _refusals(subject):
        location = subject.locate(*path)
        raise PipeproofError(NOT_FOR_FLEET.finding(fact, location=location, help=fix))


def _refusals(subject: Subject) -> Iterator[Refusal]:
    if not subject.plan.spec.is_custom:
        fact = "Fleet's pipeline takes custom layers, and the plan has pipeproof's GPT"
        yield ("model", "kind"), fact, "name your layers with `model: {kind: layers, build: FILE.py:FUNCTION}`"
        return
    yield from _run_refusals(subject)
    yield from _topology_refusals(subject)
    yield from _schedule_refusals(subject)
    yield from _layer_refusals(subject)


def _run_refusals(subject: Subject) -> Iterator[Refusal]:
    spec = subject.plan.spec
    run = spec.run
    if run.dtype != "float32":
        yield (
            ("run", "dtype"),
            f"Fleet passes the loss to all stages as float32 or float16, and the plan computes in {run.dtype}",
            "set it to float32",
        )
    if run.clip_norm is not None:
        fact = "Fleet adds the squares of gradients in another order than the plan, so clipped gradients differ"
        yield ("run", "clip_norm"), fact, "leave it out to compare"
    if spec.memory.shard_optimizer != "none":
        fact = "Fleet shards optimizers along a separate axis, and the plan along dp"
        yield ("memory", "shard_optimizer"), fact, "leave it out to compare: the gradients are the same"
    if spec.schedule.reduce_gradients != "at_end":
        fact = "Fleet sums gradients over data-parallel ranks at the end of a step unless dp_comm_overlap is on"
        yield ("schedule", "reduce_gradients"), fact, "set it to at_end to compare"


def _topology_refusals(subject: Subject) -> Iterator[Refusal]:
    topology = subject.plan.spec.topology
    if topology.pp == 1:
        yield ("topology", "pp"), "with one pipeline rank Fleet has no pipeline", "give pp 2 or more"
    if not _is_power_of_two(topology.dp):
        fact = (
            f"Fleet divides gradients by the {topology.dp} data-parallel ranks after their sum, the plan before it; "
            "the bits are equal only for a power of two"
        )
        yield ("topology", "dp"), fact, "compare with dp 1, 2, 4 or 8"


def _schedule_refusals(subject: Subject) -> Iterator[Refusal]:
    schedule, pp = subject.plan.spec.schedule, subject.plan.spec.topology.pp
    count = schedule.num_micro_batches
    if schedule.kind not in ("1f1b", "interleaved"):
        fact = f"Fleet's pipeline on the CPU has 1F1B and interleaved schedules, and no {schedule.kind}"
        yield ("schedule", "kind"), fact, "set it to 1f1b, or to interleaved with `num_chunks`"
    if schedule.kind != "interleaved":
        return
    if pp <= 2:
        fact = f"Fleet's interleaved schedules need more than 2 pipeline ranks, and the plan has {pp}"
        yield ("topology", "pp"), fact, "give pp 3 or more, or set schedule.kind to 1f1b"
    if count < pp:
        fact = (
            f"Fleet's interleaved schedules need as many micro-batches as pipeline ranks, {pp}, and {count} are given"
        )
        yield ("schedule", "num_micro_batches"), fact, f"give {2 * pp} or more"
    variants = _variants(count, pp)
    if schedule.variant not in variants:
        fact = f"with {count} micro-batches on {pp} ranks Fleet does not run the variant {schedule.variant}"
        yield ("schedule", "variant"), fact, f"set `schedule.variant` to {' or '.join(filter(None, variants))}"


def _variants(count: int, pp: int) -> tuple[str | None, ...]:
    """Variants that ``fleet.distributed_model`` can choose for ``count`` micro-batches."""
    if count >= 2 * pp:
        return (None, "fleet", "fleet_balanced")
    return ("fleet_balanced",) if count % pp else ("fleet_fthenb", "fleet_balanced")


def _layer_refusals(subject: Subject) -> Iterator[Refusal]:
    plan = subject.plan
    owner = {
        f"{layer.name}.{weight.name}": layer.name for layer in plan.spec.custom.layers for weight in layer.parameters
    }
    for number, layer in enumerate(plan.spec.custom.layers):
        if len({owner[name] for name in layer.borrows}) > 1:
            fact = (
                f"the layer `{layer.name}` borrows weights from two layers, and Fleet can share those of one layer only"
            )
            yield ("model", "layers", number), fact, "put the borrowed weights into one layer"
    outputs = {
        layer.name: tuple((tuple(out.shape), out.dtype) for out in layer.out) for layer in plan.spec.custom.layers
    }
    for rank in range(plan.mesh.size("pp")):
        rank_stages = [stage for stage in range(len(plan.stages)) if rank in plan.holders[stage]]
        senders = [plan.stages[stage][-1] for stage in rank_stages if stage + 1 < len(plan.stages)]
        different = next((name for name in senders if outputs[name] != outputs[senders[0]]), None)
        if different is not None:
            fact = (
                f"pipeline rank {rank} sends the outputs of `{senders[0]}` and of `{different}`, which have different "
                "shapes, and Fleet's interleaved schedules use the first shape for all"
            )
            yield ("stages",), fact, "cut the layers where outputs have equal shapes, or set schedule.kind to 1f1b"
        if not any(layer.parameters for stage in rank_stages for layer in plan.layers_of(stage)):
            fact = f"pipeline rank {rank} has no weights, and Paddle's optimizers do not accept an empty list"
            yield ("stages",), fact, "cut the layers in another way with `stages`"


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
