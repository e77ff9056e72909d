"""Checks of declared boundary tensors, and of micro-batches of different sizes, against the rest of a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod

from pipeproof.diagnostics.problems import KeyPath, Problem, dotted, listed
from pipeproof.specs.exact_times import TIME_KEYS
from pipeproof.specs.plan_sections import UNIFORM, PlanSections
from pipeproof.specs.section import multiples
from pipeproof.specs.transport import SHARDED_DIM, BoundarySpec, is_float


def check_boundaries(plan: PlanSections) -> Iterator[Problem]:
    """PP106, PP108: entries of ``boundaries`` and sizes by micro-batch agree with the rest of the plan."""
    yield from _check_sizes(plan)
    yield from _check_sequence_shards(plan)
    if plan.edges:
        message = "`edges` are of custom layers; each layer of the GPT reads the output of the one before it"
        yield Problem("PP106", ("edges",), message, help="remove it, or declare the layers (kind: layers)")
    if plan.modules:
        message = "`modules` are of custom layers, and the model is a GPT"
        yield Problem("PP106", ("modules",), message, help="remove it, or declare the layers (kind: layers)")
    names: dict[tuple[int | None, str], int] = {}
    for index, entry in enumerate(plan.boundaries):
        path: KeyPath = ("boundaries", index)
        last = plan.num_stages - 2
        if entry.edge is not None and entry.edge > last:
            message = f"`edge` {entry.edge} lies between stages {entry.edge} and {entry.edge + 1}, and the plan has "
            message += f"{plan.num_stages} stage{'s' if plan.num_stages > 1 else ''}"
            fix = f"use 0 to {last}, or remove `edge` for all" if last >= 0 else "remove the entry"
            yield Problem("PP106", (*path, "edge"), message, help=fix)
        conflict = next((names[key] for key in ((entry.edge, entry.name), (None, entry.name)) if key in names), None)
        if conflict is None and entry.edge is None:
            conflict = next((i for (_, name), i in names.items() if name == entry.name), None)
        if conflict is not None:
            message = f"`{entry.name}` crosses the same edge as entry {conflict} of the same name"
            yield Problem("PP106", (*path, "name"), message, help="give each tensor of an edge its own name")
        names.setdefault((entry.edge, entry.name), index)
        if plan.transport.messages == "packed" and entry.receiver_tp not in (None, entry.tp):
            message = f"`{entry.name}` changes its layout from {entry.tp} to {entry.receiver_tp}, and a packed message "
            fix = "give both sides one layout, or use `transport: {messages: per_tensor}`"
            yield Problem("PP106", (*path, "receiver_tp"), message + "has one layout", help=fix)
        yield from _check_shards(plan, entry, path)
        yield from _check_gradient(plan, entry, path)


def _check_sizes(plan: PlanSections) -> Iterator[Problem]:
    schedule = plan.schedule
    for index, length in enumerate(schedule.seq_lengths or ()):
        if length > plan.gpt.seq_length:
            yield Problem(
                "PP106",
                ("schedule", "seq_lengths", index),
                f"micro-batch {index} has {length} tokens in a sequence, more than model.seq_length "
                f"{plan.gpt.seq_length}",
                help=f"use at most {plan.gpt.seq_length}, or raise model.seq_length",
            )
    last = schedule.last_micro_batch_size
    if last is not None and last > schedule.micro_batch_size:
        yield Problem(
            "PP106",
            ("schedule", "last_micro_batch_size"),
            f"the last micro-batch has {last} sequences, more than schedule.micro_batch_size "
            f"{schedule.micro_batch_size}",
            help=f"use at most {schedule.micro_batch_size}",
        )


def _check_sequence_shards(plan: PlanSections) -> Iterator[Problem]:
    """Sequences of every micro-batch divide over the ranks that share them."""
    topology = plan.topology
    splits = {"cp": topology.cp, "tp": topology.tp if topology.sequence_parallel else 1}
    num_parts = prod(splits.values())
    factors = " x ".join(f"topology.{axis} {size}" for axis, size in splits.items() if size > 1)
    lengths: Sequence[tuple[KeyPath, str, int]] = [
        (("schedule", "seq_lengths", i), f"schedule.seq_lengths[{i}]", n)
        for i, n in enumerate(plan.schedule.seq_lengths or ())
    ]
    if topology.cp > 1:
        lengths = [(("model", "seq_length"), "model.seq_length", plan.gpt.seq_length), *lengths]
    for path, name, length in lengths:
        if length % num_parts:
            yield Problem(
                "PP108",
                path,
                f"{name} {length} does not divide by {factors}: these ranks share each sequence",
                help=f"use a multiple of {num_parts}",
            )


def _check_shards(plan: PlanSections, entry: BoundarySpec, path: KeyPath) -> Iterator[Problem]:
    """PP108: sharded dims divide in every micro-batch."""
    num_tp = plan.topology.tp
    for key in ("tp", "receiver_tp"):
        match = SHARDED_DIM.fullmatch(getattr(entry, key) or "")
        if match is None or num_tp == 1 or match[1] not in entry.dims:
            continue
        for size in _sizes_of(plan, entry, match[1]):
            if size % num_tp:
                yield Problem(
                    "PP108",
                    (*path, key),
                    f"dim {match[1]} of `{entry.name}` has {size} elements, which do not divide by "
                    f"topology.tp {num_tp}",
                    help="shard another dim, or write invariant or replicated",
                )
                break


def _sizes_of(plan: PlanSections, entry: BoundarySpec, dim: str) -> list[int]:
    """The sizes of a dim over the micro-batches, on one context-parallel rank."""
    if entry.shape is not None:
        position = entry.dims.index(dim)
        return [entry.shape[position]] if position < len(entry.shape) else []
    schedule = plan.schedule
    if dim == "s":
        lengths = schedule.seq_lengths or (plan.gpt.seq_length,)
        return [length // plan.topology.cp for length in lengths]
    if dim == "b":
        return [schedule.micro_batch_size, schedule.last_micro_batch_size or schedule.micro_batch_size]
    return [plan.gpt.hidden_size] if dim == "h" else []


def _check_gradient(plan: PlanSections, entry: BoundarySpec, path: KeyPath) -> Iterator[Problem]:
    """The gradient of a replicated value is one addend per rank; no message converts between addends and sums."""
    sender, receiver = entry.tp, entry.receiver_tp
    has_gradient = is_float(entry.dtype or plan.run.dtype) if entry.gradient is None else entry.gradient
    if not has_gradient or receiver is None or plan.topology.tp == 1:
        return
    if (sender == "replicated") != (receiver == "replicated"):
        replicated, complete = ("sender", "receiver") if sender == "replicated" else ("receiver", "sender")
        yield Problem(
            "PP106",
            (*path, "receiver_tp"),
            f"`{entry.name}` is replicated at its {replicated} and not at its {complete}: its gradient is an addend on "
            f"each rank of the {replicated} and a sum on the {complete}, and messages do not add",
            help="write invariant on both sides, or gradient: false if there is none",
        )


TWO_CHUNKS = ("zb_v", "v_half", "v_min", "dualpipe_v")
"""Kinds of schedules with two stages on each rank: ``num_chunks`` may be left out."""


def with_chunks(data: object) -> object:
    """Return the keys of a plan with ``schedule.num_chunks`` where the kind of schedule has one value other than 1."""
    schedule = data.get("schedule") if isinstance(data, Mapping) else None
    if not isinstance(schedule, Mapping) or not isinstance(data, Mapping) or "num_chunks" in schedule:
        return data
    if data.get("modules"):  # each has its own number
        return data
    if schedule.get("kind") not in TWO_CHUNKS or isinstance(schedule.get("placement"), list | tuple):
        return data
    return {**data, "schedule": {**schedule, "num_chunks": 2}}


def with_micro_batches(data: object) -> object:
    """Return the keys of a plan with ``schedule.num_micro_batches`` where only ``global_batch_size`` is given.

    Values of wrong types are left to their own checks; a batch that does not divide is rounded, and refused by
    ``check_global_batch``.
    """
    if not isinstance(data, Mapping) or not isinstance(data.get("schedule"), Mapping):
        return data
    schedule, topology = data["schedule"], data.get("topology", {})
    size, last = schedule.get("micro_batch_size"), schedule.get("last_micro_batch_size")
    if "num_micro_batches" in schedule or schedule.get("global_batch_size") is None:
        return data
    ranks = [topology.get(axis, 1) if isinstance(topology, Mapping) else 1 for axis in ("dp", "ep")]
    sizes = [schedule["global_batch_size"], size, *ranks, 1 if last is None else last]
    if not all(type(number) is int and number > 0 for number in sizes):
        return {**data, "schedule": {**schedule, "num_micro_batches": 1}}
    sequences = schedule["global_batch_size"] // (ranks[0] * ranks[1])
    number = sequences // size if last is None else (sequences - last) // size + 1
    return {**data, "schedule": {**schedule, "num_micro_batches": max(1, number)}}


def check_global_batch(plan: PlanSections) -> Iterator[Problem]:
    """PP108: the global batch divides over replicas and micro-batches; PP106: it matches the micro-batches."""
    schedule, topology = plan.schedule, plan.topology
    batch, size, last = schedule.global_batch_size, schedule.micro_batch_size, schedule.last_micro_batch_size
    if batch is None:
        return
    replicas = topology.dp * topology.ep
    made = replicas * (schedule.num_micro_batches * size if last is None else
                       (schedule.num_micro_batches - 1) * size + last)  # fmt: skip
    if made == batch:
        return
    path = "schedule", "global_batch_size"
    unit = replicas * size
    if last is None and batch % unit:
        message = (
            f"schedule.global_batch_size {batch} does not divide by {unit}: topology.dp {topology.dp} x topology.ep "
            f"{topology.ep} ranks have their own micro-batches of schedule.micro_batch_size {size}"
        )
        yield Problem("PP108", path, message, help=f"set it to {multiples(batch, unit)}")
    else:
        rest = "" if last is None else f" (the last has {last})"
        message = (
            f"schedule.global_batch_size is {batch}, and {schedule.num_micro_batches} micro-batches of {size}{rest} on "
            f"{replicas} dp and ep ranks have {made} sequences"
        )
        yield Problem("PP106", path, message, help=f"remove num_micro_batches, or set global_batch_size to {made}")


def check_placed_ranks(plan: PlanSections) -> Iterator[Problem]:
    """PP109: a placement lists the stages of every pipeline rank; PP106: it lists a stage once for each replica."""
    placement, pp = plan.schedule.placement, plan.topology.pp
    if not isinstance(placement, tuple):
        return
    copies = Counter(stage for stages in placement for stage in stages)
    wanted = dict(enumerate(plan.num_replicas))
    if wanted and copies != wanted:
        stage = min(stage for stage in {*copies, *wanted} if copies[stage] != wanted.get(stage, 0))
        message = f"`schedule.placement` has stage {stage} on {copies[stage]} ranks, and its module's dp is "
        fix = "list each stage on as many ranks as its module has replicas, or remove placement"
        yield Problem("PP106", ("schedule", "placement"), f"{message}{wanted.get(stage, 0)}", help=fix)
    elif not wanted and len(set(copies.values())) > 1:
        few, many = (pick(copies, key=lambda stage: copies[stage]) for pick in (min, max))
        message = f"`schedule.placement` has stage {few} on {copies[few]} and stage {many} on {copies[many]} ranks"
        yield Problem("PP106", ("schedule", "placement"), message, help="list each stage once, or all equally often")
    if len(placement) == pp:
        return
    ranks = f"{len(placement)} rank{'s' if len(placement) > 1 else ''}"
    message = f"`schedule.placement` has the stages of {ranks}, and topology.pp is {pp}"
    yield Problem("PP109", ("schedule", "placement"), message, help=f"give {pp} lists")


def check_lengths(plan: PlanSections) -> Iterator[Problem]:
    """PP109: lists have one entry per global stage or per micro-batch."""
    num, num_stages = plan.schedule.num_micro_batches, plan.num_stages
    by_stage, one_time = (num_stages, _stage_count(plan)), "one time for all stages"
    lists: dict[KeyPath, tuple[object, tuple[int, str], str]] = {
        ("schedule", "seq_lengths"): (
            plan.schedule.seq_lengths,
            (num, f"schedule.num_micro_batches is {num}"),
            "leave it out if all have one length",
        ),
        ("stages",): (plan.stages, by_stage, "leave it out for an even partition"),
    }
    for name in (*TIME_KEYS, "overlapped_us", "optimizer_us"):
        lists["cost", name] = (getattr(plan.cost, name), by_stage, one_time)
    for path, (values, (wanted, count), alternative) in lists.items():
        if isinstance(values, tuple) and len(values) != wanted:
            entries = "1 entry" if len(values) == 1 else f"{len(values)} entries"
            message = f"`{dotted(path)}` has {entries}, and {count}"
            yield Problem("PP109", path, message, help=f"give {wanted}, or {alternative}")


def _stage_count(plan: PlanSections) -> str:
    pp, num_chunks = plan.topology.pp, plan.schedule.num_chunks
    factors = f"topology.pp {pp}" if num_chunks == 1 else f"topology.pp {pp} x schedule.num_chunks {num_chunks}"
    if isinstance(plan.schedule.placement, tuple):
        factors = "schedule.placement"
    if plan.modules:
        factors = "modules"
    return f"{factors} makes {plan.num_stages} stage{'s' if plan.num_stages > 1 else ''}"


def check_cut(plan: PlanSections) -> Iterator[Problem]:
    """PP106: as in Fleet, ``uniform`` is for one chunk on a rank, or the two of DualPipeV."""
    if plan.stages != UNIFORM or plan.schedule.num_chunks == 1 or plan.schedule.kind == "dualpipe_v":
        return
    message = f"`stages: uniform` is given together with schedule.num_chunks {plan.schedule.num_chunks}, and Fleet "
    message += "partitions several chunks by class only"
    fix = "write `layer:TransformerLayer|EmptyLayer`, or list the layers of each stage"
    yield Problem("PP106", ("stages",), message, help=fix)


GENERATED_WITH_PAIRS = ("dualpipe", "dualpipe_v", "1f1b", "interleaved")
"""Kinds of generated schedules in which a forward and a backward may overlap."""

_KINDS_WITH_PAIRS = (*GENERATED_WITH_PAIRS, "file", "custom")


def check_overlap(plan: PlanSections) -> Iterator[Problem]:
    """PP106: an overlap needs pairs with all-to-alls to hide, known parts, and no second time of them."""
    schedule, path = plan.schedule, ("schedule", "overlap")
    if schedule.alternation is None:
        yield from _unused_slowdown(plan, "`schedule.overlap` is none")
        return
    if schedule.kind not in _KINDS_WITH_PAIRS:
        message = f"`schedule.overlap` is of pairs that overlap, and `kind: {schedule.kind}` has none"
        yield Problem("PP106", path, message, help=f"use kind {listed(_KINDS_WITH_PAIRS)}, or remove it")
    if plan.is_custom:  # computations are whole in the graph: a script's modules have the overlap points
        if schedule.overlap != "pairs":
            message = "`schedule.overlap` orders the parts of a GPT's blocks, and the model has custom layers"
            yield Problem("PP106", path, message, help="use overlap: pairs, or remove it")
        yield from _unused_slowdown(plan, "the model has custom layers")
        return
    if plan.gpt.moe is None or plan.topology.ep == 1:
        lacks = "model.moe is missing" if plan.gpt.moe is None else "topology.ep is 1"
        message = f"`schedule.overlap` hides the all-to-alls of experts, and there are none: {lacks}"
        yield Problem("PP106", path, message, help="remove overlap, or use experts with ep > 1")
    for key, value, why, fix in _conflicts(plan):
        message = f"`{dotted(key)}: {value}` does not go together with `schedule.overlap`: {why}"
        yield Problem("PP106", key, message, help=fix)


def _unused_slowdown(plan: PlanSections, why: str) -> Iterator[Problem]:
    if plan.cost.collective_slowdown is None:
        return
    message = f"`cost.collective_slowdown` is of collectives on a queue of their own, and {why}"
    fix = "remove it" if plan.is_custom else "remove it, or add schedule.overlap"
    yield Problem("PP106", ("cost", "collective_slowdown"), message, help=fix, at_key=True)


def _conflicts(plan: PlanSections) -> Iterator[tuple[KeyPath, str, str, str]]:
    """(key, value, reason, fix) of each key whose value does not go together with an overlap."""
    memory, cost = plan.memory, plan.cost
    if memory.recompute == "full":
        why = "a backward would run whole forwards, with all-to-alls of their own, in its segments"
        yield ("memory", "recompute"), "full", why, "use selective, or remove overlap"
    issuing = ("moe", "mlp", "mla_up_proj") if plan.topology.tp > 1 else ("moe",)
    again = [module for module in memory.recompute_modules if module in issuing]
    if memory.recompute == "selective" and again:
        why = "a backward would run forwards, with collectives of their own, in its segments"
        yield ("memory", "recompute_modules"), f"[{again[0]}]", why, f"remove {again[0]}, or overlap"
    if memory.sequence_parallel_activations == "regather":
        why = "weight gradients would wait for gathers in their segments"
        key = "memory", "sequence_parallel_activations"
        yield key, "regather", why, "use keep, or remove overlap"
    if memory.offload_blocks:
        why = "the copies of a backward would have to end before its first segment"
        yield ("memory", "offload_blocks"), str(memory.offload_blocks), why, "remove one of them"
    if cost.overlapped_us is not None:
        why = "the time of a pair follows from its parts"
        yield ("cost", "overlapped_us"), "..", why, "remove overlapped_us"
    if cost.analytic is not None and "ep" in cost.analytic.overlap:
        why = "all-to-alls would be hidden twice"
        yield ("cost", "analytic", "overlap"), "[ep]", why, "remove ep from it"
