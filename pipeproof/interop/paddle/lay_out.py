"""From a Fleet job to a plan: the class that Fleet picks, the mesh, and what crosses between stages."""

from __future__ import annotations

import re
from math import gcd, lcm

from pipeproof.interop.codes import GUARDED, REFUSED, UNSAID, WITHOUT_EFFECT
from pipeproof.interop.draft import Draft
from pipeproof.interop.model_sizes import Needs, assume_model
from pipeproof.interop.paddle.job import FleetJob, Given, overridden
from pipeproof.specs.codes import RuleDoc
from pipeproof.specs.finding import Finding, Location, Severity
from pipeproof.specs.load import PlanFileError

_OUR_AXIS = {"mp": "tp", "cp": "cp", "sep": "cp", "ep": "ep", "sharding": "dp", "dp": "dp", "pp": "pp"}
_BLOCK_CLASS = re.compile(r"[.\w*]*(Layer|Block|Pipe)[.\w*]*")


def lay_out(job: FleetJob, draft: Draft) -> None:
    """Put a job's settings into a draft, with findings about those that do not do what they say.

    Raises:
        PlanFileError: PP171, for a job that Fleet refuses.
    """
    job = overridden(job, draft.flags)
    _topology(job, draft)
    _schedule(job, draft)
    _transport(job, draft)
    _layers(job, draft)
    assume_model(draft, _needs(job, draft))
    _doubtful(job, draft)


def _put(draft: Draft, path: tuple[str, ...], given: Given[int] | Given[bool]) -> None:
    if not given.by_default:
        draft.set(path, given.value, given.setting, given.location)


