"""Importer of Megatron-LM arguments."""

from __future__ import annotations

import re
from math import gcd, lcm
from typing import Final

from pipeproof.diagnostics.source import PlanFileError
from pipeproof.interop.importers.import_codes import REFUSED, UNDECIDED
from pipeproof.interop.importers.imported import Flags, Imported
from pipeproof.interop.importers.megatron.flag_checks import (
    check_choices,
    check_contradictions,
    check_counts,
    note_others,
    refuse_misspelt,
    refuse_other_programs,
    undecided_names,
)
from pipeproof.interop.importers.megatron.flag_values import Arguments, FlagReader, Setting
from pipeproof.interop.importers.megatron.memory_flags import (
    MODULES,
    import_precision,
    import_recomputation,
    recomputed_modules,
)
from pipeproof.interop.importers.megatron.model_flags import UnknownDepthError, dispatcher_of, import_model
from pipeproof.interop.importers.megatron.stage_flags import CHUNKS, import_stages
from pipeproof.interop.importers.plan_builder import PlanBuilder
from pipeproof.interop.importers.tools.tool import MEGATRON_LM, Tool

_TP, _PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
_CP, _EP, _ETP = "--context-parallel-size", "--expert-model-parallel-size", "--expert-tensor-parallel-size"
_SP, _OVERLAP = "--sequence-parallel", "--overlap-moe-expert-parallel-comm"
_DELAYED = "--delay-wgrad-compute"
_OPEN: Final = "if it changes neither order, cut nor blocks, `--ignore PP177` gives the verdict without it"


def import_arguments(arguments: Arguments, flags: Flags, tool: Tool = MEGATRON_LM) -> Imported:
    """Import the arguments of a training that a tool starts.

    Raises:
        PlanFileError: PP170 if a value cannot be read, PP171 if Megatron-LM refuses the settings, PP177 instead if not
            all of them are understood.
    """
    refuse_other_programs(arguments)
    reader = FlagReader(arguments, PlanBuilder("megatron", flags))
    if not arguments.has_all:
        refuse_misspelt(reader, tool)
    undecided = {setting.name: setting for setting in undecided_names(reader, tool)}
    try:
        _import(reader, tool)
    except PlanFileError as error:
        is_open = isinstance(error, UnknownDepthError) or error.findings[0].code == REFUSED.code
        if not undecided or not is_open:
            raise
        first, *others = undecided.values()
        more = f" (and {', '.join(setting.name for setting in others)})" if others else ""
        message = f"`{first.name}`{more}: {first.why}. Without it: {error.findings[0].message}"
        raise PlanFileError(UNDECIDED.finding(message, first.location), source=error.source) from error
    variant = "--experimental-attention-variant"
    if ("model", "compressed_attention") in reader.plan and reader.text(variant) == "dsv4_hybrid":
        undecided.pop(variant, None)
    note_others(reader, tool, frozenset(undecided))
    for setting in undecided.values():
        reader.plan.find(UNDECIDED.finding(f"`{setting.name}`: {setting.why}", setting.location, _OPEN))
    return reader.plan.imported(arguments.file, arguments.lines)


def _import(reader: FlagReader, tool: Tool) -> None:
    arguments, plan = reader.arguments, reader.plan
    if not arguments.has_all:
        check_counts(reader)
    check_choices(reader)
    tp, pp = reader.degree(_TP), reader.degree(_PP)
    _import_topology(reader, tp)
    check_contradictions(reader)
    import_model(reader, tp=tp, pp=pp)
    num_mtp = _mtp_modules(reader, tool)
    num_layers = plan.number("model", "num_layers")
    num_chunks = import_stages(reader, num_layers=num_layers, num_mtp=num_mtp, pp=pp)
    _import_schedule(reader, pp, num_chunks)
    _check_expert_overlap(reader, pp, num_chunks, num_mtp)
    import_batches(reader, _data_parallel(reader, arguments, tp, pp), num_chunks)
    _import_expert_overlap(reader)
    _import_gathers(reader)
    _import_rest(reader)


def _import_topology(reader: FlagReader, tp: int) -> None:
    reader.degree(_CP)
    if reader.has(_SP) and tp == 1:
        reader.plan.ignore(_SP, "Megatron-LM turns it off without tensor parallelism", reader.location(_SP))
    elif reader.has(_SP):
        reader.take(_SP, ("topology", "sequence_parallel"), value=True)
    if reader.has("--use-tp-pp-dp-mapping"):
        reader.take("--use-tp-pp-dp-mapping", ("topology", "order"), ["tp", "cp", "pp", "ep", "dp"])


