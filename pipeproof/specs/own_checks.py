"""Checks of a plan of own layers: what they declare fits together, and nothing is asked that only a GPT can answer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pipeproof.specs.problems import KeyPath, Problem, describe_value, nearest_name

if TYPE_CHECKING:
    from pipeproof.specs.own_layers import LayersSpec, OwnLayerSpec
    from pipeproof.specs.plan import PlanSpec

_NAME = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)
_BUILD = re.compile(r".+\.py:[A-Za-z_]\w*", re.ASCII)


def check_own_layers(plan: PlanSpec, model: LayersSpec) -> list[Problem]:
    """Every problem of the declared layers (PP104, PP106), and of the rest of the plan beside them."""
    return [*_check_layers(model), *_check_beside(plan)]


def _check_layers(model: LayersSpec) -> Iterator[Problem]:
    if not _BUILD.fullmatch(model.build):
        message = f"`model.build` is FILE.py:FUNCTION, found {describe_value(model.build)}"
        yield Problem("PP106", ("model", "build"), message, help="write for example my_model.py:build")
    if not model.layers:
        yield Problem("PP106", ("model", "layers"), "`model.layers` is empty", help="`pipeproof describe` writes it")
    places: dict[str, int] = {}
    weights: dict[str, tuple[int, ...]] = {}
    taken: set[str] = set()
    last = len(model.layers) - 1
    for index, layer in enumerate(model.layers):
        where: KeyPath = ("model", "layers", index)
        if not _NAME.fullmatch(layer.name):
            message = f"a layer's name has letters, digits, dots and dashes, found {describe_value(layer.name)}"
            yield Problem("PP106", (*where, "name"), message)
        if layer.name in places:
            message = f"layer {index} has the name `{layer.name}` of layer {places[layer.name]}"
            yield Problem("PP106", (*where, "name"), message, help="give each layer its own name")
        places.setdefault(layer.name, index)
        yield from _check_out(layer, where, is_last=index == last)
        yield from _check_borrowed(layer, where, weights)
        parameters, buffers = ([one.name for one in part] for part in (layer.parameters, layer.buffers))
        for key, what, names in (("parameters", "weight", parameters), ("buffers", "buffer", buffers)):
            for place, local in enumerate(names):
                name = f"{layer.name}.{local}"
                if name in taken:
                    message = f"the {what} `{name}` is declared twice"
                    yield Problem("PP106", (*where, key, place, "name"), message, help="remove one of the two")
                taken.add(name)
        weights |= {f"{layer.name}.{weight.name}": weight.shape for weight in layer.parameters}


def _check_out(layer: OwnLayerSpec, where: KeyPath, *, is_last: bool) -> Iterator[Problem]:
    if is_last and layer.out:
        message = f"`{layer.name}` is the last layer: what it gives goes to the loss function and crosses nothing"
        yield Problem("PP106", (*where, "out"), message, help="remove `out`", at_key=True)
    elif not is_last and not layer.out:
        message = f"`{layer.name}` does not say what it gives to the next layer"
        yield Problem("PP104", where, message, help="add `out: [{shape: [b, ...]}]`, or run `pipeproof describe`")
    elif not is_last and not any(out.has_gradient for out in layer.out):
        message = f"nothing that `{layer.name}` gives has a gradient, so that no layer before it would learn"
        yield Problem("PP106", (*where, "out"), message, help="merge it with the layer after it")
    for place, out in enumerate(layer.out):
        if out.gradient and out.dtype is not None and "float" not in out.dtype:
            message = f"a tensor of {out.dtype} has no gradient, and `gradient` is true"
            yield Problem("PP106", (*where, "out", place, "gradient"), message, help="remove `gradient`")


def _check_borrowed(layer: OwnLayerSpec, where: KeyPath, weights: dict[str, tuple[int, ...]]) -> Iterator[Problem]:
    for place, name in enumerate(layer.borrows):
        if name not in weights:
            near = nearest_name(name, weights)
            yield Problem(
                "PP106",
                (*where, "borrows", place),
                f"`{layer.name}` borrows `{name}`, which no layer before it has",
                help=f"did you mean `{near}`?" if near else "name it LAYER.NAME, as the layer that has it declares it",
            )


def _check_beside(plan: PlanSpec) -> Iterator[Problem]:
    """What the rest of a plan may ask of own layers; the help says what to do in its place."""
    topology, schedule, memory = plan.topology, plan.schedule, plan.memory
    none = "own layers declare nothing of it"
    refused: list[tuple[bool, KeyPath, str, str]] = [
        *(
            (size > 1, ("topology", axis), f"topology.{axis} is {size}, and {none}", "set it to 1, or use pp and dp")
            for axis, size in (("tp", topology.tp), ("cp", topology.cp), ("ep", topology.ep))
        ),
        (
            schedule.num_sequence_splits > 1,
            ("schedule", "num_sequence_splits"),
            "sequences of own layers cannot be cut: what their attention looks at is not known",
            "set it to 1",
        ),
        (
            schedule.seq_lengths is not None,
            ("schedule", "seq_lengths"),
            "own layers declare one shape for all micro-batches",
            "remove it",
        ),
        (
            schedule.last_micro_batch_size is not None,
            ("schedule", "last_micro_batch_size"),
            "own layers declare one shape for all micro-batches",
            "remove it",
        ),
        (
            plan.loss.normalization != "mean_of_micro_batches",
            ("loss", "normalization") if "normalization" in plan.loss.model_fields_set else ("model", "kind"),
            "the loss function of own layers gives one number for a micro-batch, so that each micro-batch counts alike",
            "write `loss: {normalization: mean_of_micro_batches}`",
        ),
        (
            isinstance(plan.stages, str),
            ("stages",),
            "the class names of own layers are not known here",
            "list the names of the layers of each stage",
        ),
        (bool(plan.boundaries), ("boundaries",), "what crosses between own layers is their `out`", "remove it"),
        (
            memory.recompute != "none",
            ("memory", "recompute"),
            "pipeproof computes no own layers again",
            "remove it; a layer may call paddle.distributed.fleet.utils.recompute itself",
        ),
        (
            memory.budget_gib is not None,
            ("memory", "budget_gib"),
            "what own layers keep inside is not known, so that no budget can be judged",
            "remove it",
        ),
        (
            plan.cost.analytic is not None,
            ("cost", "analytic"),
            "the work of own layers is not known",
            "give forward_us and backward_us, or measure them: `pipeproof run PLAN --profile FILE`",
        ),
        (
            plan.run.main_grad_dtype is not None,
            ("run", "main_grad_dtype"),
            "gradients of own layers add up in run.dtype",
            "remove it",
        ),
    ]
    for wanted, path, fact, mend in refused:
        if wanted:
            yield Problem("PP106", path, fact, help=mend)
