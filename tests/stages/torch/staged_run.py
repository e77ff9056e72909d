"""A plan trained through ``TorchStage`` in one process: any cut into stages, and ranks of all axes."""

import itertools
from itertools import pairwise

import torch

from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.reference.reference_state import StepResult
from pipeproof.stages.torch.optimizer import GradientClip, StageOptimizer
from pipeproof.stages.torch.stage import StepBatches, TorchStage
from tests.stages.world import World

CPU = torch.device("cpu")


def array_of(tensor):
    """A copy; 16 bits as float32."""
    return (tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor).clone().numpy()


class StagedRun:
    """``cut`` lists where stages begin, besides at layer 0.

    With ``delayed`` the gradients of weights of all work items come after all backwards, in their order.
    """

    def __init__(self, plan, cut=(), *, delayed=False, watch=None):
        self.plan, self.layers, self.delayed, self.watch = plan, describe_gpt(plan), delayed, watch
        self.world = World(torch, **{axis: getattr(plan.topology, axis) for axis in ("tp", "ep", "cp")})
        parts = [self.layers[a:b] for a, b in pairwise([0, *cut, len(self.layers)])]
        self.stages = [
            [
                TorchStage(plan, part, CPU, rank.coords["tp"], rank, rank.coords["ep"], rank, context=rank)
                for part in parts
            ]
            for rank in self.world.ranks
        ]
        self.parameters = [parameter for layer in self.layers for parameter in layer.parameters]
        self.issued = []
        """For each work item and rank: the operations issued forward, backward and for gradients of weights."""
        self.optimizers = [StageOptimizer(plan.run, stage.parameters) for stages in self.stages for stage in stages]

    def steps(self):
        """Train the plan's steps; of each a ``StepResult`` as the references have it."""
        for step in range(self.plan.run.steps):
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            for stages in self.stages:
                for stage in stages:
                    stage.balance.begin()
            by_rank = self.world.run(lambda place, step=step: self._rank(place, step))
            first, *others = itertools.chain.from_iterable(by_rank)
            total = sum(others, start=first)
            weights = {name: array_of(whole) for name, whole in self._whole(lambda weight: weight.main).items()}
            gradients = self._summed()
            routers = self._routers()
            self._put_back(gradients)
            if self.plan.run.clip_norm is not None:
                gradients = self._clipped(gradients)
            arrays = {name: array_of(gradient) for name, gradient in gradients.items()}
            yield StepResult(step, total.numpy()[()], arrays, weights, routers)
            for optimizer in self.optimizers:
                optimizer.step()

    def _rank(self, place, step):
        """All work items of the rank, of all dp ranks; its losses, where it is the first of the TP ranks."""
        coords, stages = self.world.ranks[place].coords, self.stages[place]
        schedule, topology = self.plan.schedule, self.plan.topology
        losses, later = [], []
        for dp in range(topology.dp):
            first = (dp * topology.ep + coords["ep"]) * schedule.num_micro_batches
            batches = StepBatches(self.plan, first, CPU)
            batches.load(step)
            for index in range(first, first + schedule.num_micro_batches):
                splits = range(schedule.num_sequence_splits) if topology.cp == 1 else [coords["cp"]]
                forwards = [
                    self.forward(
                        place, batches.work_item(index, split), step=step, index=index, split=split, watch=self.watch
                    )
                    for split in splits
                ]
                losses += [stages_losses for *_, stages_losses in forwards]
                issued = [self.take_issued(place)]
                for inputs, outputs, _ in reversed(forwards):
                    later += self.backward(place, inputs, outputs)
                issued.append(self.take_issued(place))
                if not self.delayed:
                    for gradients in later:
                        gradients.accumulate()
                    later = []
                self.issued.append((*issued, self.take_issued(place)))
        for gradients in later:
            gradients.accumulate()
        for stage in stages:
            stage.return_gradients()
        return losses if coords["tp"] == 0 else []

    def forward(self, place, batch, **where):
        """The stages' inputs and outputs, and the losses."""
        inputs, outputs, activation = [], [], None
        for stage in self.stages[place]:
            inputs.append(None if activation is None else activation.detach().requires_grad_())
            activation = stage.forward(inputs[-1], batch, **where)
            outputs.append(activation)
        return inputs, outputs, self.stages[place][-1].losses

    def backward(self, place, inputs, outputs):
        """The gradients of weights of each stage, which are still to be accumulated."""
        gradient, later = None, []
        for stage, received, output in zip(*map(reversed, (self.stages[place], inputs, outputs)), strict=True):
            later.append(stage.backward_input(output, gradient))
            gradient = None if received is None else received.grad
        return later

    def take_issued(self, place):
        issued = list(self.world.ranks[place].issued)
        self.world.ranks[place].issued.clear()
        return issued

    def _of_rank(self, place, name):
        """All copies of a weight on a rank, by stage."""
        return [stage.parameters[name] for stage in self.stages[place] if name in stage.parameters]

    def _whole(self, tensor_of):
        return {p.name: self._joined(p, lambda place, name: tensor_of(self._of_rank(place, name)[0]))
                for p in self.parameters}  # fmt: skip

    def _summed(self):
        """By name the whole gradient: over copies of a weight, ranks of one data rank, and data ranks, in order."""

        def added(place, name):
            first, *others = (weight.gradient for weight in self._of_rank(place, name))
            return sum(others, start=first)

        return {p.name: self._joined(p, added, sums=True) for p in self.parameters}

    def _joined(self, parameter, of_rank, *, sums=False):
        """From the ranks' parts, which are cut, added or equal over each axis."""
        at = {tuple(rank.coords.values()): of_rank(place, parameter.name)
              for place, rank in enumerate(self.world.ranks)}  # fmt: skip
        cut = {"tp": parameter.tp.dim, "ep": parameter.ep.dim, "cp": None}
        for axis in ("cp", "ep", "tp"):
            number = {"tp": 0, "ep": 1, "cp": 2}[axis]
            rest = sorted({(*key[:number], 0, *key[number + 1 :]) for key in at})
            size, dim = self.world.sizes[axis], cut[axis]
            is_sum = sums and dim is None and (axis in parameter.partial_over or axis == "ep")
            met = {}
            for key in rest:
                first, *others = (at[*key[:number], place, *key[number + 1 :]] for place in range(size))
                if dim is not None:
                    met[key] = torch.cat([first, *others], dim)
                else:
                    assert is_sum or all(torch.equal(first, other) for other in others), (parameter.name, axis)
                    met[key] = sum(others, start=first) if is_sum else first
            at = met
        return next(iter(at.values())).clone()

    def _put_back(self, gradients):
        """Each rank gets its parts of the sums."""
        for place, rank in enumerate(self.world.ranks):
            for parameter in self.parameters:
                part = gradients[parameter.name]
                for axis, dim in (("tp", parameter.tp.dim), ("ep", parameter.ep.dim)):
                    if dim is not None:
                        part = part.chunk(self.world.sizes[axis], dim)[rank.coords[axis]]
                for weight in self._of_rank(place, parameter.name):
                    weight.gradient.copy_(part)

    def _clipped(self, gradients):
        """One rank without cuts: the clip over the weights of all its stages."""
        assert len(self.world.ranks) == 1
        weights = {p.name: self._of_rank(0, p.name)[0] for p in self.parameters}
        run = self.plan.run
        dtype = getattr(torch, run.weight_dtype)
        clip = GradientClip(dict(enumerate(weights.values())), len(weights), run.clip_norm, dtype, CPU)
        clip.begin()
        clip.clip(weights)
        return {name: weight.gradient.clone() for name, weight in weights.items()}

    def _routers(self):
        """Statistics of routers, after loads are summed over the data ranks and biases have moved."""
        shown = {}
        for stages in zip(*self.stages, strict=True):
            loads = {name: {} for name in stages[0].balance.biases}
            for rank, stage in zip(self.world.ranks, stages, strict=True):
                if rank.coords["tp"] == 0:
                    for name, load in loads.items():
                        load[rank.coords["ep"], rank.coords["cp"]] = stage.balance.load(name)
            for stage in stages:
                for name, load in loads.items():
                    stage.balance.set_load(name, sum(load.values()))
                stage.balance.move_biases()
                shown |= stage.balance.values()
        return shown