def _mtp_modules(reader: FlagReader, tool: Tool) -> int:
    flag = "--mtp-num-layers"
    number = reader.number(flag, at_least=0)
    if number:
        reader.put(flag, number)
        weight = reader.real("--mtp-loss-scaling-factor")
        if weight == 0:
            reader.ignore("--mtp-loss-scaling-factor", "a loss without weight has one here")
        reader.put("--mtp-loss-scaling-factor", weight or 0.1)
        reader.take(flag, ("model", "mtp", "magic_send"), value=True)
    number = reader.plan.number("model", "mtp", "num_modules", default=0)
    reads = ("model", "mtp", "reads")
    if number and tool.unnormed_modules is None:
        reader.plan.set(reads, "after_norm", "a training of Megatron-LM", reader.location(flag))
    elif number:
        reader.plan.assume(reads, "before_norm", str(tool.unnormed_modules), reader.location(flag))
    return number


def _import_schedule(reader: FlagReader, pp: int, num_chunks: int) -> None:
    plan = reader.plan
    if num_chunks > 1:
        overlaps = not reader.has("--no-overlap-p2p-communication")
        if pp < (2 if overlaps else 3):
            least = "2" if overlaps else "3, or overlapped P2P,"
            reader.megatron_refuses(f"{num_chunks} chunks on {pp} pipeline ranks, where it needs {least}", _PP)
        plan.set(("schedule", "kind"), "interleaved", f"{num_chunks} stages on each pipeline rank")
        plan.set(("schedule", "variant"), "megatron", "a training of Megatron-LM")
        plan.set(("schedule", "num_chunks"), num_chunks, "the cut", reader.location(_PP))
        flag = "--microbatch-group-size-per-virtual-pipeline-stage"
        group = reader.number(flag)
        if group is not None:
            reader.put(flag, group)
    else:
        plan.set(("schedule", "kind"), "1f1b", "one stage on each pipeline rank", reader.location(_PP))


def _check_expert_overlap(reader: FlagReader, pp: int, num_chunks: int, num_mtp: int) -> None:
    """Refuse overlapped all-to-alls where transformer_config.py does."""
    if reader.has(_DELAYED) and not reader.has(_OVERLAP):
        reader.megatron_refuses(f"{_DELAYED} is given without {_OVERLAP}", _DELAYED)
    if not reader.has(_OVERLAP):
        return
    granularity, recomputed = reader.text("--recompute-granularity"), "--recompute-granularity full"
    conditions = (
        (pp > 1 and num_chunks == 1, f"there is one stage on each of {pp} pipeline ranks", f"give {CHUNKS} 2"),
        ((reader.given_degree(_EP) or 1) == 1, f"{_EP} is 1", None),
        (granularity == "full", f"{recomputed} is given", None),
        (granularity == "selective" and "moe" in recomputed_modules(reader), f"{MODULES} has moe", "remove it"),
        (num_mtp > 1, f"there are {num_mtp} modules of multi-token prediction, and at most one is supported", None),
        (not (reader.has("--bf16") or reader.has("--fp16")), "neither --bf16 nor --fp16 is given", None),
        (reader.has("--moe-shared-expert-overlap"), "--moe-shared-expert-overlap is given", None),
        (dispatcher_of(reader) == "allgather", "tokens are gathered", "give --moe-token-dispatcher-type alltoall"),
    )
    for is_refused, why, fix in conditions:
        if is_refused:
            reader.megatron_refuses(f"with {_OVERLAP}, {why}", _OVERLAP, fix)


def _import_expert_overlap(reader: FlagReader) -> None:
    """Set the overlap of pairs, where the plan has all-to-alls of experts."""
    if not reader.has(_OVERLAP):
        return
    if reader.plan.number("topology", "ep") == 1:
        reader.plan.ignore(_OVERLAP, "the plan has no expert-parallel ranks", reader.location(_OVERLAP))
        return
    reader.take(_OVERLAP, ("schedule", "overlap"), "pairs")
    if not reader.has(_DELAYED):
        why = f"weight gradients of a pair have segments of their own, as with {_DELAYED}"
        reader.plan.ignore(f"no {_DELAYED}", why, reader.location(_OVERLAP))


