"""Plan of a Fleet job: the pipeline class that Fleet selects, the mesh, and the transfers between stages."""

from __future__ import annotations

import re
from dataclasses import replace
from math import gcd, lcm
from typing import Any

from pipeproof.diagnostics.finding import Finding, Location, RuleDoc
from pipeproof.diagnostics.source import PlanFileError
from pipeproof.diagnostics.units import size_text
from pipeproof.interop.importers.import_codes import GUARDED, REFUSED, WITHOUT_EFFECT
from pipeproof.interop.importers.imported import Rephrase
from pipeproof.interop.importers.model_sizes import assume_model
from pipeproof.interop.importers.paddle.fleet_job import FleetJob, SourcedValue, overridden
from pipeproof.interop.importers.plan_builder import PlanBuilder
from pipeproof.specs.axis_layout import dtype_bytes
from pipeproof.specs.plan import PlanSpec

_OUR_AXIS = {"mp": "tp", "cp": "cp", "sep": "cp", "ep": "ep", "sharding": "dp", "dp": "dp", "pp": "pp"}
_BLOCK_CLASS = re.compile(r"[.\w*]*(Layer|Block|Pipe)[.\w*]*")


def lay_out(job: FleetJob, plan: PlanBuilder) -> None:
    """Set the values of a plan from a job's settings, with findings about settings with an unexpected effect.

    Raises:
        PlanFileError: PP171, for a job that Fleet refuses.
    """
    job = overridden(job, plan.flags)
    _topology(job, plan)
    _schedule(job, plan)
    _transport(job, plan)
    _layers(job, plan)
    _set_length(job, plan)
    assume_model(plan, job.pp.value * plan.number("schedule", "num_chunks"))
    _partial_send_findings(job, plan)


def _put(plan: PlanBuilder, path: tuple[str, ...], sourced: SourcedValue[Any]) -> None:
    if not sourced.by_default:
        plan.set(path, sourced.value, sourced.setting, sourced.location)


def _ignore(plan: PlanBuilder, sourced: SourcedValue[Any], why: str) -> None:
    plan.ignore(sourced.setting, why, sourced.location)


