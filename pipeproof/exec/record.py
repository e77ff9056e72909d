"""``run --record``: writes what the ranks and the reference computed, step by step, as ``align`` reads it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pipeproof import __version__
from pipeproof.align.arrays import Array, md5_of, norm_of
from pipeproof.align.record import (
    DECIMALS,
    RECORD_FILE,
    Header,
    Index,
    OtherRecorded,
    Recorded,
    RecordedStep,
    Shard,
    values_file,
)
from pipeproof.comm.held import index_of
from pipeproof.comm.lowered import LoweredPlan
from pipeproof.exec.compare_routers import RouterResult
from pipeproof.exec.jobs import Loss, save_arrays
from pipeproof.exec.losses import main_loss, module_losses
from pipeproof.stages.describe.watch import BorderTensor


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """Where the records go (``run`` and ``reference`` below ``directory``), and whether with layers and values."""

    directory: Path
    layers: bool = False
    values: bool = False


@dataclass(frozen=True, slots=True)
class RankStep:
    """One rank's step: its shard of each gradient, and by key what crossed the borders of its layers."""

    gradients: Mapping[str, Array]
    layers: Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class ReferenceStep:
    """The reference's step, everything whole."""

    loss: Loss
    gradients: Mapping[str, Array]
    layers: Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class _Part:
    """What one rank holds of a whole."""

    index: Index
    array: Array


class Recorder:
    """Writes two records, of the ranks and of the reference, which name the same tensors alike.

    Raises:
        FileExistsError: a record is there already; nothing is written over.
    """

    def __init__(self, options: RecordOptions, plan: LoweredPlan, digest: str) -> None:
        self._plan, self._options = plan, options
        self._layers = list(plan.layer_by_name)
        self._cut_dim = plan.boundary.tp.dim
        run = plan.spec.run
        header = Header("run", __version__, digest, run.backend, run.dtype, run.steps, options.layers, options.values)
        self._run, self._reference = (
            _Writer(options.directory / one.who, one) for one in (header, replace(header, who="reference"))
        )

    def put(
        self,
        step: int,
        loss: Loss,
        ranks: Sequence[RankStep],
        reference: ReferenceStep,
        routers: RouterResult | None = None,
    ) -> None:
        """Write one finished step of both; ``ranks`` are all, in order of their numbers."""
        of_run, of_reference = ({}, {}) if routers is None else (routers.ours, routers.reference)
        ours: list[Recorded] = []
        theirs: list[Recorded] = []
        our_values: dict[str, Array] = {}
        their_values: dict[str, Array] = {}
        named = [*self._borders(step, ranks, reference), *self._gradients(step, ranks, reference)]
        for blank, parts, whole in named:
            if parts:
                ours.append(_recorded(blank, parts, assembled(parts), our_values))
            if whole is not None:
                pieces = {rank: _Part(part.index, whole[_slices(part.index)]) for rank, part in parts.items()}
                fitting = all(piece.array.shape == parts[rank].array.shape for rank, piece in pieces.items())
                theirs.append(_recorded(blank, pieces if fitting else {}, whole, their_values))
        self._run.put(_step(step, loss, ours, of_run), our_values if self._options.values else None)
        their_step = _step(step, reference.loss, theirs, of_reference)
        self._reference.put(their_step, their_values if self._options.values else None)

    def _borders(
        self, step: int, ranks: Sequence[RankStep], reference: ReferenceStep
    ) -> Iterable[tuple[Recorded, dict[int, _Part], Array | None]]:
        seen = [*(one.layers for one in ranks), reference.layers]
        names = {key: BorderTensor.parse(key) for layers in seen for key in layers}
        for key in sorted(names, key=lambda key: self._place(names[key])):
            name = names[key]
            parts = {
                rank: _Part(self._border_index(rank, name, one.layers[key]), one.layers[key])
                for rank, one in enumerate(ranks)
                if key in one.layers
            }
            blank = Recorded(
                step, name.layer, (), "", "", 0.0, (), name.direction, name.side, name.micro_batch, name.piece
            )
            yield blank, parts, reference.layers.get(key)

    def _gradients(
        self, step: int, ranks: Sequence[RankStep], reference: ReferenceStep
    ) -> Iterable[tuple[Recorded, dict[int, _Part], Array | None]]:
        for layer in reversed(self._layers):
            for parameter in reversed(self._plan.layer_by_name[layer].parameters):
                parts = {
                    rank: _Part(index_of(self._plan, parameter, rank), one.gradients[parameter.name])
                    for rank, one in enumerate(ranks)
                    if parameter.name in one.gradients
                }
                blank = Recorded(step, layer, (), "", "", 0.0, (), parameter=parameter.name)
                yield blank, parts, reference.gradients.get(parameter.name)

    def _place(self, name: BorderTensor) -> tuple[int, bool, int, int, bool]:
        """Where a tensor stands in the order of one process that runs micro-batches one by one."""
        layer, backward = self._layers.index(name.layer), name.direction == "backward"
        sign = -1 if backward else 1
        return (name.micro_batch, backward, sign * name.piece, sign * layer, name.side == "output")

    def _border_index(self, rank: int, name: BorderTensor, array: Array) -> Index:
        """The range of the whole that a rank holds: tokens are cut with sequence parallelism, losses never are."""
        place, num_tp = self._plan.mesh.coords(rank)["tp"], self._plan.mesh.size("tp")
        is_loss = (name.layer, name.direction, name.side) == (self._layers[-1], "forward", "output")
        cut = self._cut_dim if num_tp > 1 and not is_loss else None
        return tuple(
            (place * size, (place + 1) * size) if dim == cut else (0, size) for dim, size in enumerate(array.shape)
        )