def _import_gathers(reader: FlagReader) -> None:
    """Set the input that a sharded product keeps for the gradient of its weight: Megatron-LM gathers it again."""
    if not (reader.has(_SP) and reader.plan.get("topology", "sequence_parallel")):
        return
    if reader.plan.get("schedule", "overlap") is not None:
        why = "pairs keep gathered inputs of products here, where Megatron-LM gathers them again"
        reader.plan.ignore(f"{_SP} with {_OVERLAP}", why, reader.location(_SP))
        return
    reader.take(_SP, ("memory", "sequence_parallel_activations"), "regather")


def _data_parallel(reader: FlagReader, arguments: Arguments, tp: int, pp: int) -> int:
    """Return the number of ranks with their own micro-batches (dp and ep here), from the processes; or assumed."""
    plan = reader.plan
    ep, cp = reader.given_degree(_EP) or 1, plan.number("topology", "cp")
    expert_tp = reader.number(_ETP) or tp
    if ("topology", "dp") in plan:
        return plan.number("topology", "dp") * _expert_parallel(reader, ep, expert_tp, ep, tp)
    is_set = ("topology", "ep") in plan
    fewest = lcm(tp * pp * cp * (ep if is_set else 1), expert_tp * ep * pp)
    num_processes = plan.flags.world_size or arguments.world_size or _launched(arguments, fewest)
    world = num_processes or fewest
    products = (tp * pp * cp, "tp x pp x cp", _PP), (expert_tp * ep * pp, "expert tp x ep x pp", _EP)
    for ranks, names, flag in products:
        if world % ranks:
            message = f"{world} processes do not divide by {names} = {ranks}"
            reader.megatron_refuses(message, flag, "give `--world-size N`")
    data_parallel = world // (tp * pp * cp)
    plan_ep = ep if is_set else gcd(ep, data_parallel)
    if data_parallel % plan_ep:
        message = f"topology.ep {plan_ep} does not divide the {data_parallel} data-parallel ranks of {world} processes"
        reader.refuse(message, reader.location(_EP) or reader.place(_PP), _FIX)
    if num_processes is None:
        why = f"the number of processes is unknown, and {world} are the fewest for these degrees: `--world-size N`"
        plan.assume(("topology", "dp"), data_parallel // plan_ep, why)
    plan.set(("topology", "dp"), data_parallel // plan_ep, f"{world} processes")
    _expert_parallel(reader, ep, expert_tp, plan_ep, tp)
    return data_parallel


def _expert_parallel(reader: FlagReader, ep: int, expert_tp: int, plan_ep: int, tp: int) -> int:
    """Set the plan's expert-parallel ranks, and return their number.

    Differences of the plan are listed: experts over ranks of one replica, or over fewer tensor-parallel ranks.
    """
    if reader.has(_EP):
        reader.put(_EP, plan_ep)
    if plan_ep != ep:
        why = f"experts are over {ep} ranks, and {plan_ep} have their own micro-batches; here they are over those "
        reader.ignore(_EP, f"{why}{plan_ep}, and sharded over the {tp} tp ranks")
    elif expert_tp != tp and reader.has("--num-experts"):
        reader.ignore(_ETP, f"experts are sharded over all {tp} tp ranks here")
    return plan_ep


def _launched(arguments: Arguments, fewest: int) -> int | None:
    """Return the number of processes from the flags of torchrun; None if a script's default does not suffice."""
    number, has_default = 1, False
    for name in ("--nproc-per-node", "--nnodes"):
        setting = arguments.launcher.get(name)
        value = None if setting is None else setting.value
        if setting is None or value is None or not value.isdecimal() or not int(value):
            return None
        number, has_default = number * int(value), has_default or bool(setting.why)
    return None if has_default and number % fewest else number


def _import_rest(reader: FlagReader) -> None:
    plan = reader.plan
    plan.set(("run", "backend"), "torch", "a training of Megatron-LM")
    plan.set(("run", "device"), "gpu", "a training of Megatron-LM")
    dtype = next((flag for flag in ("--bf16", "--fp16") if reader.has(flag)), None)
    if dtype is not None:
        reader.take(dtype, ("run", "dtype"), {"--bf16": "bfloat16", "--fp16": "float16"}[dtype])
        reader.take(dtype, ("run", "main_grad_dtype"), "float32")
    norm = reader.real("--clip-grad")
    if norm is None or norm > 0:
        reader.put("--clip-grad", 1.0 if norm is None else norm)
    per_token = reader.has("--calculate-per-token-loss")
    loss = "global_tokens" if per_token else "mean_of_micro_batches"
    reader.take("--calculate-per-token-loss", ("loss", "normalization"), loss)
    if reader.has("--use-distributed-optimizer"):
        reader.take("--use-distributed-optimizer", ("memory", "shard_optimizer"), "dp")
        reader.take("--use-distributed-optimizer", ("memory", "optimizer_ranks"), "replicas")
    _import_buckets(reader)
    import_recomputation(reader)
    _import_buffers(reader)
    import_precision(reader)
    _import_transport(reader)


def _import_buckets(reader: FlagReader) -> None:
    """Set the buckets of gradients: without an overlap with the backward, Megatron-LM has one for each stage."""
    size, number = "--ddp-bucket-size", "--ddp-num-buckets"
    if not reader.has("--overlap-grad-reduce"):
        reader.plan.set(("cost", "bucket_size"), "stage", "no --overlap-grad-reduce")
        return
    reader.take("--overlap-grad-reduce", ("schedule", "reduce_gradients"), "when_ready")
    elements = reader.number(size)
    if elements is not None:
        reader.take(size, ("cost", "bucket_size"), elements)
    else:
        reader.plan.set(("cost", "bucket_size"), "megatron", f"no {size}")
    if reader.has(number):
        reader.plan.ignore(number, "buckets have a number of elements here", reader.location(number))
    if reader.has("--overlap-param-gather") and reader.has("--use-distributed-optimizer"):
        reader.take("--overlap-param-gather", ("cost", "gather_weights"), "first_forward")


def _import_buffers(reader: FlagReader) -> None:
    """Set the activations that attention keeps and the buffers of the loss.

    Without a chosen backend, Transformer Engine has a flash or a fused attention, which keep no probabilities;
    the implementation `local` keeps them.
    """
    backend = reader.text("--attention-backend")
    if backend in ("unfused", "local"):
        reader.take("--attention-backend", ("memory", "attention"), "unfused")
    elif reader.text("--transformer-impl") == "local" and not reader.has("--use-flash-attn"):
        reader.take("--transformer-impl", ("memory", "attention"), "unfused")
    fusion, implementation = "--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl"
    if not reader.has(fusion):
        reader.plan.set(("memory", "cross_entropy"), "in_place", f"no {fusion}")
    elif reader.text(implementation) == "te":
        reader.take(implementation, ("memory", "cross_entropy"), "fused")
    else:
        reader.take(fusion, ("memory", "cross_entropy"), "compiled")


def _import_transport(reader: FlagReader) -> None:
    """Set ``transport``: older versions split messages over tp, unless sequence parallelism already has.

    NCCL opens a connection at its first message, and Megatron-LM sends none before the first step. With variable
    lengths it sends the shape of each tensor ahead of it.
    """
    directions = ("transport", "forward"), ("transport", "backward")
    flag, off = "--scatter-gather-tensors-in-pipeline", "--no-scatter-gather-tensors-in-pipeline"
    if reader.has(off):
        for key in directions:
            reader.take(off, key, "full")
    elif reader.has(flag) and reader.plan.get("topology", "sequence_parallel"):
        reader.plan.ignore(flag, "Megatron-LM sends whole tensors with sequence parallelism", reader.location(flag))
    elif reader.has(flag):
        for key in directions:
            reader.take(flag, key, "partial")
    pp, batched = reader.plan.number("topology", "pp"), "--no-overlap-p2p-communication"
    if pp > 1:
        is_unbatched = pp > 2 and reader.plan.number("schedule", "num_chunks") > 1 and not reader.has(batched)
        connections = "per_pair" if is_unbatched else "lazy"
        reader.plan.set(("transport", "connections"), connections, f"{'no ' * is_unbatched}{batched}")
        if reader.has("--variable-seq-lengths"):
            reader.take("--variable-seq-lengths", ("transport", "shape_exchange"), "per_message")


# --- Keys of ``schedule`` for batches, from the flags of Megatron-LM ---


_SIZE, _TOTAL = "--micro-batch-size", "--global-batch-size"
_STEPS, _RAMP = "--step-batch-size-schedule", "--rampup-batch-size"
_LOWER = "--decrease-batch-size-if-needed"
_ENTRY: Final = re.compile(r"([0-9]+(?:\.[0-9]*)?)([KMBT]?):([0-9]+(?:\.[0-9]*)?)([KMBT]?)", re.ASCII | re.IGNORECASE)
_UNITS: Final = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_FIX = "give the processes of the whole training with `--world-size N`"


def import_batches(reader: FlagReader, data_parallel: int, num_chunks: int) -> None:
    """Set ``schedule.micro_batch_size`` and ``schedule.num_micro_batches``, of the last steps if batches grow.

    Raises:
        PlanFileError: PP170, a value cannot be read; PP171, Megatron-LM refuses the batches.
    """
    plan = reader.plan
    size = reader.number(_SIZE)
    if size is None:
        why = f"{'only a run determines' if reader.has(_SIZE) else 'there is no'} {_SIZE}"
        plan.assume(("schedule", "micro_batch_size"), 1, why)
    else:
        reader.put(_SIZE, size)
    sequences = plan.number("schedule", "micro_batch_size") * data_parallel
    key = ("schedule", "num_micro_batches")
    batches = _scheduled(reader)
    flag = _STEPS if batches else _TOTAL
    total = batches[-1] if batches else reader.number(_TOTAL)
    if total is None:
        setting = reader.setting(_TOTAL)
        if setting is None:
            plan.set(key, 1, f"no {_TOTAL}: one micro-batch for each data-parallel rank")
        else:
            why = f"the value of {_TOTAL} is {setting.why}"
            plan.assume(key, 2 * plan.number("topology", "pp"), why, setting.location)
        return
    if reader.has(_LOWER) and total >= sequences:
        total -= total % sequences
    if total % sequences:
        message = f"{flag} {total} does not divide by {sequences // data_parallel} sequences x {data_parallel} "
        reader.megatron_refuses(message + "data-parallel ranks", flag, _FIX)
    reader.take(flag, key, total // sequences)
    _note_other_steps(reader, batches, sequences, num_chunks)


def _scheduled(reader: FlagReader) -> tuple[int, ...]:
    """Return the batch sizes of ``--step-batch-size-schedule`` such as "0:768 250B:1536", by their thresholds."""
    setting = reader.setting(_STEPS)
    if setting is None:
        return ()
    if reader.has(_TOTAL) and not reader.arguments.has_all:  # a block has the size that Megatron-LM sets itself
        reader.megatron_refuses(f"{_STEPS} and {_TOTAL} are given together", _TOTAL, "remove one of the two")
    if None in setting.values or not setting.values:
        reader.refuse(f"only a run determines the value of {_STEPS}", setting.location)
    entries = sorted(_entry(reader, setting, text) for text in " ".join(map(str, setting.values)).split())
    thresholds = [threshold for threshold, _ in entries]
    if thresholds[0] or len(set(thresholds)) < len(thresholds):
        reader.megatron_refuses("the first threshold is 0, and the others grow", _STEPS)
    return tuple(size for _, size in entries)


def _entry(reader: FlagReader, setting: Setting, text: str) -> tuple[int, int]:
    match = _ENTRY.fullmatch(text.strip(","))
    number, size = (0, 0) if match is None else (_number(match[1], match[2]), _number(match[3], match[4]))
    if not size:
        reader.refuse(f"{_STEPS} needs pairs such as 250B:1536, found `{text}`", setting.value_location)
    return number, size


def _number(digits: str, unit: str) -> int:
    return int(float(digits[:18]) * _UNITS[unit.upper()])


def _note_other_steps(reader: FlagReader, batches: tuple[int, ...], sequences: int, num_chunks: int) -> None:
    """List the steps with other batches, and refuse steps without an interleaved schedule."""
    plan = reader.plan
    checked = f"steps of {plan.number('schedule', 'num_micro_batches')} micro-batches are checked"
    others = [size // sequences for size in batches[:-1] if size % sequences == 0]
    pp = plan.number("topology", "pp")
    least = min(others, default=pp)
    if num_chunks > 1 and least < pp:
        message = f"{least} micro-batches in the first steps, where interleaved stages need {pp}, the pipeline ranks"
        reader.megatron_refuses(message, _STEPS)
    if others:
        reader.ignore(
            _STEPS, f"{checked}; give `--set schedule.num_micro_batches={others[0]}` to check the first steps"
        )
    if reader.has(_RAMP):
        why = f"{checked}, those with the whole {_TOTAL}; current versions ignore the flag"
        plan.ignore(_RAMP, why, reader.location(_RAMP))