def _topology(job: FleetJob, draft: Draft) -> None:
    for axis, given in (("pp", job.pp), ("tp", job.tp)):
        _put(draft, ("topology", axis), given)
    context = job.cp.value * job.sep.value
    if context > 1:
        given = job.cp if job.cp.value > 1 else job.sep
        draft.set(("topology", "cp"), context, given.setting, given.location)
    if job.sep.value > 1:
        draft.ignore(
            job.sep.setting,
            "the plan shows its ranks as context-parallel ones: the same share of each sequence crosses between "
            "stages, other collectives stand inside a block",
            job.sep.location,
        )
    if job.sequence_parallel.value:
        sequence = job.sequence_parallel
        draft.set(("topology", "sequence_parallel"), sequence.value, sequence.setting, sequence.location)
    known = _data_ranks(job, draft, job.pp.value * job.tp.value * context)
    data = known or lcm(job.tp.value * context, job.ep.value) // (job.tp.value * context)
    experts = gcd(job.ep.value, data)
    if experts > 1:
        draft.set(("topology", "ep"), experts, job.ep.setting, job.ep.location)
    if experts < job.ep.value:
        draft.ignore(
            job.ep.setting,
            f"{job.ep.value} ranks share the experts, the tensor-parallel ones among them; the plan shows the "
            f"{experts} that have micro-batches of their own",
            job.ep.location,
        )
    if known:
        source = job.sharding if job.sharding.value is not None else job.dp
        place, setting = (None, "--world-size") if draft.flags.world_size else (source.location, source.setting)
        draft.set(("topology", "dp"), data // experts, setting, place)
    else:
        why = "the files do not say on how many processes the job runs (`--world-size`); as few as it can"
        draft.assume(("topology", "dp"), data // experts, why)
    _axis_order(job, draft)


def _data_ranks(job: FleetJob, draft: Draft, others: int) -> int | None:
    """Ranks with micro-batches of their own, over all axes; None where nothing says it."""
    world = draft.flags.world_size
    if world is not None:
        if world % others:
            refuse(f"{world} processes do not divide by {others}, the ranks of one pipeline", job.pp.location)
        return world // others
    if job.sharding.value is None and job.dp.value is None:
        return None
    return (job.sharding.value or 1) * (job.dp.value or 1)


def _axis_order(job: FleetJob, draft: Draft) -> None:
    """Fleet's order, the slowest axis first, as ours, the fastest first; of dp and sharding the one that has ranks."""
    dropped = "dp" if (job.dp.value or 1) == 1 else "sharding"
    order: list[str] = []
    for name in reversed(job.order):
        axes = ("ep", "dp") if _OUR_AXIS[name] == "dp" else (_OUR_AXIS[name],)
        order += [axis for axis in axes if name != dropped and axis not in order]
    order += [axis for axis in ("tp", "cp", "ep", "dp", "pp") if axis not in order]
    draft.set(("topology", "order"), order, "the order of the mesh's axes")
    if (job.dp.value or 1) > 1 and (job.sharding.value or 1) > 1:
        draft.ignore(
            job.sharding.setting,
            "data-parallel and sharding ranks are one axis of a plan, which stands where Fleet has the "
            "data-parallel one; global ranks of groups differ, orders and layouts do not",
            job.sharding.location,
        )


def _schedule(job: FleetJob, draft: Draft) -> None:
    pp, chunks, accumulate = job.pp, job.chunks, job.accumulate
    draft.set(("schedule", "num_micro_batches"), accumulate.value, accumulate.origin, accumulate.location)
    size = job.micro_batch_size
    draft.set(("schedule", "micro_batch_size"), size.value, size.origin, size.location)
    if job.dualpipe_v.value:
        if accumulate.value < 2 * pp.value:
            refuse(
                f"DualPipeV on {pp.value} ranks takes at least {2 * pp.value} micro-batches, and {accumulate.words}",
                accumulate.location,
                f"set `{accumulate.setting}` to {2 * pp.value} or more",
            )
        switch = job.dualpipe_v
        draft.set(("schedule", "kind"), "dualpipe_v", switch.setting, switch.location)
        draft.set(("schedule", "num_chunks"), 2, switch.setting, switch.location)
    elif chunks.value == 1 or pp.value == 1:
        if pp.value == 1 and chunks.value > 1:
            ineffective(draft, chunks, "there is one pipeline rank, and no pipeline")
        draft.set(("schedule", "kind"), "1f1b", pp.origin, pp.location)
    else:
        _interleaved(job, draft)
    if job.overlapped_backward.value:
        draft.ignore(
            job.overlapped_backward.setting,
            "forwards and backwards share kernels with it, and the start-up has one forward more; the plan has the "
            "order without it",
            job.overlapped_backward.location,
        )
    if job.variable_lengths.value and pp.value > 1:
        draft.ignore(
            job.variable_lengths.setting,
            "the plan has micro-batches of one length; `--set schedule.seq_lengths=[...]` gives each its own",
            job.variable_lengths.location,
        )


def _interleaved(job: FleetJob, draft: Draft) -> None:
    """Between three classes ``fleet.distributed_model`` chooses by the number of micro-batches; each has conditions."""
    pp, chunks, accumulate = job.pp.value, job.chunks, job.accumulate
    if pp <= 2:
        refuse(
            f"virtual stages need more than 2 pipeline ranks in Fleet, and {job.pp.words}",
            chunks.location,
            f"set `{chunks.setting}` to 1, or use 4 pipeline ranks",
        )
    if not job.cached_shapes.value:
        refuse(
            f"virtual stages need cached shapes in Fleet, and {job.cached_shapes.words}",
            job.cached_shapes.location or chunks.location,
            "leave it on, and let sequences of other lengths be padded",
        )
    if accumulate.value < pp:
        refuse(
            f"virtual stages need as many micro-batches as pipeline ranks, {pp}, and {accumulate.words}",
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
            f"{pp}, and {accumulate.words}",
            accumulate.location or chunks.location,
            f"set `{accumulate.setting}` to {pp} or {2 * pp}, or turn `{job.balanced.setting}` on",
        )
    else:
        variant = "fleet_fthenb"
    draft.set(("schedule", "kind"), "interleaved", chunks.setting, chunks.location)
    draft.set(("schedule", "num_chunks"), chunks.value, chunks.setting, chunks.location)
    draft.set(("schedule", "variant"), variant, accumulate.setting, accumulate.location)


def _transport(job: FleetJob, draft: Draft) -> None:
    """``partial`` where the switch reaches the messages and no guard turns it off.

    Fleet's 1F1B takes the next input before it sends a gradient, and its
    interleaved classes put up to four directions into one batch: transfers of
    neighbours are in one order.
    """
    if job.overlapped.value and job.batched.value and not job.batched.by_default:
        ineffective(draft, job.batched, f"Fleet turns it off where P2P is overlapped, and {job.overlapped.words}")
    said = job.sequence_parallel.value
    for direction in ("forward", "backward"):
        how = "partial" if job.sends_partially and not (job.guard and said) else "full"
        draft.set(("transport", direction), how, job.partial.origin, job.partial.location)
    if job.pp.value > 1:
        draft.set(("transport", "recv_post"), "as_sent", "Fleet's own order of transfers")
    if said is None:
        draft.assume(
            ("topology", "sequence_parallel"), value=False, why="a strategy has no field for it: the model decides"
        )


def _doubtful(job: FleetJob, draft: Draft) -> None:
    """PP175 and PP176: tensors would be corrupted but for a guard, or are if the model is sequence-parallel."""
    sequence, said = job.sequence_parallel, job.sequence_parallel.value
    if not job.sends_partially or not _divides(draft):
        return
    if job.guard and said:
        draft.find(
            Finding(
                GUARDED.code,
                Severity.WARNING,
                f"{job.partial.words} beside {sequence.words}, {job.tp.words} and batched P2P ({job.batched.words}): "
                "the trainer turns partial sends off, and without that guard every boundary tensor would be "
                "corrupted",
                sequence.location or job.partial.location,
                f"say what happens: `{turn_off(job.partial)}`",
            )
        )
    elif said is None:
        draft.find(
            Finding(
                UNSAID.code,
                Severity.WARNING,
                f"{job.partial.words}, {job.tp.words} and P2P is batched: sound without sequence parallelism, of "
                "which a strategy says nothing; with it every boundary tensor is corrupted",
                job.partial.location or job.tp.location,
                "`--set topology.sequence_parallel=true` or `=false` says which it is; off is safe in both: "
                f"`{turn_off(job.partial)}`",
            )
        )


def _divides(draft: Draft) -> bool:
    """Whether Fleet would cut the tensor between stages: the elements of a sequence-parallel rank divide over them."""
    tp, cp = (draft.number("topology", axis, default=1) for axis in ("tp", "cp"))
    elements = draft.number("model", "seq_length", default=1) // (tp * cp)
    elements *= draft.number("schedule", "micro_batch_size", default=1)
    elements *= draft.number("model", "hidden_size", default=1)
    if not draft.get("model", "mtp", "magic_send", default=False):
        elements *= 1 + draft.number("model", "mtp", "num_modules", default=0)
    return elements % tp == 0


def turn_off(switch: Given[bool]) -> str:
    """The setting that turns partial sends off, as its file has it."""
    if switch.setting == "pipeline_parallel_config":
        return "pipeline_parallel_config: disable_partial_send_recv"
    return f"{switch.setting}: false"


def _layers(job: FleetJob, draft: Draft) -> None:
    """Empty layers, modules for tokens further ahead, and the cut."""
    for end, empty in (("head", job.empty_head), ("tail", job.empty_tail)):
        if empty is not None and empty.value:
            draft.set(("model", "empty_layers", end), empty.value, empty.setting, empty.location)
    if job.mtp is not None and job.mtp.value:
        draft.set(("model", "mtp", "num_modules"), job.mtp.value, job.mtp.setting, job.mtp.location)
    if job.cut is not None and job.pp.value > 1 and not job.dualpipe_v.value:
        _cut(job.cut, job.pp.location, draft)


def _cut(cut: Given[str], stages: Location | None, draft: Draft) -> None:
    """Fleet's ``seg_method`` by class names, which are other names than those of a plan's layers.

    ``stages`` is the place of their number, which stands for that of a cut by default.
    """
    classes = cut.value.removeprefix("layer:").split("|")
    if cut.value == "uniform":
        draft.set(("stages",), "uniform", cut.origin, cut.location)
    elif cut.value.startswith("layer:") and all(_BLOCK_CLASS.fullmatch(name) for name in classes):
        empty = any("EmptyLayer" in name for name in classes)
        ours = "layer:TransformerLayer|EmptyLayer" if empty else "layer:TransformerLayer"
        draft.set(("stages",), ours, cut.origin, cut.location or stages)
    else:
        draft.ignore(cut.setting, f"`{cut.value}` cannot be said of a plan's layers; the cut is even", cut.location)


def _needs(job: FleetJob, draft: Draft) -> Needs:
    sequence = job.sequence
    if sequence is not None:
        unit = draft.number("topology", "cp", default=1) * draft.number("topology", "tp", default=1)
        fitting = sequence.value - sequence.value % unit
        if fitting == sequence.value or fitting == 0:
            draft.set(("model", "seq_length"), sequence.value, sequence.setting, sequence.location)
        else:
            why = f"the longest that divides over the ranks, and {sequence.words}"
            draft.assume(("model", "seq_length"), fitting, why, sequence.location)
    stages = job.pp.value * draft.number("schedule", "num_chunks", default=1)
    return Needs(num_stages=stages)


def ineffective(draft: Draft, given: Given[int] | Given[bool] | Given[str], why: str) -> None:
    """PP174: a setting that does nothing, and why."""
    draft.find(Finding(WITHOUT_EFFECT.code, Severity.WARNING, f"{given.words} has no effect: {why}", given.location))


def refuse(message: str, location: Location | None, help: str | None = None, doc: RuleDoc = REFUSED) -> None:
    """Raise the only finding of a job that its own framework would refuse."""
    raise PlanFileError(Finding(doc.code, Severity.ERROR, message, location, help))
