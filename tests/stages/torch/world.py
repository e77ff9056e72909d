"""All ranks of a mesh in one process, for tests: threads that take turns, and collectives in memory.

As in ``tests.stages.tensor_parallel`` only one rank runs at any time, until it waits for another.
"""

import itertools
import threading
from dataclasses import dataclass

import torch

WAIT_S = 60.0
AXES = ("tp", "ep", "cp")


@dataclass(frozen=True)
class Issued:
    """A collective as a rank issued it, in the words of the layers' description."""

    kind: str
    axis: str
    numel: int
    label: str
    reduction: str = "sum"


class RankCollectives:
    """What one rank's stages issue over all axes; ``issued`` lists it."""

    def __init__(self, world, coords):
        self._world, self.coords, self.issued = world, coords, []
        self._num_calls = dict.fromkeys(AXES, 0)

    def all_reduce(self, tensor, *, label, reduction="sum"):
        return self._combined(Issued("all_reduce", "tp", tensor.numel(), label, reduction), tensor)

    def all_gather(self, tensor, dim, *, label, axis="tp"):
        return torch.cat(self._meet(Issued("all_gather", axis, tensor.numel(), label), tensor), dim)

    def reduce_scatter(self, tensor, dim, *, label, axis="tp"):
        total = self._combined(Issued("reduce_scatter", axis, tensor.numel(), label), tensor)
        return total.chunk(self._world.sizes[axis], dim)[self.coords[axis]].contiguous()

    def all_gather_each(self, tensors, *, labels, axis):
        return [self.all_gather(each, 0, label=label, axis=axis) for each, label in zip(tensors, labels, strict=True)]

    def reduce_scatter_each(self, tensors, *, labels, axis):
        return [
            self.reduce_scatter(each, 0, label=label, axis=axis) for each, label in zip(tensors, labels, strict=True)
        ]

    def all_to_all(self, tensor, send, receive, *, label):
        issued = Issued("all_to_all", "ep", tensor.numel(), label)
        parts = [parts[self.coords["ep"]] for parts in self._meet(issued, tensor, list(send))]
        assert [len(part) for part in parts] == list(receive), label
        return torch.cat(parts)

    def announce(self, counts, sizes, use, *, label):
        used = use(self.all_to_all(counts, sizes, sizes, label=label))
        return lambda: used

    def _combined(self, issued, tensor):
        total, *others = self._meet(issued, tensor)
        for other in others:
            total = torch.maximum(total, other) if issued.reduction == "max" else total + other
        return total

    def _meet(self, issued, tensor, sizes=None):
        """Every member's tensor in order, once all have issued a like collective; split, where sizes are given."""
        assert tensor.is_contiguous(), f"{issued.label}: a transport would refuse a strided tensor"
        self.issued.append(issued)
        axis = issued.axis
        group = axis, *(self.coords[other] for other in AXES if other != axis), self._num_calls[axis]
        self._num_calls[axis] += 1
        given = tensor.detach().clone()
        return self._world.meet(group, self.coords[axis], issued, given if sizes is None else given.split(sizes))


class World:
    """Ranks at all places of a mesh with these sizes; ``run`` gives each a thread."""

    def __init__(self, **sizes):
        self.sizes = {axis: sizes.get(axis, 1) for axis in AXES}
        places = itertools.product(*(range(self.sizes[axis]) for axis in AXES))
        self.ranks = [RankCollectives(self, dict(zip(AXES, place, strict=True))) for place in places]
        self._turn = threading.Condition()
        self._met = {}
        self._failure = None

    def run(self, work):
        """``work(place)`` for each place in ``ranks``; the results in their order. Raises what failed first."""
        results = [None] * len(self.ranks)

        def on_rank(place):
            with self._turn:
                try:
                    results[place] = work(place)
                except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
                    self._failure = self._failure or error
                    self._turn.notify_all()

        threads = [threading.Thread(target=on_rank, args=(place,)) for place in range(len(self.ranks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure
        return results

    def meet(self, group, place, issued, given):
        met = self._met.setdefault(group, {})
        met[place] = issued, given
        self._turn.notify_all()
        size = self.sizes[group[0]]
        come = self._turn.wait_for(lambda: len(met) == size or self._failure is not None, timeout=WAIT_S)
        assert self._failure is None
        assert come, f"a rank waits alone in {issued}"
        assert len({(one.kind, one.label, one.reduction) for one, _ in met.values()}) == 1, met
        return [met[member][1] for member in range(size)]
