"""Declaration of custom layers: made from built layers, compared with them, and tried with a resumed run in small."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from pipeproof.diagnostics.problems import KeyPath
from pipeproof.specs.custom_layers import ROWS, CustomLayerSpec, LayerDtype, LayerOutputSpec
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.custom.build_function import user_code_errors
from pipeproof.stages.custom.built_layers import BuiltLayer, BuiltModel, Tensor, Value, digests
from pipeproof.stages.custom.custom_codes import cannot_build, not_as_declared

_DECLARE_FIX = "`pipeproof import layers PLAN --write` writes the declaration"
WITHOUT_STATE = "run it without --save and --resume"
"""The fix that is always possible."""
_STATE_DTYPES = get_args(LayerDtype)
"""Types of buffers that a saved state can have."""


def declaration(plan: PlanSpec, model: BuiltModel) -> list[dict[str, Any]]:
    """The declaration ``model.layers`` of these layers, from their outputs for the first micro-batch.

    A first dim of ``schedule.micro_batch_size`` is written as ``b``.

    Raises:
        BadPlanError: PP911, a layer, the data or the loss function fails.
    """
    declared, before = [], digests(model.untrained())
    outputs_of_layers = list(_outputs(model))
    changed = changed_buffers(before, model.layers)
    for layer, outputs in outputs_of_layers:
        entry: dict[str, Any] = {"name": layer.name, "kind": layer.entry.kind}
        if layer is not model.layers[-1]:
            entry["out"] = [_out(plan, tensor) for tensor in outputs]
        if layer.parameters:
            entry["parameters"] = [
                {"name": name.removeprefix(f"{layer.name}."), "shape": list(weight.shape)}
                for name, weight in layer.parameters.items()
            ]
        names = [name for name in changed if name in layer.untrained() and _fits_state(layer, name)]
        if names:
            entry["buffers"] = [_buffer(plan, layer, name) for name in names]
        if layer.borrowed:
            entry["borrows"] = list(layer.borrowed)
        declared.append(entry)
    return declared


def require_declared(plan: PlanSpec, model: BuiltModel) -> None:
    """Compare all layers with the plan, and try the first micro-batch and its loss.

    Raises:
        BadPlanError: PP911 as ``declaration``; PP912, the first thing that differs.
    """
    declared = plan.custom.layers
    if len(declared) != len(model.layers):
        message = f"the file has {len(model.layers)} layers, and the plan declares {len(declared)}"
        raise not_as_declared(message, ("model", "layers"), _DECLARE_FIX)
    for index, (layer, spec) in enumerate(zip(model.layers, declared, strict=True)):
        path = ("model", "layers", index)
        if spec.kind is not None and spec.kind != layer.entry.kind:
            raise _differ(path, f"layer `{layer.name}` is a {layer.entry.kind}, and {spec.kind} is declared")
        _require_weights(layer, spec, path, plan.run.dtype)
        require_buffers(layer, spec, path, plan.run.dtype)
    for index, (layer, outputs) in enumerate(_outputs(model)):
        if layer is not model.layers[-1]:
            require_outputs(plan, layer.name, declared[index].out, outputs, ("model", "layers", index, "out"))


def require_outputs(
    plan: PlanSpec, name: str, declared: Sequence[LayerOutputSpec], outputs: Value, path: KeyPath = ("model", "layers")
) -> None:
    """Compare the outputs of a layer with their declaration.

    Raises:
        BadPlanError: PP912, the number of outputs, a shape or a type differs.
    """
    if len(outputs) != len(declared):
        message = f"layer `{name}` returns {len(outputs)} tensors, and {len(declared)} are declared"
        raise not_as_declared(message, path, _DECLARE_FIX)
    for index, (out, tensor) in enumerate(zip(declared, outputs, strict=True)):
        expected = list(out.sizes(plan.schedule.micro_batch_size)), out.dtype or plan.run.dtype
        actual = list(tensor.shape), dtype_name(tensor)
        if actual != expected:
            message = f"layer `{name}` returns {actual[1]} {actual[0]}, and {expected[1]} {expected[0]} is declared"
            raise not_as_declared(message, (*path, index), _DECLARE_FIX)


def require_buffers(layer: BuiltLayer, spec: CustomLayerSpec, path: KeyPath, dtype: str) -> dict[str, Tensor]:
    """Compare a layer's current buffers with the declared ones, and return the latter by their whole names.

    Raises:
        BadPlanError: PP912, a buffer is missing, or has another shape or type.
    """
    current, buffers = layer.untrained(), {}
    for index, declared in enumerate(spec.buffers):
        name = f"{spec.name}.{declared.name}"
        expected = declared.dtype or dtype, list(declared.shape)
        if name not in current:
            raise _differ((*path, "buffers", index), f"layer `{layer.name}` has no buffer `{name}`, which is declared")
        actual = dtype_name(current[name]), list(current[name].shape)
        if actual != expected:
            message = f"the buffer `{name}` is {actual[0]} {actual[1]}, and {expected[0]} {expected[1]} is declared"
            raise _differ((*path, "buffers", index), message)
        buffers[name] = current[name]
    return buffers


def changed_buffers(before: Mapping[str, str], layers: Sequence[BuiltLayer]) -> list[str]:
    """The tensors whose digests differ from ``before``, in order. Tensors that are new are a layer's cache."""
    now = digests({name: x for layer in layers for name, x in layer.untrained().items() if name in before})
    return [name for name, digest in now.items() if digest != before[name]]


