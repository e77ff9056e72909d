"""``run --record``: records of the ranks and of the reference, step by step, in the format of ``state align``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pipeproof.analysis.align.array_digests import Array, md5_of, norm_of
from pipeproof.analysis.align.record_format import (
    DECIMALS,
    RECORD_FILE,
    Header,
    Index,
    OtherRecorded,
    Recorded,
    RecordedStep,
    Shard,
    rank_file,
    rank_values_file,
    values_file,
)
from pipeproof.comm.op_graph import LoweredPlan, index_of
from pipeproof.exec.compare.compare_gradients import RouterResult
from pipeproof.exec.compare.step_losses import main_loss, module_losses
from pipeproof.exec.rank.job_files import Loss, RecordOptions, save_arrays
from pipeproof.stages.describe.layer_records import RecordedTensor
from pipeproof.version import __version__


@dataclass(frozen=True, slots=True)
class RankStep:
    """One rank's step: its shard of each gradient, and by key the tensors between its layers."""

    gradients: Mapping[str, Array]
    layers: Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class ReferenceStep:
    """The reference's step, with whole tensors."""

    loss: Loss
    gradients: Mapping[str, Array]
    layers: Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class _RankPart:
    """Part of a whole tensor that one rank has."""

    index: Index
    array: Array


class Recorder:
    """Writer of two records, of the ranks and of the reference, with the same tensor names.

    Raises:
        FileExistsError: a record exists already; it is not overwritten.
    """

    def __init__(self, options: RecordOptions, plan: LoweredPlan, digest: str) -> None:
        self._plan, self._options = plan, options
        self._layers = list(plan.layer_by_name)
        self._tp_dim = plan.boundary.tp.dim
        run = plan.spec.run
        header = Header("run", __version__, digest, run.backend, run.dtype, run.steps, options.layers, options.values)
        self._run, self._reference = (
            RecordWriter(options.directory / head.who, head) for head in (header, replace(header, who="reference"))
        )

    def put(
        self,
        step: int,
        loss: Loss,
        ranks: Sequence[RankStep],
        reference: ReferenceStep,
        routers: RouterResult | None = None,
    ) -> None:
        """Write one finished step of both; ``ranks`` are all ranks in order."""
        run_routers, reference_routers = ({}, {}) if routers is None else (routers.of_run, routers.reference)
        of_run: list[Recorded] = []
        of_reference: list[Recorded] = []
        run_values: dict[str, Array] = {}
        reference_values: dict[str, Array] = {}
        tensors = [*self._layer_tensors(step, ranks, reference), *self._gradients(step, ranks, reference)]
        for blank, parts, whole in tensors:
            if parts:
                of_run.append(_recorded(blank, parts, assembled(parts), run_values))
            if whole is not None:
                same = {rank: _RankPart(part.index, whole[_slices(part.index)]) for rank, part in parts.items()}
                fits = all(part.array.shape == parts[rank].array.shape for rank, part in same.items())
                of_reference.append(_recorded(blank, same if fits else {}, whole, reference_values))
        self._run.put(_step(step, loss, of_run, run_routers), run_values if self._options.values else None)
        reference_step = _step(step, reference.loss, of_reference, reference_routers)
        self._reference.put(reference_step, reference_values if self._options.values else None)

    def _layer_tensors(
        self, step: int, ranks: Sequence[RankStep], reference: ReferenceStep
    ) -> Iterable[tuple[Recorded, dict[int, _RankPart], Array | None]]:
        recorded = [*(of_rank.layers for of_rank in ranks), reference.layers]
        names = {key: RecordedTensor.parse(key) for layers in recorded for key in layers}
        for key in sorted(names, key=lambda key: self._order(names[key])):
            name = names[key]
            parts = {
                rank: _RankPart(self._layer_index(rank, name, of_rank.layers[key]), of_rank.layers[key])
                for rank, of_rank in enumerate(ranks)
                if key in of_rank.layers
            }
            blank = Recorded(
                step, name.layer, (), "", "", 0.0, (), name.direction, name.side, name.micro_batch, name.split
            )
            yield blank, parts, reference.layers.get(key)

    def _gradients(
        self, step: int, ranks: Sequence[RankStep], reference: ReferenceStep
    ) -> Iterable[tuple[Recorded, dict[int, _RankPart], Array | None]]:
        for layer in reversed(self._layers):
            for parameter in reversed(self._plan.layer_by_name[layer].parameters):
                parts = {
                    rank: _RankPart(index_of(self._plan, parameter, rank), of_rank.gradients[parameter.name])
                    for rank, of_rank in enumerate(ranks)
                    if parameter.name in of_rank.gradients
                }
                blank = Recorded(step, layer, (), "", "", 0.0, (), parameter=parameter.name)
                yield blank, parts, reference.gradients.get(parameter.name)

    def _order(self, name: RecordedTensor) -> tuple[int, bool, int, int, bool]:
        """Sort key of a tensor: the order of one process that runs micro-batches one by one."""
        layer, backward = self._layers.index(name.layer), name.direction == "backward"
        sign = -1 if backward else 1
        return (name.micro_batch, backward, sign * name.split, sign * layer, name.side == "output")

    def _layer_index(self, rank: int, name: RecordedTensor, array: Array) -> Index:
        """A rank's range of the whole tensor: tokens are sharded with sequence parallelism, losses never are."""
        tp_rank, num_tp = self._plan.mesh.coords(rank)["tp"], self._plan.mesh.size("tp")
        is_loss = (name.layer, name.direction, name.side) == (self._layers[-1], "forward", "output")
        sharded = self._tp_dim if num_tp > 1 and not is_loss else None
        return tuple(
            (tp_rank * size, (tp_rank + 1) * size) if dim == sharded else (0, size)
            for dim, size in enumerate(array.shape)
        )


