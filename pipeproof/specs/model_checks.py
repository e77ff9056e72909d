"""Checks of the model's sizes: by themselves, and against the ranks that cut them.

Each function reads validated values and returns every problem that it finds;
paths count from the section that calls it.
"""

from __future__ import annotations

from math import isqrt
from typing import TYPE_CHECKING

from pipeproof.specs.problems import KeyPath, Problem, dotted, listed

if TYPE_CHECKING:
    from pipeproof.specs.model import ModelSpec
    from pipeproof.specs.plan import PlanSpec
    from pipeproof.specs.topology import TopologySpec


def check_model(model: ModelSpec) -> list[Problem]:
    """Heads fit the hidden size and are even (PP108); the parts of a model fit it and each other (PP106, PP108)."""
    heads = _check_latent(model) if model.mla is not None else [*_check_head_size(model), *_check_groups(model)]
    return [*heads, *_check_vocabulary(model), *_check_experts(model)]


def _check_head_size(model: ModelSpec) -> list[Problem]:
    """Rotary embedding turns pairs, so a head's size is even."""
    hidden, heads = model.hidden_size, model.num_heads
    if model.head_size is not None:
        if model.head_size % 2 == 0:
            return []
        message = f"model.head_size {model.head_size} is odd, and rotary attention needs an even number"
        return [Problem("PP108", ("head_size",), message, help=f"set it to {multiples(model.head_size, 2)}")]
    if hidden % heads:
        message = f"model.hidden_size {hidden} does not divide into model.num_heads {heads} heads"
    elif hidden // heads % 2:
        message = (
            f"a head has model.hidden_size {hidden} / model.num_heads {heads} = {hidden // heads} elements, "
            "and rotary attention needs an even number"
        )
    else:
        return []
    mend = f"set model.hidden_size to {multiples(hidden, 2 * heads)}"
    if hidden % 2 == 0:  # heads of an even size: their number divides half the hidden size
        mend += f", or model.num_heads to {divisors(hidden // 2, heads)}"
    return [Problem("PP108", ("hidden_size",), message, help=mend)]


def _check_groups(model: ModelSpec) -> list[Problem]:
    heads, kv_heads = model.num_heads, model.kv_heads
    if heads % kv_heads == 0:
        return []
    message = f"model.num_heads {heads} does not divide into groups for model.num_kv_heads {kv_heads}"
    mend = f"set model.num_kv_heads to {divisors(heads, kv_heads)}"
    return [Problem("PP108", ("num_kv_heads",), message, help=mend)]


def _check_latent(model: ModelSpec) -> list[Problem]:
    assert model.mla is not None
    problems = [
        Problem(
            "PP106",
            (name,),
            f"`model.{name}` is given together with `model.mla`, whose heads have sizes of their own",
            help=f"remove {name}",
            at_key=True,
        )
        for name in ("num_kv_heads", "head_size")
        if getattr(model, name) is not None
    ]
    size = model.mla.rope_head_size
    if size % 2:
        message = f"model.mla.rope_head_size {size} is odd, and rotary attention needs an even number"
        problems.append(Problem("PP108", ("mla", "rope_head_size"), message, help=f"set it to {multiples(size, 2)}"))
    return problems


def _check_vocabulary(model: ModelSpec) -> list[Problem]:
    """Padding makes a vocabulary larger."""
    size = model.num_token_ids
    if size <= model.vocab_size:
        return []
    message = f"model.unpadded_vocab_size {size} is more than model.vocab_size {model.vocab_size}, its padding included"
    mend = f"set model.vocab_size to a multiple of topology.tp from {size} on"
    return [Problem("PP106", ("unpadded_vocab_size",), message, help=mend)]