def _topology(job: FleetJob, plan: PlanBuilder) -> None:
    for axis, sourced in (("pp", job.pp), ("tp", job.tp)):
        _put(plan, ("topology", axis), sourced)
    context = job.cp.value * job.sep.value
    if context > 1:
        sourced = job.cp if job.cp.value > 1 else job.sep
        plan.set(("topology", "cp"), context, sourced.setting, sourced.location)
    if job.sep.value > 1:
        _ignore(plan, job.sep, "the plan shows its ranks as context-parallel ones: transfers between stages have the "
                                "same part of each sequence, collectives inside a block differ")  # fmt: skip
    if job.sequence_parallel.value:
        _put(plan, ("topology", "sequence_parallel"), job.sequence_parallel)
    data_ranks = _data_ranks(job, plan, job.pp.value * job.tp.value * context)
    data = data_ranks or lcm(job.tp.value * context, job.ep.value) // (job.tp.value * context)
    experts = gcd(job.ep.value, data)
    if experts > 1:
        plan.set(("topology", "ep"), experts, job.ep.setting, job.ep.location)
    if experts == 1 < job.ep.value == job.tp.value:
        plan.set(("topology", "experts_over_tp"), value=True, setting=job.ep.setting, location=job.ep.location)
        _ignore(plan, job.ep, "the tensor-parallel ranks share the experts; in the plan each of them gets all tokens "
                               "of a block, where Paddle sends each token to the ranks of its experts")  # fmt: skip
    elif experts < job.ep.value:
        _ignore(plan, job.ep, f"{job.ep.value} ranks share the experts, the tensor-parallel ones among them; the plan "
                               f"shows the {experts} that have their own micro-batches")  # fmt: skip
    if data_ranks:
        source = job.sharding if job.sharding.value is not None else job.dp
        location, setting = (None, "--world-size") if plan.flags.world_size else (source.location, source.setting)
        plan.set(("topology", "dp"), data // experts, setting, location)
    else:
        why = "the files do not have the number of processes (`--world-size`); the fewest possible"
        plan.assume(("topology", "dp"), data // experts, why)
    _axis_order(job, plan)


def _data_ranks(job: FleetJob, plan: PlanBuilder, others: int) -> int | None:
    """Return the number of ranks with their own micro-batches, over all axes; None if it is unknown."""
    world = plan.flags.world_size
    if world is not None:
        if world % others:
            refuse(f"{world} processes do not divide by {others}, the ranks of one pipeline", job.pp.location)
        return world // others
    if job.sharding.value is None and job.dp.value is None:
        return None
    return (job.sharding.value or 1) * (job.dp.value or 1)


def _axis_order(job: FleetJob, plan: PlanBuilder) -> None:
    """Convert Fleet's order, slowest axis first, to ours, fastest first; use dp or sharding, whichever has ranks."""
    dropped = "dp" if (job.dp.value or 1) == 1 else "sharding"
    order: list[str] = []
    for name in reversed(job.order):
        axes = ("ep", "dp") if _OUR_AXIS[name] == "dp" else (_OUR_AXIS[name],)
        order += [axis for axis in axes if name != dropped and axis not in order]
    order += [axis for axis in ("tp", "cp", "ep", "dp", "pp") if axis not in order]
    plan.set(("topology", "order"), order, "the order of the mesh's axes")
    if (job.dp.value or 1) > 1 and (job.sharding.value or 1) > 1:
        _ignore(plan, job.sharding, "data-parallel and sharding ranks are one axis of a plan, at the position of "
                "Fleet's data-parallel axis; global ranks of groups differ, orders and layouts do not")  # fmt: skip


def _schedule(job: FleetJob, plan: PlanBuilder) -> None:
    pp, chunks, accumulate = job.pp, job.chunks, job.accumulate
    plan.set(("schedule", "num_micro_batches"), accumulate.value, accumulate.origin, accumulate.location)
    size = job.micro_batch_size
    plan.set(("schedule", "micro_batch_size"), size.value, size.origin, size.location)
    if job.dualpipe_v.value:
        if accumulate.value < 2 * pp.value:
            refuse(
                f"DualPipeV on {pp.value} ranks takes at least {2 * pp.value} micro-batches, and {accumulate.text}",
                accumulate.location,
                f"set `{accumulate.setting}` to {2 * pp.value} or more",
            )
        switch = job.dualpipe_v
        if chunks.value > 1 and chunks.location is not None:
            message = f"`{switch.setting}` does not go together with `{chunks.setting}` {chunks.value}"
            refuse(message, chunks.location, "remove one of the two")
        plan.set(("schedule", "kind"), "dualpipe_v", switch.setting, switch.location)
        plan.set(("schedule", "num_chunks"), 2, switch.setting, switch.location)
    elif chunks.value == 1 or pp.value == 1:
        if pp.value == 1 and chunks.value > 1:
            ineffective(plan, chunks, "there is one pipeline rank, and no pipeline")
        plan.set(("schedule", "kind"), "1f1b", pp.origin, pp.location)
    else:
        _interleaved(job, plan)
    if job.overlapped_backward.value:
        _ignore(plan, job.overlapped_backward, "with it, forwards and backwards share kernels, and the warm-up has "
                "one more forward; the plan has the order without it")  # fmt: skip
    if job.variable_lengths.value and pp.value > 1:
        why = "the plan has micro-batches of one length; `--set schedule.seq_lengths=[...]` gives each its own"
        _ignore(plan, job.variable_lengths, why)


def _interleaved(job: FleetJob, plan: PlanBuilder) -> None:
    """Set the variant: ``fleet.distributed_model`` selects one of three classes by the number of micro-batches."""
    pp, chunks, accumulate = job.pp.value, job.chunks, job.accumulate
    if pp <= 2:
        refuse(
            f"virtual stages need more than 2 pipeline ranks in Fleet, and {job.pp.text}",
            chunks.location,
            f"set `{chunks.setting}` to 1, or use 4 pipeline ranks",
        )
    if not job.cached_shapes.value:
        refuse(
            f"virtual stages need cached shapes in Fleet, and {job.cached_shapes.text}",
            job.cached_shapes.location or chunks.location,
            "leave it on, and pad sequences of other lengths",
        )
    if accumulate.value < pp:
        refuse(
            f"virtual stages need as many micro-batches as pipeline ranks, {pp}, and {accumulate.text}",
            accumulate.location or chunks.location,
            f"set `{accumulate.setting}` to {2 * pp} or more",
        )
    if accumulate.value >= 2 * pp:
        variant = "fleet_balanced" if job.balanced.value else "fleet"
    elif job.balanced.value:
        variant = "fleet_balanced"
    elif accumulate.value % pp:
        refuse(
            f"between {pp} and {2 * pp} micro-batches Fleet runs all forwards before all backwards, in groups of "
            f"{pp}, and {accumulate.text}",
            accumulate.location or chunks.location,
            f"set `{accumulate.setting}` to {pp} or {2 * pp}, or turn `{job.balanced.setting}` on",
        )
    else:
        variant = "fleet_fthenb"
    plan.set(("schedule", "kind"), "interleaved", chunks.setting, chunks.location)
    plan.set(("schedule", "num_chunks"), chunks.value, chunks.setting, chunks.location)
    plan.set(("schedule", "variant"), variant, accumulate.setting, accumulate.location)


def _transport(job: FleetJob, plan: PlanBuilder) -> None:
    """Set ``partial`` if messages are partial and no guard turns it off.

    Fleet's 1F1B receives the next input before it sends a gradient, and its
    interleaved classes put up to four directions into one batch: transfers of
    neighbours are in one order.
    """
    if job.overlapped.value and job.batched.value and not job.batched.by_default:
        ineffective(plan, job.batched, f"Fleet turns it off if P2P is overlapped, and {job.overlapped.text}")
    sequence_parallel = job.sequence_parallel.value
    for direction in ("forward", "backward"):
        mode = "partial" if job.sends_partially and not (job.guard and sequence_parallel) else "full"
        plan.set(("transport", direction), mode, job.partial.origin, job.partial.location)
    if job.pp.value > 1:
        plan.set(("transport", "recv_order"), "send_order", "Fleet's own order of transfers")
        plan.set(("transport", "connections"), "lazy", "Fleet's groups connect at their first message")
    if sequence_parallel is None:
        why = "a strategy has no field for it: the model decides"
        plan.assume(("topology", "sequence_parallel"), value=False, why=why)


def _partial_send_findings(job: FleetJob, plan: PlanBuilder) -> None:
    """Find PP175: only a guard prevents corrupted tensors."""
    sequence = job.sequence_parallel
    if job.sends_partially and _divides(plan) and job.guard and sequence.value:
        message = f"{job.partial.text} with {sequence.text}, {job.tp.text} and batched P2P ({job.batched.text}): "
        message += "the trainer turns partial sends off; without that guard every boundary tensor would be corrupted"
        fix = f"write `{turn_off(job.partial)}`, which is what the trainer does"
        plan.find(GUARDED.finding(message, sequence.location or job.partial.location, fix))


def _divides(plan: PlanBuilder) -> bool:
    """Return True if Fleet would split boundary tensors: a rank's elements under sequence parallelism divide by tp."""
    tp, cp = (plan.number("topology", axis) for axis in ("tp", "cp"))
    elements = plan.number("model", "seq_length") // (tp * cp)
    elements *= plan.number("schedule", "micro_batch_size")
    elements *= plan.number("model", "hidden_size")
    if not plan.get("model", "mtp", "magic_send", default=False):
        elements *= 1 + plan.number("model", "mtp", "num_modules", default=0)
    return elements % tp == 0


def turn_off(switch: SourcedValue[bool]) -> str:
    """Return the setting that turns partial sends off, in the syntax of its file."""
    if switch.setting == "pipeline_parallel_config":
        return "pipeline_parallel_config: disable_partial_send_recv"
    return f"{switch.setting}: false"


def _layers(job: FleetJob, plan: PlanBuilder) -> None:
    """Set empty layers, MTP modules, and the partition."""
    for end, empty in (("head", job.empty_head), ("tail", job.empty_tail)):
        if empty is not None and empty.value:
            _put(plan, ("model", "empty_layers", end), empty)
    if job.mtp is not None and job.mtp.value:
        _put(plan, ("model", "mtp", "num_modules"), job.mtp)
    if job.cut is not None and job.pp.value > 1 and not job.dualpipe_v.value:
        _cut(job.cut, job.pp.location, plan)


def _cut(cut: SourcedValue[str], stages: Location | None, plan: PlanBuilder) -> None:
    """Set ``stages`` from Fleet's ``seg_method``, whose class names differ from a plan's layers.

    ``stages`` is the location of the number of stages, used for a default partition.
    """
    classes = cut.value.removeprefix("layer:").split("|")
    if cut.value == "uniform":
        plan.set(("stages",), "uniform", cut.origin, cut.location)
    elif cut.value.startswith("layer:") and all(_BLOCK_CLASS.fullmatch(name) for name in classes):
        empty = any("EmptyLayer" in name for name in classes)
        plan_layers = "layer:TransformerLayer|EmptyLayer" if empty else "layer:TransformerLayer"
        plan.set(("stages",), plan_layers, cut.origin, cut.location or stages)
    else:
        _ignore(plan, cut, f"`{cut.value}` cannot be expressed with a plan's layers; the partition is even")


def _set_length(job: FleetJob, plan: PlanBuilder) -> None:
    sequence = job.sequence
    if sequence is not None:
        divisor = plan.number("topology", "cp") * plan.number("topology", "tp")
        fitting = sequence.value - sequence.value % divisor
        if fitting in (sequence.value, 0):
            _put(plan, ("model", "seq_length"), sequence)
        else:
            why = f"the longest that divides over the ranks, and {sequence.text}"
            plan.assume(("model", "seq_length"), fitting, why, sequence.location)


def ineffective(plan: PlanBuilder, sourced: SourcedValue[Any], why: str) -> None:
    """Record PP174: a setting without effect, and the reason."""
    plan.find(WITHOUT_EFFECT.finding(f"{sourced.text} has no effect: {why}", sourced.location))


def refuse(message: str, location: Location | None, help: str | None = None, doc: RuleDoc = REFUSED) -> None:
    """Raise the finding of a job that its own framework would refuse."""
    raise PlanFileError(doc.finding(message, location, help))


_LOSSY_CODE = "PP201"


def rephrasing(job: FleetJob) -> Rephrase:
    """Return a function that rewrites findings of ``check`` in terms of the job's settings; the costs appear once."""

    def rephrase(plan: PlanSpec, findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
        first = next((finding for finding in findings if finding.code == _LOSSY_CODE), None)
        others = f"write `{turn_off(job.partial)}`"
        return tuple(
            replace(finding, help=suggested_fix(job, plan) if finding is first else others)
            if finding.code == _LOSSY_CODE else finding
            for finding in findings
        )  # fmt: skip

    return rephrase


def suggested_fix(job: FleetJob, plan: PlanSpec) -> str:
    """Return the modes of sending, each with the bytes of one pipeline's step over all its tensor-parallel ranks."""
    whole, tp = step_bytes(job, plan), plan.topology.tp
    intro = f"write `{turn_off(job.partial)}` to send whole tensors; a step of one pipeline then moves, forward and "
    intro += f"backward, over all {tp} TP ranks:"
    modes = (
        ("full sends, sequence parallel", whole, 0, " (this fix)"),
        ("partial sends, sequence parallel", whole // tp, (tp - 1) * whole // tp, ", and wrong"),
        ("partial sends, without it", whole, (tp - 1) * whole, ""),
        ("full sends, without it", tp * whole, 0, ""),
    )
    lines = [
        f"{mode + ':':<34} {size_text(sent)} between stages"
        + (f" + {size_text(gathered)} in all-gathers" if gathered else "")
        + remark
        for mode, sent, gathered, remark in modes
    ]
    return "\n".join([intro, *lines])


def step_bytes(job: FleetJob, plan: PlanSpec) -> int:
    """Return the bytes of all boundary tensors of one pipeline's step, activations and gradients, each counted once.

    A boundary tensor has sequence / cp x rows x hidden elements for each
    residual stream, and as many again for each MTP module if the first stage
    embeds the modules' tokens.
    """
    model, topology, schedule = plan.gpt, plan.topology, plan.schedule
    num_mtp = 0 if model.mtp is None or model.mtp.magic_send else model.mtp.num_modules
    elements = model.seq_length // topology.cp * schedule.micro_batch_size * model.hidden_size
    elements *= model.num_streams * (1 + num_mtp)
    dtype = plan.run.dtype if job.dtype is None else job.dtype.value
    return 2 * schedule.num_micro_batches * (plan.num_stages - 1) * elements * dtype_bytes(dtype)