def assembled(parts: Mapping[int, _RankPart]) -> Array:
    """Assemble the parts of all ranks; if several ranks have the same part, the lowest rank's is taken."""
    first = next(iter(parts.values()))
    shape = [max(part.index[dim][1] for part in parts.values()) for dim in range(first.array.ndim)]
    whole = np.zeros(shape, dtype=first.array.dtype)
    for _, part in sorted(parts.items(), reverse=True):
        whole[_slices(part.index)] = part.array
    return whole


def _slices(index: Index) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in index)


def _recorded(blank: Recorded, parts: Mapping[int, _RankPart], whole: Array, values: dict[str, Array]) -> Recorded:
    """Return the line of a tensor; add its values to ``values``, and the values of ranks with different bits."""
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
    losses = {name: np.asarray(value) for name, value in module_losses(loss).items()} | dict(others)
    return RecordedStep(
        step,
        f"{float(main):.{DECIMALS}f}",
        md5_of(np.asarray(main)),
        tuple(tensors),
        tuple(
            OtherRecorded(name, None if array.ndim else f"{float(array):.{DECIMALS}f}", md5_of(array))
            for name, array in losses.items()
        ),
    )


class RecordWriter:
    """One record on disk, of all ranks or of one. A step's values are written first, then all its lines in one write.

    Raises:
        FileExistsError: there is such a record already.
    """

    def __init__(self, directory: Path, header: Header, rank: int | None = None) -> None:
        self._directory, self._rank = directory, rank
        is_alone = rank is None
        directory.mkdir(parents=True, exist_ok=not is_alone)
        if header.values:
            values_file(directory, 0).parent.mkdir(exist_ok=not is_alone)
        self._file = directory / (RECORD_FILE if rank is None else rank_file(rank))
        self._file.touch(exist_ok=False)
        self._append(header.to_line())

    def put(self, step: RecordedStep, values: Mapping[str, Array] | None) -> None:
        """Write a finished step."""
        if values is not None:
            of_all = values_file(self._directory, step.step)
            save_arrays(
                of_all if self._rank is None else rank_values_file(self._directory, self._rank, step.step), values
            )
        self._append(step.lines())

    def _append(self, lines: str) -> None:
        with self._file.open("ab", buffering=0) as stream:
            rest = memoryview(lines.encode())
            while rest:
                rest = rest[os.write(stream.fileno(), rest) :]
