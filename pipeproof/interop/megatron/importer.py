"""A plan from the arguments of Megatron-LM."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeproof.interop.counts import count
from pipeproof.interop.draft import Draft
from pipeproof.interop.imported import Flags, Imported
from pipeproof.interop.megatron.arguments import Arguments, read_arguments
from pipeproof.interop.megatron.cut import import_cut
from pipeproof.interop.megatron.flags import FLAGS, NOT_SHOWN, WITHOUT_BEARING, concerns_parallelism
from pipeproof.interop.megatron.given import Given
from pipeproof.interop.megatron.model import import_model
from pipeproof.specs.finding import Finding, Severity
from pipeproof.specs.load import PlanFileError

_TP, _PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
_CP, _EP, _ETP = "--context-parallel-size", "--expert-model-parallel-size", "--expert-tensor-parallel-size"
_SP = "--sequence-parallel"


def import_megatron(files: Sequence[Path], flags: Flags) -> Imported:
    """Import one shell script that starts Megatron-LM, or one file with its arguments.

    Raises:
        PlanFileError: PP100 or PP170 where the file cannot be read, PP171 for what Megatron-LM itself refuses.
    """
    if len(files) != 1:
        message = f"a training of Megatron-LM is one file, found {len(files)}"
        raise PlanFileError(Finding("PP170", Severity.ERROR, message, help="give the script that starts it"))
    arguments = read_arguments(files[0])
    draft = Draft("megatron", flags)
    given = Given(arguments, draft)
    tp, pp = given.degree(_TP, ("topology", "tp")), given.degree(_PP, ("topology", "pp"))
    _import_topology(given, tp)
    import_model(given, tp=tp, pp=pp)
    num_mtp = _modules(given)
    num_layers = count(draft, "model", "num_layers")
    num_chunks = import_cut(given, num_layers=num_layers, num_mtp=num_mtp, pp=pp)
    _import_schedule(given, pp, num_chunks)
    _import_batches(given, _data_parallel(given, arguments, tp, pp))
    _import_rest(given)
    _note_others(given)
    return draft.imported(arguments.file, arguments.lines)


def _import_topology(given: Given, tp: int) -> None:
    given.degree(_CP, ("topology", "cp"))
    given.degree(_EP, ("topology", "ep"))
    if given.has(_SP) and tp == 1:
        given.draft.ignore(_SP, "Megatron-LM turns it off without tensor parallelism", given.place(_SP))
    elif given.has(_SP):
        given.take(_SP, ("topology", "sequence_parallel"), value=True)
    if given.has("--use-tp-pp-dp-mapping"):
        given.take("--use-tp-pp-dp-mapping", ("topology", "order"), ["tp", "cp", "pp", "ep", "dp"])
    experts_over = given.number(_ETP)
    if experts_over is not None and experts_over != tp:
        given.draft.ignore(given.shown(_ETP), f"experts are cut over all {tp} tp ranks here", given.place(_ETP))


def _modules(given: Given) -> int:
    flag = "--mtp-num-layers"
    number = given.number(flag, at_least=0)
    if number:
        given.take(flag, ("model", "mtp", "num_modules"), number)
        weight = given.real("--mtp-loss-scaling-factor")
        given.take("--mtp-loss-scaling-factor", ("model", "mtp", "loss_weight"), 0.1 if weight is None else weight)
        given.take(flag, ("model", "mtp", "magic_send"), value=True)
    return number or 0


def _import_schedule(given: Given, pp: int, num_chunks: int) -> None:
    draft = given.draft
    if num_chunks > 1:
        overlaps = not given.has("--no-overlap-p2p-communication")
        if pp < (2 if overlaps else 3):
            least = "2" if overlaps else "3, or overlapped P2P,"
            given.megatron_refuses(f"{num_chunks} chunks on {pp} pipeline ranks, where it needs {least}", _PP)
        draft.set(("schedule", "kind"), "interleaved", f"{num_chunks} stages on each pipeline rank")
        draft.set(("schedule", "variant"), "megatron", "a training of Megatron-LM")
        draft.set(("schedule", "num_chunks"), num_chunks, "the cut", given.place(_PP))
        group = given.number("--microbatch-group-size-per-virtual-pipeline-stage")
        if group is not None:
            given.take(
                "--microbatch-group-size-per-virtual-pipeline-stage", ("schedule", "micro_batch_group_size"), group
            )
    else:
        draft.set(("schedule", "kind"), "1f1b", "one stage on each pipeline rank", given.place(_PP))


def _data_parallel(given: Given, arguments: Arguments, tp: int, pp: int) -> int:
    """Ranks that have micro-batches of their own (dp and ep here), from the number of processes; or assumed."""
    draft = given.draft
    ep, cp = count(draft, "topology", "ep"), count(draft, "topology", "cp")
    if ("topology", "dp") in draft:
        return count(draft, "topology", "dp") * ep
    world = draft.flags.world_size or _launched(arguments)
    if world is None:
        why = "the number of processes is not given: say it with `--world-size N`"
        draft.assume(("topology", "dp"), 1, why)
        return ep
    ranks = tp * pp * cp
    if world % ranks:
        given.megatron_refuses(
            f"{world} processes do not divide by tp x pp x cp = {ranks}", _PP, "say `--world-size N`"
        )
    data_parallel = world // ranks
    if data_parallel % ep:
        given.refuse(
            f"expert parallelism over {ep} of {data_parallel} data-parallel ranks cannot be described: experts lie on "
            "ranks of one tensor-parallel group here",
            given.place(_EP) or given.arguments.flags[_PP].location,
            "say the processes of the whole training with `--world-size N`",
        )
    draft.set(("topology", "dp"), data_parallel // ep, f"{world} processes")
    return data_parallel


def _launched(arguments: Arguments) -> int | None:
    """Processes by the flags of torchrun."""
    numbers = []
    for names in (("--nproc-per-node",), ("--nnodes",)):
        settings = [arguments.launcher[name] for name in names if name in arguments.launcher]
        value = settings[0].value if settings else None
        if value is None or not value.isdecimal() or not int(value):
            return None
        numbers.append(int(value))
    return numbers[0] * numbers[1]


def _import_batches(given: Given, data_parallel: int) -> None:
    draft = given.draft
    size = given.number("--micro-batch-size")
    if size is None:
        draft.assume(("schedule", "micro_batch_size"), 1, "only a run can tell --micro-batch-size")
    else:
        given.take("--micro-batch-size", ("schedule", "micro_batch_size"), size)
    size = count(draft, "schedule", "micro_batch_size")
    flag = "--global-batch-size"
    total = given.number(flag)
    key = ("schedule", "num_micro_batches")
    if total is None:
        setting = given.setting(flag)
        if setting is None:
            draft.set(key, 1, f"no {flag}: one micro-batch for each data-parallel rank")
        else:
            draft.assume(
                key,
                2 * count(draft, "topology", "pp"),
                f"the value of {flag} is {setting.why}",
                setting.location,
            )
    elif total % (size * data_parallel):
        given.megatron_refuses(
            f"{flag} {total} does not divide by {size} sequences x {data_parallel} data-parallel ranks", flag,
            "say the processes of the whole training with `--world-size N`",
        )  # fmt: skip
    else:
        given.take(flag, key, total // (size * data_parallel))
    for ramp in ("--rampup-batch-size", "--step-batch-size-schedule"):
        if given.has(ramp):
            draft.ignore(ramp, f"the steps with the whole {flag} are judged", given.place(ramp))


def _import_rest(given: Given) -> None:
    draft = given.draft
    draft.set(("run", "backend"), "torch", "a training of Megatron-LM")
    draft.set(("run", "device"), "gpu", "a training of Megatron-LM")
    dtype = next((flag for flag in ("--bf16", "--fp16") if given.has(flag)), None)
    if dtype is not None:
        given.take(dtype, ("run", "dtype"), {"--bf16": "bfloat16", "--fp16": "float16"}[dtype])
        given.take(dtype, ("run", "main_grad_dtype"), "float32")
    norm = given.real("--clip-grad")
    if norm is None or norm > 0:
        given.take("--clip-grad", ("run", "clip_norm"), 1.0 if norm is None else norm)
    per_token = given.has("--calculate-per-token-loss")
    loss = "global_tokens" if per_token else "mean_of_micro_batches"
    given.take("--calculate-per-token-loss", ("loss", "normalization"), loss)
    if given.has("--use-distributed-optimizer"):
        given.take("--use-distributed-optimizer", ("memory", "shard_optimizer"), "dp")
    granularity = given.text("--recompute-granularity")
    if given.has("--recompute-activations"):
        given.take("--recompute-activations", ("memory", "recompute"), "selective")
    elif granularity in ("selective", "full"):
        given.take("--recompute-granularity", ("memory", "recompute"), granularity)
    _import_transport(given)


def _import_transport(given: Given) -> None:
    """Older versions cut what they send over tp, unless sequence parallelism has cut it already."""
    flag, off = "--scatter-gather-tensors-in-pipeline", "--no-scatter-gather-tensors-in-pipeline"
    if given.has(off):
        given.take(off, ("transport",), "full")
    elif given.has(flag) and given.draft.get("topology", "sequence_parallel"):
        given.draft.ignore(flag, "Megatron-LM sends whole tensors beside sequence parallelism", given.place(flag))
    elif given.has(flag):
        given.take(flag, ("transport",), "partial")


def _note_others(given: Given) -> None:
    for name, setting in given.arguments.flags.items():
        if name in NOT_SHOWN:
            given.draft.ignore(name, NOT_SHOWN[name], setting.location)
        elif name not in FLAGS and name not in WITHOUT_BEARING and concerns_parallelism(name):
            given.draft.ignore(name, "this flag is not known here", setting.location)
    for note, location in given.arguments.notes:
        given.draft.ignore("the script", note, location)