def assembled(parts: Mapping[int, _Part]) -> Array:
    """The whole from the parts that ranks hold; where several hold one part, it is that of the lowest rank."""
    some = next(iter(parts.values()))
    shape = [max(part.index[dim][1] for part in parts.values()) for dim in range(some.array.ndim)]
    whole = np.zeros(shape, dtype=some.array.dtype)
    for _, part in sorted(parts.items(), reverse=True):
        whole[_slices(part.index)] = part.array
    return whole


def _slices(index: Index) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in index)


def _recorded(blank: Recorded, parts: Mapping[int, _Part], whole: Array, values: dict[str, Array]) -> Recorded:
    """The line of a tensor; its values are added to ``values``, and those of ranks that hold other ones."""
    shards = []
    values[blank.key] = whole
    for rank, part in sorted(parts.items()):
        shards.append(Shard(rank, md5_of(part.array), part.index))
        if shards[-1].md5 != md5_of(whole[_slices(part.index)]):
            values[f"{blank.key}@{rank}"] = part.array
    return replace(
        blank,
        shape=tuple(whole.shape),
        dtype=whole.dtype.name,
        md5=md5_of(whole),
        norm=norm_of(whole),
        shards=tuple(shards),
    )


def _step(step: int, loss: Loss, tensors: Sequence[Recorded], others: Mapping[str, Array]) -> RecordedStep:
    main = main_loss(loss)
    beside = {name: np.asarray(one) for name, one in module_losses(loss).items()} | dict(others)
    return RecordedStep(
        step,
        f"{float(main):.{DECIMALS}f}",
        md5_of(np.asarray(main)),
        tuple(tensors),
        tuple(
            OtherRecorded(name, None if array.ndim else f"{float(array):.{DECIMALS}f}", md5_of(array))
            for name, array in beside.items()
        ),
    )


class _Writer:
    """One record on disk. A step's values are there before its lines, and its lines come in one write."""

    def __init__(self, directory: Path, header: Header) -> None:
        self._directory = directory
        values_file(directory, 0).parent.mkdir(parents=True) if header.values else directory.mkdir(parents=True)
        self._file = directory / RECORD_FILE
        self._append(header.to_line())

    def put(self, step: RecordedStep, values: Mapping[str, Array] | None) -> None:
        """Add a finished step."""
        if values is not None:
            save_arrays(values_file(self._directory, step.step), values)
        self._append(step.lines())

    def _append(self, lines: str) -> None:
        with self._file.open("ab", buffering=0) as stream:
            rest = memoryview(lines.encode())
            while rest:
                rest = rest[os.write(stream.fileno(), rest) :]
