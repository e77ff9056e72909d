"""All ranks of a mesh in one process, for tests: stages in threads that alternate, and collectives in memory."""

import itertools
import math
from dataclasses import dataclass

from tests.rank_threads import RankThreads

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
    """Operations of one rank's stages over all axes; ``issued`` lists them."""

    def __init__(self, world, coords):
        self._world, self.coords, self.issued = world, coords, []
        self._num_calls = dict.fromkeys(AXES, 0)

    def all_reduce(self, tensor, *, label, reduction="sum"):
        return self._combined(Issued("all_reduce", "tp", math.prod(tensor.shape), label, reduction), tensor)

    def all_gather(self, tensor, dim, *, label, axis="tp"):
        issued = Issued("all_gather", axis, math.prod(tensor.shape), label)
        return self._world.library.concat(self._meet(issued, tensor), dim)

    def reduce_scatter(self, tensor, dim, *, label, axis="tp"):
        total = self._combined(Issued("reduce_scatter", axis, math.prod(tensor.shape), label), tensor)
        return self._world.library.chunk(total, self._world.sizes[axis], dim)[self.coords[axis]].contiguous()

    def all_gather_each(self, tensors, *, labels, axis):
        return [self.all_gather(each, 0, label=label, axis=axis) for each, label in zip(tensors, labels, strict=True)]

    def reduce_scatter_each(self, tensors, *, labels, axis):
        return [
            self.reduce_scatter(each, 0, label=label, axis=axis) for each, label in zip(tensors, labels, strict=True)
        ]

    def all_to_all(self, tensor, send, receive, *, label):
        issued, ends = Issued("all_to_all", "ep", math.prod(tensor.shape), label), [0, *itertools.accumulate(send)]
        place = self.coords["ep"]
        parts = [rows[ends[place] : ends[place + 1]] for rows, ends in self._meet(issued, tensor, ends)]
        assert [len(part) for part in parts] == list(receive), label
        return self._world.library.concat(parts)

    def announce(self, counts, sizes, use, *, label):
        used = use(self.all_to_all(counts, sizes, sizes, label=label))
        return lambda: used

    def _combined(self, issued, tensor):
        total, *others = self._meet(issued, tensor)
        for other in others:
            total = self._world.library.maximum(total, other) if issued.reduction == "max" else total + other
        return total

    def _meet(self, issued, tensor, ends=None):
        """Every member's tensor in order, once all have issued a like collective; with its ``ends``, where given."""
        assert tensor.is_contiguous(), f"{issued.label}: a transport would refuse a strided tensor"
        self.issued.append(issued)
        axis = issued.axis
        group = axis, *(self.coords[other] for other in AXES if other != axis), self._num_calls[axis]
        self._num_calls[axis] += 1
        given = tensor.detach().clone()
        return self._world.meet(group, self.coords[axis], issued, given if ends is None else (given, ends))


class World:
    """Ranks at all places of a mesh with these sizes; ``library`` is the framework's module."""

    def __init__(self, library, **sizes):
        self.library, self.sizes = library, {axis: sizes.get(axis, 1) for axis in AXES}
        places = itertools.product(*(range(self.sizes[axis]) for axis in AXES))
        self.ranks = [RankCollectives(self, dict(zip(AXES, place, strict=True))) for place in places]
        self._threads = RankThreads()
        self._met = {}

    def run(self, work):
        """``work(place)`` for each place in ``ranks``; the results in their order. Raises the first error."""
        return self._threads.run(work, len(self.ranks))

    def meet(self, group, place, issued, given):
        met = self._met.setdefault(group, {})
        met[place] = issued, given
        self._threads.turn.notify_all()
        size = self.sizes[group[0]]
        self._threads.wait_for(lambda: len(met) == size, issued)
        calls = {(one.kind, one.label, one.reduction) for one, _ in met.values()}
        assert len(calls) == 1, f"ranks issued different collectives: {calls}"
        return [met[member][1] for member in range(size)]
