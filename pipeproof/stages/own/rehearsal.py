"""A resumed run in small, before a run that keeps its state: do layers go on from what the plan declares of them?

One model has seen a micro-batch. Another one, just built, is given its declared
buffers. Whatever both then make of the next micro-batch must have the same bits.
"""

from __future__ import annotations

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.own.codes import not_as_declared
from pipeproof.stages.own.declaration import WITHOUT
from pipeproof.stages.own.model import OwnModel, digests


def require_resumes(trained: OwnModel, fresh: OwnModel, plan: PlanSpec) -> None:
    """Refuse layers that keep something from micro-batch to micro-batch that no state would have.

    That may be a number in Python, a draw from a generator that is not Paddle's, a tensor that only a forward makes, or
    one that stands in two places of a layer until a forward makes two of it. ``trained`` has seen the first micro-batch
    and ``fresh`` none; both see the next one. A plan of one step of one micro-batch has no next one.

    Raises:
        BadPlanError: PP911, a layer fails; PP912, the first layer that gives or has something else.
    """
    assert plan.own_layers is not None
    if plan.schedule.num_micro_batches == plan.run.steps == 1:
        return
    step, index = (0, 1) if plan.schedule.num_micro_batches > 1 else (1, 0)
    declared = {f"{layer.name}.{buffer.name}" for layer in plan.own_layers.layers for buffer in layer.buffers}
    saved = {name: tensor.numpy() for name, tensor in trained.untrained().items() if name in declared}
    for name, tensor in fresh.untrained().items():
        if name in saved:
            tensor.set_value(saved[name])
    value = trained.inputs(step, index)
    for place, (one, other) in enumerate(zip(trained.layers, fresh.layers, strict=True)):
        # each is given a copy of the same: layers may write into it
        copies = [tuple(part.clone() for part in value) for _ in range(2)]
        given = (
            trained.run(one, copies[0], step=step, index=index),
            fresh.run(other, copies[1], step=step, index=index),
        )
        outputs = [digests({f"output {number}": y for number, y in enumerate(ys)}) for ys in given]
        tensors = [digests(layer.untrained()) for layer in (one, other)]
        different = [name for name in tensors[0] if tensors[0][name] != tensors[1].get(name)]
        if different or outputs[0] != outputs[1]:
            what = f"has another `{different[0]}`" if different else "gives something else"
            raise not_as_declared(
                f"layer `{one.name}` {what} in micro-batch {index} of step {step} where it is built anew and gets its "
                "declared buffers: it keeps something that no state would have",
                ("model", "layers", place),
                "keep what training changes in buffers, each a tensor of its own from when the layer is built on; "
                f"declare them; draw from Paddle's generator alone; or {WITHOUT}",
            )
        value = given[0]