def require_declared_changes(before: Mapping[str, str], layers: Sequence[BuiltLayer], plan: PlanSpec) -> None:
    """Refuse layers that changed undeclared buffers, because a saved state would not have them.

    Raises:
        BadPlanError: PP912, the first buffer with another digest than ``before`` that is not declared.
    """
    by_name, changed = {layer.name: layer for layer in layers}, changed_buffers(before, layers)
    for index, spec in enumerate(plan.custom.layers):
        current = by_name[spec.name].untrained() if spec.name in by_name else {}
        declared = {f"{spec.name}.{buffer.name}" for buffer in spec.buffers}
        for name in changed:
            if name in current and name not in declared:
                change = f"training changes `{name}` ({dtype_name(current[name])}), which the plan does not declare"
                path = ("model", "layers", index)
                if dtype_name(current[name]) in _STATE_DTYPES:
                    entry = json.dumps(_buffer(plan, by_name[spec.name], name)).replace('"', "")
                    fix = f"add `{entry}` to its `buffers`; `pipeproof import layers PLAN --write` does this for all "
                    fix += "buffers that the first micro-batch changes"
                else:
                    fix = f"use a type that states support: {', '.join(_STATE_DTYPES)}"
                raise not_as_declared(f"{change}: a saved state would not have it", path, f"{fix}; or {WITHOUT_STATE}")


def dtype_name(tensor: Tensor) -> str:
    """The type of a tensor's elements, as written in a plan."""
    return str(tensor.dtype).removeprefix("paddle.")


def _outputs(model: BuiltModel) -> Iterator[tuple[BuiltLayer, Value]]:
    """The outputs of each layer for the first micro-batch. Then the loss and backward are tried."""
    value = model.inputs(0, 0)
    for layer in model.layers:
        value = model.run(layer, value, step=0, index=0)
        yield layer, value
    loss = model.loss(value, 0, 0)
    with user_code_errors(model.file, "the backward of the layers"):
        loss.backward()
    for layer in model.layers:
        needed = [name for name, weight in layer.unshared.items() if weight.grad is not None]
        if needed:
            raise cannot_build(
                f"`{layer.name}` is a SharedLayerDesc that uses {', '.join(needed)}, which it does not share: "
                "the result of Fleet's training then depends on the partition",
                "name the weight in shared_weight_attr, or move it to a separate layer",
            )


def _out(plan: PlanSpec, tensor: Tensor) -> dict[str, Any]:
    shape: list[int | str] = list(tensor.shape)
    if shape and shape[0] == plan.schedule.micro_batch_size:
        shape[0] = ROWS
    dtype = dtype_name(tensor)
    return {"shape": shape} if dtype == plan.run.dtype else {"shape": shape, "dtype": dtype}


def _buffer(plan: PlanSpec, layer: BuiltLayer, name: str) -> dict[str, Any]:
    tensor = layer.untrained()[name]
    spec = {"name": name.removeprefix(f"{layer.name}."), "shape": list(tensor.shape)}
    return spec if dtype_name(tensor) == plan.run.dtype else {**spec, "dtype": dtype_name(tensor)}


