"""Whether Fleet's pipeline can train a plan as it is, asked before a process is started."""

from __future__ import annotations

from collections.abc import Iterator

from pipeproof.exec.fleet.codes import NOT_FOR_FLEET
from pipeproof.specs.finding import Finding, PipeproofError, Severity
from pipeproof.specs.problems import KeyPath
from pipeproof.verify.subject import Subject

Refusal = tuple[KeyPath, str, str]
"""The place in the plan, why Fleet cannot have it so, and what to do."""


def require_suited(subject: Subject) -> None:
    """Refuse a plan that Fleet would not train as it says.

    Raises:
        PipeproofError: PP917, at the place in the plan.
    """
    for path, fact, mend in _refusals(subject):
        location = subject.locate(*path)
        raise PipeproofError(Finding(NOT_FOR_FLEET.code, Severity.ERROR, fact, location=location, help=mend))


def _refusals(subject: Subject) -> Iterator[Refusal]:
    if subject.plan.spec.own_layers is None:
        fact = "Fleet's pipeline is given layers, and the plan has pipeproof's GPT"
        yield ("model", "kind"), fact, "name your layers with `model: {kind: layers, build: FILE.py:FUNCTION}`"
        return
    yield from _of_the_run(subject)
    yield from _of_ranks(subject)
    yield from _of_the_schedule(subject)
    yield from _of_layers(subject)


def _of_the_run(subject: Subject) -> Iterator[Refusal]:
    spec = subject.plan.spec
    run = spec.run
    if run.dtype != "float32":
        yield (
            ("run", "dtype"),
            f"Fleet hands the loss to all stages as float32 or float16, and the plan computes in {run.dtype}",
            "set it to float32",
        )
    if run.clip_norm is not None:
        fact = "Fleet adds the squares of gradients in another order than the plan, so that clipped ones differ"
        yield ("run", "clip_norm"), fact, "leave it out to compare"
    if spec.memory.shard_optimizer != "none":
        fact = "Fleet shards optimizers along an axis of its own, and the plan along dp"
        yield ("memory", "shard_optimizer"), fact, "leave it out to compare: the gradients are the same"
    if spec.schedule.reduce_gradients != "at_end":
        fact = "Fleet sums gradients over data-parallel ranks at the end of a step unless dp_comm_overlap is on"
        yield ("schedule", "reduce_gradients"), fact, "set it to at_end to compare"


def _of_ranks(subject: Subject) -> Iterator[Refusal]:
    topology = subject.plan.spec.topology
    if topology.pp == 1:
        yield ("topology", "pp"), "with one pipeline rank Fleet has no pipeline", "give pp 2 or more"
    if not _is_power_of_two(topology.dp):
        fact = (
            f"Fleet divides gradients by the {topology.dp} data-parallel ranks behind their sum, the plan before it; "
            "the same bits come of it where that is a power of two"
        )
        yield ("topology", "dp"), fact, "compare with dp 1, 2, 4 or 8"


def _of_the_schedule(subject: Subject) -> Iterator[Refusal]:
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
    wanted = _variants(count, pp)
    if schedule.variant not in wanted:
        fact = f"with {count} micro-batches on {pp} ranks Fleet does not run the variant {schedule.variant}"
        yield ("schedule", "variant"), fact, f"set `schedule.variant` to {' or '.join(filter(None, wanted))}"


def _variants(count: int, pp: int) -> tuple[str | None, ...]:
    """What ``fleet.distributed_model`` can choose for so many micro-batches."""
    if count >= 2 * pp:
        return (None, "fleet", "fleet_balanced")
    return ("fleet_balanced",) if count % pp else ("fleet_fthenb", "fleet_balanced")


def _of_layers(subject: Subject) -> Iterator[Refusal]:
    plan = subject.plan
    assert plan.spec.own_layers is not None
    owner = {f"{one.name}.{weight.name}": one.name for one in plan.spec.own_layers.layers for weight in one.parameters}
    for number, layer in enumerate(plan.spec.own_layers.layers):
        if len({owner[name] for name in layer.borrows}) > 1:
            fact = f"the layer `{layer.name}` borrows from two layers, and each of Fleet's shared layers is one of them"
            yield ("model", "layers", number), fact, "put the weights that it borrows into one layer"
    given = {one.name: tuple((tuple(out.shape), out.dtype) for out in one.out) for one in plan.spec.own_layers.layers}
    for rank in range(plan.mesh.size("pp")):
        mine = [stage for stage in range(len(plan.stages)) if rank in plan.holders[stage]]
        sending = [plan.stages[stage][-1] for stage in mine if stage + 1 < len(plan.stages)]
        other = next((name for name in sending if given[name] != given[sending[0]]), None)
        if other is not None:
            fact = (
                f"pipeline rank {rank} sends what `{sending[0]}` gives and what `{other}` gives, of different shapes, "
                "and Fleet's interleaved schedules keep the first one's for all"
            )
            yield ("stages",), fact, "cut the layers where they give equal shapes, or set schedule.kind to 1f1b"
        if not any(layer.parameters for stage in mine for layer in plan.layers_of(stage)):
            fact = f"pipeline rank {rank} has no weights, and Paddle's optimizers take no empty list of them"
            yield ("stages",), fact, "cut the layers otherwise with `stages`"


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
