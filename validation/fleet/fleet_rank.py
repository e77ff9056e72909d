"""One rank of ``python -m validation.fleet``: it trains the same ``PipelineLayer`` by Fleet, then by ``Pipeline``.

``python -m validation.fleet.fleet_rank SETTINGS OUTPUT``, in the environment of Paddle's launcher. It writes what the
two trained, and Fleet's operations, as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from pipeproof.exec.store.rendezvous import await_store
from pipeproof.stages.paddle.runtime import quiet_native, quiet_python, start_paddle
from validation.fleet.fleet_order import EventRecorder
from validation.fleet.fleet_run import Settings

start_paddle()
import paddle  # noqa: E402
from paddle.distributed import fleet  # noqa: E402
from paddle.distributed.fleet.meta_parallel import PipelineLayer  # noqa: E402
from paddle.distributed.fleet.meta_parallel.pipeline_parallel import (  # noqa: E402
    PipelineParallelMicroStepLocations as At,
)

from pipeproof.paddle import Pipeline  # noqa: E402
from validation.fleet.fleet_groups import FleetWorld, connect_fleet, fleet_groups  # noqa: E402

_SEED = 7


def main(settings: Settings, output: Path) -> None:
    """Train both, and write the results of this rank."""
    rank, num_ranks = int(os.environ["PADDLE_TRAINER_ID"]), settings.num_ranks
    if rank:
        await_store(os.environ["PADDLE_MASTER"])
    recorder = EventRecorder(rank % settings.pp, settings.pp)
    world = connect_fleet(rank, num_ranks, settings.edges, recorder)
    with quiet_python(), quiet_native(), fleet_groups(world):
        fleet.init(is_collective=True, strategy=_strategy(settings), log_level="ERROR")
    theirs = _Trained(fleet.distributed_model, settings, world)
    _hook(theirs.model, recorder)
    recorder.take()
    events = []
    with _recording(settings):
        for _ in range(settings.steps):
            theirs.train_step(rank // settings.pp)
            events.append(asdict(recorder.take()))
    ours = _Trained(Pipeline, settings, world)
    for _ in range(settings.steps):
        ours.train_step(rank // settings.pp)
    content = {
        "scheduler": type(theirs.model).__name__,
        "plan": ours.model.plan.content,
        "losses": [theirs.losses, ours.losses],
        "gradients": [
            [_difference(step, name, of_fleet[name], own[name]) for name in sorted(own)]
            for step, (of_fleet, own) in enumerate(zip(theirs.gradients, ours.gradients, strict=True))
        ],
        "events": events,
    }
    output.write_text(json.dumps(content))
    ours.model.close()
    world.world.channels.close()


class _Trained:
    """A ``PipelineLayer`` that ``wrap`` trains; all begin with the same weights, and draw the same numbers."""

    def __init__(self, wrap: Callable[[Any], Any], settings: Settings, world: FleetWorld) -> None:
        self._module, self._settings = importlib.import_module(f"validation.fleet.models.{settings.model}"), settings
        self.losses: list[float] = []
        self.gradients: list[dict[str, Any]] = []
        with quiet_python(), fleet_groups(world):
            paddle.seed(_SEED)
            layers = PipelineLayer(
                self._module.described(), topology=fleet.get_hybrid_communicate_group().topology(),
                loss_fn=self._module.loss, seg_method="layer:Mix" if settings.chunks > 1 else "uniform",
                num_virtual_pipeline_stages=settings.chunks if settings.chunks > 1 else None,
            )  # fmt: skip
            self.model = wrap(layers)
            update = paddle.optimizer.AdamW(0.01, parameters=layers.parameters())
            self._keep_gradients(update, dict(layers.named_parameters()))
            self._optimizer = fleet.distributed_optimizer(update)

    def train_step(self, replica: int) -> None:
        """Train the next step."""
        step, count = len(self.losses), self._settings.micro_batches
        paddle.seed(_SEED + 1 + step)
        rngs = [np.random.default_rng([_SEED, step, replica * count + index]) for index in range(count)]
        pairs = [[paddle.to_tensor(array) for array in self._module.data(rng)] for rng in rngs]
        inputs, labels = ([*each] for each in zip(*pairs, strict=True))
        self.losses.append(self.model.train_batch((inputs, labels), self._optimizer).item())

    def _keep_gradients(self, update: Any, weights: dict[str, Any]) -> None:
        """Copy every gradient when Fleet, which has summed them over replicas by then, steps its inner optimizer."""
        step = update.step

        def copy_and_step() -> None:
            self.gradients.append(
                {
                    name: np.zeros(weight.shape, "float32") if weight.grad is None else weight.grad.numpy() + 0.0
                    for name, weight in weights.items()
                    if not weight.stop_gradient
                }
            )
            step()

        update.step = copy_and_step


def _difference(step: int, name: str, theirs: Any, ours: Any) -> dict[str, Any]:
    """Adding 0.0 has made every zero positive, so equal values have equal bits."""
    scale = float(np.abs(theirs).max(initial=0.0)) or 1.0
    return {
        "step": step,
        "name": name,
        "is_equal": theirs.tobytes() == ours.tobytes(),
        "distance": float(np.abs(theirs - ours).max(initial=0.0)) / scale,
    }


def _strategy(settings: Settings) -> Any:
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {
        "pp_degree": settings.pp, "dp_degree": settings.replicas, "mp_degree": 1,
        "pp_configs": {"best_unbalanced_scheduler": settings.balanced},
    }  # fmt: skip
    strategy.pipeline_configs = {"accumulate_steps": settings.micro_batches, "micro_batch_size": 2}
    return strategy


def _hook(model: Any, recorder: EventRecorder) -> None:
    """Register Fleet's callbacks with the recorder."""
    model.register_hook(At.FORWARD_BEGIN, recorder.forward_begins)
    model.register_hook(At.FORWARD_END, recorder.forward_ends)
    model.register_hook(At.BACKWARD_BEGIN, recorder.backward_begins)
    model.register_hook(At.BACKWARD_END, recorder.backward_ends)
    recorder.chunk_of = lambda: int(getattr(model, "_virtual_pp_rank", 0) or 0)


def _recording(settings: Settings) -> AbstractContextManager[object]:
    if settings.log is None:
        return nullcontext()
    from pipeproof.interop.traces.paddle_calls import record_paddle

    return record_paddle(Path(settings.log))


if __name__ == "__main__":
    main(Settings(**json.loads(sys.argv[1])), Path(sys.argv[2]))
