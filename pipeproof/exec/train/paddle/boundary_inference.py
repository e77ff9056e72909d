"""Shapes and types at the boundaries: each stage runs one micro-batch: the first stage the script's, the others zeros.

The run changes nothing: buffers and the states of random generators are put back, and no gradient is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import paddle
from paddle import nn
from paddle.distributed.fleet.meta_parallel.parallel_layers.random import get_rng_state_tracker

from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.stage_boundaries import Form, LeafSpec, form_of, leaves_of, specs_of

Tensor: TypeAlias = paddle.Tensor


@dataclass(frozen=True, slots=True)
class StageRun:
    """Result of one run of a stage. ``activation_bytes`` is the memory that autograd keeps for it."""

    form: Form
    leaves: tuple[LeafSpec, ...]
    activation_bytes: int


def run_stage(number: int, module: nn.Layer, call: Callable[[Any], Any], value: Any, *, is_last: bool) -> StageRun:
    """Run one stage on a micro-batch. For the last stage only the activations count.

    Raises:
        PipelineError: a layer raises, or returns something that cannot cross.
    """
    kept: dict[int, int] = {}
    own = {x.data_ptr() for x in (*module.parameters(), *module.buffers()) if x._is_initialized()}  # noqa: SLF001

    def see(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in own:
            kept[tensor.data_ptr()] = int(tensor.size) * int(tensor.element_size())
        return tensor

    try:
        with (
            unchanged_state(module),
            paddle.enable_grad(),
            paddle.autograd.saved_tensors_hooks(see, lambda tensor: tensor),
        ):
            output = call(value)
    except Exception as error:
        raise PipelineError(
            f"stage {number} fails on its first micro-batch: {type(error).__name__}: {error}"
        ) from error
    if is_last:
        return StageRun(Form("tensor"), (), sum(kept.values()))
    form, leaves = leaves_of(output, f"stage {number}", paddle.Tensor)
    is_frozen = all(leaf.stop_gradient for leaf in leaves)  # zeros come back then
    specs = tuple(
        LeafSpec.of(leaf, has_gradient=leaf.is_floating_point() if is_frozen else not leaf.stop_gradient)
        for leaf in leaves
    )
    if not any(spec.has_gradient for spec in specs):
        raise PipelineError(f"no output of stage {number} has a gradient, so no stage before it would learn")
    return StageRun(form, specs, sum(kept.values()))


def zeros_of(form: Form, leaves: Sequence[LeafSpec]) -> Any:
    """Zeros in place of a stage's inputs: valid as token ids and as indices."""
    tensors = []
    for spec in leaves:
        tensors.append(paddle.zeros(list(spec.shape), dtype=spec.dtype))
        tensors[-1].stop_gradient = not spec.has_gradient
    return form.value(tensors)


@contextmanager
def unchanged_state(module: nn.Layer) -> Iterator[None]:
    """Put buffers and the states of random generators back as they were.

    The running statistics of Paddle's batch norms are frozen parameters.
    """
    frozen = [weight for weight in module.parameters() if weight.stop_gradient]
    buffers = [(buffer, buffer.detach().clone()) for buffer in (*module.buffers(), *frozen)]
    state, tracked = paddle.get_rng_state(), get_rng_state_tracker().get_states_tracker()
    try:
        yield
    finally:
        paddle.set_rng_state(state)
        get_rng_state_tracker().set_states_tracker(tracked)
        with paddle.no_grad():
            for buffer, value in buffers:
                buffer.set_value(value)


def entry_of(run: StageRun, num_rows: int) -> dict[str, Any]:
    """The report that a stage's rank sends to the others: JSON values."""
    return {
        "form": [run.form.kind, list(run.form.keys)],
        "out": [[list(spec.shape), spec.dtype, spec.has_gradient] for spec in run.leaves],
        "kept": run.activation_bytes,
        "rows": num_rows,
    }


def boundary_of(entry: Mapping[str, Any]) -> tuple[Form, tuple[LeafSpec, ...]]:
    """The boundary of an ``entry_of``."""
    return form_of(entry), specs_of(entry["out"])
