"""What a reference goes on from in a run that cannot be held against training from the very beginning."""

from __future__ import annotations

from pipeproof.exec.framework import Array
from pipeproof.exec.kept import KeptState
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.balance import bias_key, bias_name, moves_biases, routers
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.own_layers import describe_own
from pipeproof.stages.reference.start import Start
from pipeproof.state.files import ByteArray
from pipeproof.state.index import read_index
from pipeproof.state.layout import COUNTERS, MOMENTS, moment_name
from pipeproof.state.load import SavedState, read_whole
from pipeproof.state.reshard.cast import bits_dtype, cast


def start_of(kept: KeptState, plan: PlanSpec) -> Start:
    """The whole state that a run goes on from, as a reference takes it; it has been held against the plan before.

    A state of weights alone leaves the optimizer, and biases and buffers that it has not, as they are at the
    beginning.

    Raises:
        StateError: a file changed since.
    """
    assert kept.resume is not None, "asked where a run goes on from a state alone"
    state, run = SavedState(kept.resume, read_index(kept.resume)), plan.run
    layers = describe_gpt(plan) if plan.own_layers is None else describe_own(plan)
    whole = {name: _numbers(array) for name, array in read_whole(state).items()}
    names = [p.name for layer in layers for p in layer.parameters]  # sums of squares go in this order
    biased = {bias_key(one): bias_name(one) for one in routers(layers)} if moves_biases(plan) else {}
    slots = MOMENTS[run.optimizer] + COUNTERS[run.optimizer][run.backend]
    of_optimizer = {(name, slot): moment_name(name, slot) for name in names for slot in slots}
    others = biased | {buffer.name: buffer.name for layer in layers for buffer in layer.buffers}
    return Start(
        state.steps_done,
        {name: whole[name] for name in names} | {key: whole[name] for key, name in others.items() if name in whole},
        {key: whole[name] for key, name in of_optimizer.items() if name in whole},
    )


def _numbers(array: ByteArray) -> Array:
    """As numpy has them; it has no bfloat16."""
    dtype = "float32" if array.dtype == "bfloat16" else array.dtype
    bits = cast(array.content.view(bits_dtype(array.dtype)), array.dtype, dtype)
    return bits.view(dtype).reshape(array.shape)
