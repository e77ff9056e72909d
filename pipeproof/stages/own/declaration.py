"""What built layers are, held against what the plan declares; and the declaration that fits them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from pipeproof.specs.own_layers import ROWS, KeptType, OutSpec, OwnLayerSpec
from pipeproof.specs.plan import PlanSpec
from pipeproof.specs.problems import KeyPath
from pipeproof.stages.own.codes import cannot_build, not_as_declared
from pipeproof.stages.own.factory import blaming
from pipeproof.stages.own.model import OwnLayer, OwnModel, Tensor, Value, digests

_AGAIN = "`pipeproof describe PLAN --write` declares what there is"
WITHOUT = "run it without --save and --resume"
"""What can be done in every case."""
_TYPES = get_args(KeptType)
"""Of buffers that a state has."""


def declaration(plan: PlanSpec, model: OwnModel) -> list[dict[str, Any]]:
    """``model.layers`` as it must be for these layers, from what they give for the first micro-batch.

    A first dim of ``schedule.micro_batch_size`` is written as ``b``.

    Raises:
        BadPlanError: PP911, a layer, the data or the loss function fails.
    """
    found, before = [], digests(model.untrained())
    tried = list(_outputs(model))
    moved = moved_buffers(before, model.layers)
    for layer, outputs in tried:
        about: dict[str, Any] = {"name": layer.name, "kind": layer.item.kind}
        if layer is not model.layers[-1]:
            about["out"] = [_out(plan, tensor) for tensor in outputs]
        if layer.parameters:
            about["parameters"] = [
                {"name": name.removeprefix(f"{layer.name}."), "shape": list(weight.shape)}
                for name, weight in layer.parameters.items()
            ]
        buffers = [_buffer(plan, layer, name) for name in moved if name in layer.untrained() and _is_kept(layer, name)]
        if buffers:
            about["buffers"] = buffers
        if layer.borrowed:
            about["borrows"] = list(layer.borrowed)
        found.append(about)
    return found


def require_declared(plan: PlanSpec, model: OwnModel) -> None:
    """Compare all layers with the plan, and try the first micro-batch and its loss.

    Raises:
        BadPlanError: PP911 as ``declaration``; PP912, the first thing that differs.
    """
    assert plan.own_layers is not None
    declared = plan.own_layers.layers
    if len(declared) != len(model.layers):
        message = f"the file gives {len(model.layers)} layers, and the plan declares {len(declared)}"
        raise not_as_declared(message, ("model", "layers"), _AGAIN)
    for index, (layer, about) in enumerate(zip(model.layers, declared, strict=True)):
        path = ("model", "layers", index)
        if about.kind is not None and about.kind != layer.item.kind:
            raise _differ(path, f"layer `{layer.name}` is a {layer.item.kind}, and {about.kind} is declared")
        _require_weights(layer, about, path, plan.run.dtype)
        require_buffers(layer, about, path, plan.run.dtype)
    for index, (layer, outputs) in enumerate(_outputs(model)):
        if layer is not model.layers[-1]:
            require_outputs(plan, layer.name, declared[index].out, outputs, ("model", "layers", index, "out"))


def require_outputs(
    plan: PlanSpec, name: str, declared: Sequence[OutSpec], outputs: Value, path: KeyPath = ("model", "layers")
) -> None:
    """Hold what a layer gave against what it is declared to give.

    Raises:
        BadPlanError: PP912, their number, a shape or a type differs.
    """
    if len(outputs) != len(declared):
        message = f"layer `{name}` gives {len(outputs)} tensors, and {len(declared)} are declared"
        raise not_as_declared(message, path, _AGAIN)
    for place, (out, tensor) in enumerate(zip(declared, outputs, strict=True)):
        expected = list(out.sizes(plan.schedule.micro_batch_size)), out.dtype or plan.run.dtype
        found = list(tensor.shape), dtype_name(tensor)
        if found != expected:
            message = f"layer `{name}` gives {found[1]} {found[0]}, and {expected[1]} {expected[0]} is declared"
            raise not_as_declared(message, (*path, place), _AGAIN)


def require_buffers(layer: OwnLayer, about: OwnLayerSpec, path: KeyPath, dtype: str) -> dict[str, Tensor]:
    """Hold a layer's buffers, as they are now, against the declared ones; these, by their whole names.

    Raises:
        BadPlanError: PP912, one is not there, or in another shape or type.
    """
    there, found = layer.untrained(), {}
    for place, declared in enumerate(about.buffers):
        name = f"{about.name}.{declared.name}"
        wanted = declared.dtype or dtype, list(declared.shape)
        if name not in there:
            raise _differ((*path, "buffers", place), f"layer `{layer.name}` has no buffer `{name}`, which is declared")
        own = dtype_name(there[name]), list(there[name].shape)
        if own != wanted:
            message = f"the buffer `{name}` is {own[0]} {own[1]}, and {wanted[0]} {wanted[1]} is declared"
            raise _differ((*path, "buffers", place), message)
        found[name] = there[name]
    return found


def moved_buffers(before: Mapping[str, str], layers: Sequence[OwnLayer]) -> list[str]:
    """What has other digests now than ``before``, in order; what was not there then is a layer's cache."""
    now = digests({name: one for layer in layers for name, one in layer.untrained().items() if name in before})
    return [name for name, digest in now.items() if digest != before[name]]