def _check_experts(model: ModelSpec) -> list[Problem]:
    moe, problems = model.moe, list[Problem]()
    if moe is None:
        return problems
    if moe.top_k > moe.num_experts:
        message = f"a token is sent to model.moe.top_k {moe.top_k} experts, and there are {moe.num_experts}"
        mend = f"set model.moe.top_k to at most {moe.num_experts}"
        problems.append(Problem("PP106", ("moe", "top_k"), message, help=mend))
    if moe.dense_layers >= model.num_layers:
        message = f"model.moe.dense_layers {moe.dense_layers} leaves none of {model.num_layers} blocks for experts"
        mend = f"set it to at most {model.num_layers - 1}, or remove model.moe"
        problems.append(Problem("PP106", ("moe", "dense_layers"), message, help=mend))
    return problems


def check_tensor_parallel(model: ModelSpec, topology: TopologySpec) -> list[Problem]:
    """PP108: what is cut over the TP ranks divides by their number."""
    cut: list[tuple[KeyPath, int, str]] = [
        (("num_heads",), model.num_heads, "attention heads are cut over the TP ranks"),
    ]
    if model.num_kv_heads is not None:
        cut.append((("num_kv_heads",), model.num_kv_heads, "heads of keys and values are cut over the TP ranks"))
    if model.moe is None or model.moe.dense_layers:
        cut.append((("ffn_size",), model.ffn_size, "the MLP is cut over the TP ranks"))
    if model.moe is not None:
        cut.append((("moe", "ffn_size"), model.moe.ffn_size, "every expert is cut over the TP ranks"))
    cut.append((("vocab_size",), model.vocab_size, "embedding and head are cut over the TP ranks"))
    if topology.sequence_parallel:
        reason = "sequence parallelism cuts the sequence over the TP ranks"
        cut.append((("seq_length",), model.seq_length, reason))
    return [
        Problem(
            "PP108",
            ("model", *path),
            f"{dotted(('model', *path))} {size} does not divide by topology.tp {topology.tp}: {reason}",
            help=f"set {dotted(('model', *path))} to {multiples(size, topology.tp)}, "
            f"or topology.tp to {divisors(size, topology.tp)}",
        )
        for path, size, reason in cut
        if size % topology.tp
    ]


def check_expert_parallel(plan: PlanSpec) -> list[Problem]:
    """PP108: experts divide over the EP ranks, and so do the tokens that go to them, where all get equally many."""
    moe, topology = plan.model.moe, plan.topology
    if moe is None or topology.ep == 1:
        return []
    problems = []
    if moe.num_experts % topology.ep:
        problems.append(
            Problem(
                "PP108",
                ("model", "moe", "num_experts"),
                f"model.moe.num_experts {moe.num_experts} does not divide by topology.ep {topology.ep}: experts are "
                "shared out over the EP ranks",
                help=f"set model.moe.num_experts to {multiples(moe.num_experts, topology.ep)}, "
                f"or topology.ep to {divisors(moe.num_experts, topology.ep)}",
            )
        )
    unit = topology.ep * topology.cp
    lengths: dict[KeyPath, int] = {("model", "seq_length"): plan.model.seq_length}
    for index, length in enumerate(plan.schedule.seq_lengths or ()):
        lengths["schedule", "seq_lengths", index] = length
    for path, length in lengths.items():
        sent = length // plan.schedule.num_sequence_splits * moe.top_k
        if sent % unit:
            problems.append(
                Problem(
                    "PP108",
                    path,
                    f"{sent} tokens go to experts ({dotted(path)} {length}, model.moe.top_k {moe.top_k}), which does "
                    f"not divide by {unit}: each of the topology.ep {topology.ep} x topology.cp {topology.cp} ranks "
                    "is taken to have equally many",
                    help=f"set {dotted(path)} to a multiple of {unit * plan.schedule.num_sequence_splits}",
                )
            )
    return problems


def multiples(size: int, unit: int) -> str:
    """The multiples of ``unit`` next to ``size``."""
    below = size // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


def divisors(size: int, near: int) -> str:
    """The divisors of ``size`` next to ``near``, which is none."""
    small = [n for n in range(1, isqrt(size) + 1) if size % n == 0]
    found = {*small, *(size // n for n in small)}
    below = max((n for n in found if n < near), default=None)
    above = min((n for n in found if n > near), default=None)
    return listed([n for n in (below, above) if n is not None])
