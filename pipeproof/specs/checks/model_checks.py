"""Checks of the model's sizes against the ranks that shard them, and against the sequences of the schedule."""

from __future__ import annotations

from pipeproof.diagnostics.problems import KeyPath, Problem, dotted
from pipeproof.specs.model_parts import MoeSpec
from pipeproof.specs.plan_sections import PlanSections
from pipeproof.specs.section import divisors, multiples


def check_tensor_parallel(plan: PlanSections) -> list[Problem]:
    """PP108: sizes that are sharded over the TP ranks divide by their number."""
    model, topology = plan.gpt, plan.topology
    sharded: list[tuple[KeyPath, int, str]] = [
        (("num_heads",), model.num_heads, "attention heads are sharded over the TP ranks"),
    ]
    if model.num_kv_heads is not None:
        sharded.append((("num_kv_heads",), model.num_kv_heads, "key and value heads are sharded over the TP ranks"))
    if model.moe is None or model.moe.dense_layers:
        sharded.append((("ffn_size",), model.ffn_size, "the MLP is sharded over the TP ranks"))
    if model.moe is not None:
        sharded.append((("moe", "ffn_size"), model.moe.ffn_size, "every expert is sharded over the TP ranks"))
    sharded.append((("vocab_size",), model.vocab_size, "embedding and head are sharded over the TP ranks"))
    if topology.sequence_parallel:
        reason = "sequence parallelism shards the sequence over the TP ranks"
        sharded.append((("seq_length",), model.seq_length, reason))
    return [
        Problem(
            "PP108",
            ("model", *path),
            f"{dotted(('model', *path))} {size} does not divide by topology.tp {topology.tp}: {reason}",
            help=f"set {dotted(('model', *path))} to {multiples(size, topology.tp)}, "
            f"or topology.tp to {divisors(size, topology.tp)}",
        )
        for path, size, reason in sharded
        if size % topology.tp
    ]


def check_expert_parallel(plan: PlanSections) -> list[Problem]:
    """PP108: experts divide over the EP ranks, and so do the tokens sent to them if loads are equal.

    PP106: keys of an all-to-all are not given for another dispatcher.
    """
    moe, topology = plan.model.moe, plan.topology
    if moe is None:
        return []
    problems = _check_dispatcher(moe)
    if topology.ep == 1:
        return problems
    if moe.num_experts % topology.ep:
        problems.append(
            Problem(
                "PP108",
                ("model", "moe", "num_experts"),
                f"model.moe.num_experts {moe.num_experts} does not divide by topology.ep {topology.ep}: experts are "
                "distributed over the EP ranks",
                help=f"set model.moe.num_experts to {multiples(moe.num_experts, topology.ep)}, "
                f"or topology.ep to {divisors(moe.num_experts, topology.ep)}",
            )
        )
    unit = topology.ep * topology.cp
    for path, length in plan.sequence_lengths.items():
        sent = length // plan.schedule.num_sequence_splits * moe.top_k
        if sent % unit:
            problems.append(
                Problem(
                    "PP108",
                    path,
                    f"{sent} tokens go to experts ({dotted(path)} {length}, model.moe.top_k {moe.top_k}), which does "
                    f"not divide by {unit}: each of the topology.ep {topology.ep} x topology.cp {topology.cp} ranks "
                    "is assumed to get the same number",
                    help=f"set {dotted(path)} to a multiple of {unit * plan.schedule.num_sequence_splits}",
                )
            )
    return problems


def _check_dispatcher(moe: MoeSpec) -> list[Problem]:
    """An all-gather takes every token to every rank, once and as it is."""
    if moe.dispatcher == "all_to_all":
        return []
    return [
        Problem(
            "PP106",
            ("model", "moe", key),
            f"model.moe.{key} is for tokens that go to the ranks of their experts, and model.moe.dispatcher "
            f"{moe.dispatcher} takes all tokens to all ranks",
            help=f"remove {key}, or use `dispatcher: all_to_all`",
        )
        for key in ("nodes_per_token", "dispatch_dtype")
        if getattr(moe, key) is not None
    ]


def check_mtp(plan: PlanSections) -> list[Problem]:
    """PP108: every module has a token to predict in the shortest sequence; PP106: not with hyper-connections."""
    mtp = plan.gpt.mtp
    if mtp is None:
        return []
    problems = []
    if plan.gpt.hyper_connections is not None:
        message = "`model.mtp` is given together with `model.hyper_connections`, and it is not defined which residual "
        message += "stream a module reads"
        problems.append(Problem("PP106", ("model", "mtp"), message, help="remove one of the two", at_key=True))
    lengths = plan.sequence_lengths
    shortest = min(lengths, key=lengths.__getitem__)
    if lengths[shortest] <= mtp.num_modules:
        message = f"the last of model.mtp.num_modules {mtp.num_modules} predicts a token {mtp.num_modules + 1} ahead, "
        message += f"and {dotted(shortest)} is {lengths[shortest]}"
        fix = f"set {dotted(shortest)} to {mtp.num_modules + 1} at least"
        if lengths[shortest] > 1:
            fix += f", or model.mtp.num_modules to at most {lengths[shortest] - 1}"
        problems.append(Problem("PP108", shortest, message, help=fix))
    return problems


def check_splits(plan: PlanSections) -> list[Problem]:
    """PP108: sequences divide into their splits, and these over the TP ranks; PP106: not with context parallelism."""
    schedule, topology = plan.schedule, plan.topology
    num_splits = schedule.num_sequence_splits
    if num_splits == 1:
        return []
    if topology.cp > 1:
        message = f"sequences are divided into {num_splits} successive splits, and over {topology.cp} cp ranks"
        return [
            Problem("PP106", ("schedule", "num_sequence_splits"), message, help="use one of the two: cp 1, or 1 split")
        ]
    unit = num_splits * (topology.tp if topology.sequence_parallel else 1)
    problems = []
    for path, length in plan.sequence_lengths.items():
        if length % unit:
            reason = f"schedule.num_sequence_splits {num_splits}"
            if unit != num_splits:
                reason += f" x topology.tp {topology.tp} (sequence parallelism)"
            message = f"{dotted(path)} {length} does not divide by {reason}"
            problems.append(Problem("PP108", path, message, help=f"set it to {multiples(length, unit)}"))
    return problems
