"""An alignment as a person, or a program, reads it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from pipeproof.analysis.align.array_digests import FAR, is_fast
from pipeproof.analysis.align.compare_records import Alignment
from pipeproof.analysis.align.first_difference import TensorAlignment, TensorDifference
from pipeproof.analysis.align.likely_cause import Cause
from pipeproof.analysis.align.loss_pairs import LossDifference, Matches
from pipeproof.analysis.align.record_format import Recorded
from pipeproof.analysis.align.training_logs import Observed


def render_alignment(alignment: Alignment, console: Console) -> None:
    """Print the counts, the first difference of each kind, and the verdict."""
    for line in _lines(alignment):
        console.print(line, markup=False, soft_wrap=True)
    asked = _asked(alignment)
    if alignment.equal and alignment.tolerance.rounding:
        console.print(f"[bold green]equal[/]{' within rounding' if _num_rounding(alignment) else ': bit for bit'}")
    elif alignment.equal:
        console.print(f"[bold green]equal[/]{asked}")
    elif alignment.tensors and alignment.tensors.systematic and alignment.tensors.num_differing == 0:
        tensor, factor = alignment.tensors.systematic
        words = f"a common factor of {factor.words} at {tensor.title}"
        console.print(f"[bold red]within the bound of rounding, but systematic[/]: {words}", soft_wrap=True)
    else:
        console.print(f"[bold red]different[/]{asked}")


def _num_rounding(alignment: Alignment) -> int:
    return 0 if alignment.tensors is None else alignment.tensors.num_rounding


def _asked(alignment: Alignment) -> str:
    if alignment.tolerance.rounding:
        return " by more than rounding"
    if alignment.tolerance.bitwise:
        exact = "in every printed digit" if alignment.losses.by_value else "bit for bit"
        return f": {exact}" if alignment.equal else ""
    return f" within {alignment.tolerance.ulps} ulps or {alignment.tolerance.relative:g} of the largest element"


def _lines(alignment: Alignment) -> Iterator[str]:
    losses = alignment.losses
    counts = [_count("main", losses.main)]
    if losses.mtp.steps:
        counts.append(_count("mtp", losses.mtp))
    if losses.routers.steps:
        counts.append(_count("router", losses.routers))
    yield ", ".join(counts)
    for name, matches in (("main", losses.main), ("mtp", losses.mtp), ("router", losses.routers)):
        if matches.first is not None:
            yield f"first_{name}_diff: {_loss(matches.first)}"
    for side, number, example in zip("AB", losses.unpaired, losses.examples, strict=True):
        if example is not None:
            yield f"{number} losses of {side} have no partner, such as {_where(example)}"
    if alignment.tensors is not None:
        yield from _tensors(alignment.tensors)
    yield from (f"note: {note}" for note in alignment.notes)


def _count(name: str, matches: Matches) -> str:
    return f"{name}_matches={matches.num_equal}/{len(matches.steps)}"


def _loss(difference: LossDifference) -> str:
    values = f"A {_shown(difference.a)}, B {_shown(difference.b)}"
    factor = "" if difference.factor is None else f"; A is {difference.factor} of B"
    return f"{_where(difference.a)}: {values}; {_far(difference.ulps, difference.relative)}{factor}"


def _shown(observed: Observed) -> str:
    return " ".join(word for word in (observed.value, observed.md5 and f"md5 {observed.md5}") if word)


def _where(observed: Observed) -> str:
    rank = "" if observed.rank is None else f", rank {observed.rank}"
    batch_text = "" if observed.micro_batch is None else f", micro-batch {observed.micro_batch}"
    return f"step {observed.step}, {observed.loss}{rank}{batch_text} ({observed.what})"


def _tensors(tensors: TensorAlignment) -> Iterator[str]:
    equal = tensors.num_compared - tensors.num_differing
    rounding = f", {tensors.num_rounding} of them within rounding" if tensors.num_rounding else ""
    yield f"tensor_matches={equal}/{tensors.num_compared}{rounding}"
    if tensors.num_on_purpose:
        yield f"{tensors.num_on_purpose} tensors have no partner on purpose"
    if tensors.example:
        number = tensors.only_a + tensors.only_b
        yield f"{number} tensors have no partner: {tensors.example}"
    if tensors.num_rounding:
        always = [kind for kind in tensors.with_equal_bits if kind not in tensors.with_other_bits]
        shown = "; ".join(always[:_MOST_KINDS]) + (
            f"; and {len(always) - _MOST_KINDS} more" * (len(always) > _MOST_KINDS)
        )
        yield f"equal bits in step {tensors.first_step}: {shown or 'none'}"
    if tensors.systematic:
        tensor, factor = tensors.systematic
        yield f"systematic, of inputs with equal bits: step {tensor.step}, {tensor.title}"
        yield f"  cause, a guess: {factor.cause.family}: {factor.cause.evidence}"
    first = tensors.first
    if first is None:
        return
    yield f"first tensor that differs, in execution order: step {first.a.step}, {first.a.title}{_on(first)}"
    for side, one in (("A", first.a), ("B", first.b)):
        digest = f"{'' if is_fast(one.md5) else 'md5 '}{one.md5} " if one.md5 else ""
        yield f"  {side} {digest}norm {one.norm:.9g}"
    if first.ulps is not None:
        index_text = "" if first.place is None else f", farthest at {list(first.place)}"
        yield f"  {_far(first.ulps, first.relative)}{index_text}"
    if first.bound is not None:
        yield f"  the bound of rounding is relative {first.bound:.3g}"
    if first.how:
        yield f"  A's tensor was compared as: {first.how}"
    if first.operation is not None:
        inputs = {True: "its inputs are equal", False: "its inputs differ, too", None: "its inputs are not recorded"}
        yield f"  made by: {first.operation.name}; {inputs[first.operation.are_inputs_equal]}"
    yield f"  cause, a guess: {first.cause.family}: {first.cause.evidence}"
    before = "nothing recorded" if tensors.before is None else tensors.before.title
    handed = "; it is the same tensor before it was handed on: no layer computes between" if first.handed_on else ""
    yield f"  last equal before it: {before}{handed}"
    if first.weights.are_conclusive:
        named = {
            word: ", ".join(name.removeprefix(f"{first.a.layer}.").removesuffix(".weight") for name in names)
            for word, names in (("differ", first.weights.different), ("are equal", first.weights.equal))
        }
        yield f"  of its weights' gradients {'; '.join(f'{word}: {names}' for word, names in named.items())}"
    yield (
        f"  in that step {tensors.num_in_first_step} of {tensors.compared_in_first_step} tensors differ; "
        f"steps in which one does: {tensors.differing_steps}"
    )


_MOST_KINDS = 12


def _on(difference: TensorDifference) -> str:
    if not difference.ranks:
        return ""
    held = {shard.rank for shard in difference.a.shards}
    number = "rank" if len(difference.ranks) == 1 else "ranks"
    of = "" if len(difference.ranks) == len(held) else f", of {len(held)} that hold it"
    return f", {number} {', '.join(map(str, difference.ranks))}{of}"


def _far(ulps: int | None, relative: float | None) -> str:
    if ulps is None or relative is None:
        return "distance unknown without values"
    return f"{'not in' if ulps == FAR else ulps} ulps, relative {relative:.3g}"


def alignment_to_json(alignment: Alignment) -> dict[str, Any]:
    """The form of ``align --format json``; see ``docs/schemas/align.schema.json``."""
    losses, tensors = alignment.losses, alignment.tensors
    return {
        "equal": alignment.equal,
        "asked": {
            "ulps": alignment.tolerance.ulps,
            "relative": alignment.tolerance.relative,
            "rounding": alignment.tolerance.rounding,
        },
        "main": _matches_json(losses.main),
        "mtp": _matches_json(losses.mtp) if losses.mtp.steps else None,
        "routers": _matches_json(losses.routers) if losses.routers.steps else None,
        "unpaired_losses": {"a": losses.unpaired[0], "b": losses.unpaired[1]},
        "tensors": None if tensors is None else _tensors_json(tensors),
        "notes": list(alignment.notes),
    }


def _matches_json(matches: Matches) -> dict[str, Any]:
    first = matches.first
    return {
        "steps": len(matches.steps),
        "equal": matches.num_equal,
        "first_difference": None
        if first is None
        else {
            "step": first.a.step,
            "loss": first.a.loss,
            "what": first.a.what,
            "rank": first.a.rank,
            "micro_batch": first.a.micro_batch,
            "a": {"value": first.a.value, "md5": first.a.md5},
            "b": {"value": first.b.value, "md5": first.b.md5},
            **_far_json(first.ulps, first.relative),
            "factor": None if first.factor is None else str(first.factor),
        },
    }


def _tensors_json(tensors: TensorAlignment) -> dict[str, Any]:
    return {
        "compared": tensors.num_compared,
        "equal": tensors.num_compared - tensors.num_differing,
        "differing_steps": tensors.differing_steps,
        "only_a": tensors.only_a,
        "only_b": tensors.only_b,
        "on_purpose": tensors.num_on_purpose,
        "by_rounding": tensors.num_rounding,
        "equal_bits": [kind for kind in tensors.with_equal_bits if kind not in tensors.with_other_bits],
        "systematic": None
        if tensors.systematic is None
        else {
            "step": tensors.systematic[0].step,
            "tensor": tensors.systematic[0].name_to_json(),
            "deviation": tensors.systematic[1].deviation,
            "cause": _cause_json(tensors.systematic[1].cause),
        },
        "first_difference": None if tensors.first is None else _difference_json(tensors.first),
        "last_equal_before": None if tensors.before is None else tensors.before.name_to_json(),
    }


def _difference_json(difference: TensorDifference) -> dict[str, Any]:
    return {
        "step": difference.a.step,
        "tensor": difference.a.name_to_json(),
        "ranks": list(difference.ranks),
        "a": _content_json(difference.a),
        "b": _content_json(difference.b),
        **_far_json(difference.ulps, difference.relative),
        "bound": difference.bound,
        "place": None if difference.place is None else list(difference.place),
        "how": difference.how,
        "operation": None
        if (made := difference.operation) is None
        else {"name": made.name, "are_inputs_equal": made.are_inputs_equal},
        "handed_on": difference.handed_on,
        "weights": {"equal": list(difference.weights.equal), "different": list(difference.weights.different)},
        "cause": _cause_json(difference.cause),
    }


def _cause_json(cause: Cause) -> dict[str, str]:
    return {"family": cause.family.value, "evidence": cause.evidence}


def _content_json(tensor: Recorded) -> dict[str, Any]:
    norm = tensor.norm if math.isfinite(tensor.norm) else None
    return {"md5": tensor.md5, "norm": norm, "shape": list(tensor.shape), "dtype": tensor.dtype}


def _far_json(ulps: int | None, relative: float | None) -> dict[str, Any]:
    """Null for infinity, which JSON does not have."""
    return {
        "ulps": None if ulps == FAR else ulps,
        "relative": None if relative is None or not math.isfinite(relative) else relative,
    }