def require_kept(before: Mapping[str, str], layers: Sequence[OwnLayer], plan: PlanSpec) -> None:
    """Refuse layers that have changed more than the plan declares: a state would not have it.

    Raises:
        BadPlanError: PP912, the first buffer that has another digest than ``before``, and is not declared.
    """
    assert plan.own_layers is not None
    by_name, moved = {layer.name: layer for layer in layers}, moved_buffers(before, layers)
    for index, about in enumerate(plan.own_layers.layers):
        there = by_name[about.name].untrained() if about.name in by_name else {}
        declared = {f"{about.name}.{buffer.name}" for buffer in about.buffers}
        for name in moved:
            if name in there and name not in declared:
                what = f"training changes `{name}` ({dtype_name(there[name])}), which the plan does not declare"
                path = ("model", "layers", index)
                if dtype_name(there[name]) in _TYPES:
                    about_it = json.dumps(_buffer(plan, by_name[about.name], name)).replace('"', "")
                    mend = f"add `{about_it}` to its `buffers`; `pipeproof describe PLAN --write` does so for all that "
                    mend += "the first micro-batch changes"
                else:
                    mend = f"keep it as one of the types that states have: {', '.join(_TYPES)}"
                raise not_as_declared(f"{what}: no state would have it", path, f"{mend}; or {WITHOUT}")


def dtype_name(tensor: Tensor) -> str:
    """The type of a tensor's elements, as a plan has it."""
    return str(tensor.dtype).removeprefix("paddle.")


def _outputs(model: OwnModel) -> Iterator[tuple[OwnLayer, Value]]:
    """What each layer gives for the first micro-batch; then its loss is tried, and the way back."""
    value = model.inputs(0, 0)
    for layer in model.layers:
        value = model.run(layer, value, step=0, index=0)
        yield layer, value
    loss = model.loss(value, 0, 0)
    with blaming(model.file, "the backward of the layers"):
        loss.backward()
    for layer in model.layers:
        needed = [name for name, weight in layer.unshared.items() if weight.grad is not None]
        if needed:
            raise cannot_build(
                f"`{layer.name}` is a SharedLayerDesc that computes with {', '.join(needed)}, which it does not share: "
                "what Fleet trains then depends on where the model is cut",
                "name the weight in shared_weight_attr, or move it into a layer of its own",
            )


def _out(plan: PlanSpec, tensor: Tensor) -> dict[str, Any]:
    shape: list[int | str] = list(tensor.shape)
    if shape and shape[0] == plan.schedule.micro_batch_size:
        shape[0] = ROWS
    dtype = dtype_name(tensor)
    return {"shape": shape} if dtype == plan.run.dtype else {"shape": shape, "dtype": dtype}


def _buffer(plan: PlanSpec, layer: OwnLayer, name: str) -> dict[str, Any]:
    tensor = layer.untrained()[name]
    about = {"name": name.removeprefix(f"{layer.name}."), "shape": list(tensor.shape)}
    return about if dtype_name(tensor) == plan.run.dtype else {**about, "dtype": dtype_name(tensor)}


def _is_kept(layer: OwnLayer, name: str) -> bool:
    return dtype_name(layer.untrained()[name]) in _TYPES


def _require_weights(layer: OwnLayer, about: OwnLayerSpec, path: KeyPath, dtype: str) -> None:
    declared = {f"{about.name}.{weight.name}": list(weight.shape) for weight in about.parameters}
    found = {name: list(weight.shape) for name, weight in layer.parameters.items()}
    if found != declared:
        different = [name for name in {**found, **declared} if found.get(name) != declared.get(name)]
        first = different[0]
        if first not in declared:
            raise _differ(path, f"layer `{layer.name}` has the weight `{first}` {found[first]}, which is not declared")
        here = found.get(first, "nothing")
        raise _differ(path, f"layer `{layer.name}` has {here} for the weight `{first}`, declared as {declared[first]}")
    if list(found) != list(declared):
        raise _differ(path, f"layer `{layer.name}` has its weights in the order {', '.join(found)}")
    if set(layer.borrowed) != set(about.borrows):
        here, there = (", ".join(sorted(names)) or "nothing" for names in (layer.borrowed, about.borrows))
        raise _differ(path, f"layer `{layer.name}` shares {here} with earlier layers, and borrows {there} as declared")
    for name, weight in layer.parameters.items():
        if dtype_name(weight) != dtype:
            raise _differ(path, f"the weight `{name}` is {dtype_name(weight)}, and run.dtype is {dtype}")


def _differ(path: KeyPath, message: str) -> Exception:
    return not_as_declared(message, path, _AGAIN)