def _fits_state(layer: BuiltLayer, name: str) -> bool:
    return dtype_name(layer.untrained()[name]) in _STATE_DTYPES


def _require_weights(layer: BuiltLayer, spec: CustomLayerSpec, path: KeyPath, dtype: str) -> None:
    declared = {f"{spec.name}.{weight.name}": list(weight.shape) for weight in spec.parameters}
    actual = {name: list(weight.shape) for name, weight in layer.parameters.items()}
    if actual != declared:
        first = next(name for name in {**actual, **declared} if actual.get(name) != declared.get(name))
        if first not in declared:
            raise _differ(path, f"layer `{layer.name}` has the weight `{first}` {actual[first]}, which is not declared")
        shape = actual.get(first, "nothing")
        raise _differ(path, f"layer `{layer.name}` has {shape} for the weight `{first}`, declared as {declared[first]}")
    if list(actual) != list(declared):
        raise _differ(path, f"layer `{layer.name}` has its weights in the order {', '.join(actual)}")
    if set(layer.borrowed) != set(spec.borrows):
        actual_text, declared_text = (", ".join(sorted(x)) or "nothing" for x in (layer.borrowed, spec.borrows))
        message = f"layer `{layer.name}` borrows {actual_text} from earlier layers, and {declared_text} is declared"
        raise _differ(path, message)
    for name, weight in layer.parameters.items():
        if dtype_name(weight) != dtype:
            raise _differ(path, f"the weight `{name}` is {dtype_name(weight)}, and run.dtype is {dtype}")


def _differ(path: KeyPath, message: str) -> Exception:
    return not_as_declared(message, path, _DECLARE_FIX)


def require_resumable(trained: BuiltModel, fresh: BuiltModel, plan: PlanSpec) -> None:
    """Try a resumed run in small: refuse layers with state between micro-batches that a saved state would not have.

    That may be a Python number, a draw from a generator other than Paddle's, a tensor that only a forward creates, or a
    tensor that is used twice in a layer until a forward separates the two. ``trained`` has processed the first
    micro-batch, ``fresh`` none. ``fresh`` gets the declared buffers of ``trained``; then both process the next
    micro-batch and must have the same bits. A plan with one step of one micro-batch has no next one.

    Raises:
        BadPlanError: PP911, a layer fails; PP912, the first layer with different outputs or tensors.
    """
    if plan.schedule.num_micro_batches == plan.run.steps == 1:
        return
    step, index = (0, 1) if plan.schedule.num_micro_batches > 1 else (1, 0)
    declared = {f"{layer.name}.{buffer.name}" for layer in plan.custom.layers for buffer in layer.buffers}
    saved = {name: tensor.numpy() for name, tensor in trained.untrained().items() if name in declared}
    for name, tensor in fresh.untrained().items():
        if name in saved:
            tensor.set_value(saved[name])
    value = trained.inputs(step, index)
    for number, (layer, fresh_layer) in enumerate(zip(trained.layers, fresh.layers, strict=True)):
        # each gets a copy of the input: layers may write into it
        copies = [tuple(part.clone() for part in value) for _ in range(2)]
        outputs = (
            trained.run(layer, copies[0], step=step, index=index),
            fresh.run(fresh_layer, copies[1], step=step, index=index),
        )
        output_digests = [digests({f"output {i}": y for i, y in enumerate(ys)}) for ys in outputs]
        tensors = [digests(x.untrained()) for x in (layer, fresh_layer)]
        different = [name for name in tensors[0] if tensors[0][name] != tensors[1].get(name)]
        if different or output_digests[0] != output_digests[1]:
            difference = f"has another `{different[0]}`" if different else "has another output"
            raise not_as_declared(
                f"layer `{layer.name}` {difference} in micro-batch {index} of step {step} after it is rebuilt with its "
                "declared buffers: it has state that a saved state would not have",
                ("model", "layers", number),
                "store everything that training changes in buffers, each a separate tensor from the build on; declare "
                f"them; draw only from Paddle's generator; or {WITHOUT_STATE}",
            )
        value = outputs[0]
