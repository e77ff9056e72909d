"""Start of the reference from a saved state, for a run that cannot be compared with training from step 0."""

from __future__ import annotations

from pipeproof.exec.rank.framework_protocol import Array
from pipeproof.exec.rank.job_files import CheckpointOptions
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.gradient_facts import bias_key, bias_name, moves_biases, routers
from pipeproof.stages.describe.model_family import describe_layers
from pipeproof.stages.reference.reference_state import InitialState
from pipeproof.state.array_files import ByteArray
from pipeproof.state.cast import bits_dtype, cast
from pipeproof.state.read_state import SavedState, read_whole
from pipeproof.state.state_index import read_index
from pipeproof.state.state_layout import COUNTERS, MOMENTS, moment_name


def reference_start(options: CheckpointOptions, plan: PlanSpec) -> InitialState:
    """Return the whole state to resume from, as a reference takes it; it was checked against the plan before.

    With a state of weights only, the optimizer and missing biases keep their initial values.

    Raises:
        StateError: a file has changed since the check.
    """
    assert options.resume is not None, "only runs that resume have a state"
    state, run = SavedState(options.resume, read_index(options.resume)), plan.run
    layers = describe_layers(plan)
    whole = {name: _numbers(array) for name, array in read_whole(state).items()}
    names = [p.name for layer in layers for p in layer.parameters]  # sums of squares go in this order
    biased = {bias_key(router): bias_name(router) for router in routers(layers)} if moves_biases(plan) else {}
    slots = MOMENTS[run.optimizer] + COUNTERS[run.optimizer][run.backend]
    optimizer_slots = {(name, slot): moment_name(name, slot) for name in names for slot in slots}
    return InitialState(
        state.steps_done,
        {name: whole[name] for name in names} | {key: whole[name] for key, name in biased.items() if name in whole},
        {key: whole[name] for key, name in optimizer_slots.items() if name in whole},
    )


def _numbers(array: ByteArray) -> Array:
    """Return the values as a numpy array; bfloat16, which numpy lacks, becomes float32."""
    dtype = "float32" if array.dtype == "bfloat16" else array.dtype
    bits = cast(array.content.view(bits_dtype(array.dtype)), array.dtype, dtype)
    return bits.view(dtype).reshape(array.shape)
