"""Description of the stages of a pipeline: each runs once on the example, after the one before it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from pipeproof.exec.store.agreement import Agreement, described_in_order
from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.plan_layers import Cut, LayerFacts, StageFacts, stage_name
from pipeproof.exec.train.stage_boundaries import Boundaries, Form, LeafSpec, form_of, kind_text, specs_of
from pipeproof.exec.train.stage_edges import StageEdges
from pipeproof.exec.train.torch.block_layers import CutLayers, described_layers, layers_of
from pipeproof.exec.train.torch.boundary_inference import StageRun, meta_leaves, run_stage
from pipeproof.exec.train.torch.data_parallel import Replicas
from pipeproof.exec.train.torch.stage_keywords import StepInputs
from pipeproof.exec.train.torch.step_inputs import StepContract
from pipeproof.foreign_text import decode_json


@dataclass(frozen=True, slots=True)
class Examples:
    """The distinct examples of a step: arguments of the first stage, and keyword arguments by stage.

    ``by_micro_batch`` is empty if all micro-batches have one example. ``lengths`` are the sequence lengths of the
    distinct examples, empty for one: a stage runs once for each, and a dim of its output either is the same in all runs
    or is the sequence length (``s`` in a plan). ``rows`` is the rows of a micro-batch; None without arguments of the
    first stage.
    """

    distinct: tuple[tuple[tuple[Any, ...], Mapping[int, Mapping[str, Any]]], ...]
    rows: int | None = None
    by_micro_batch: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()

    @property
    def seq_lengths(self) -> list[int] | None:
        """The plan's ``schedule.seq_lengths``."""
        return [self.lengths[index] for index in self.by_micro_batch] or None


def examples_of(contract: StepContract, inputs: StepInputs, num_micro_batches: int, num_stages: int) -> Examples:
    """The examples of a step that may have values by micro-batch.

    Raises:
        PipelineError: the rules refuse an argument, or no dim is the sequence length.
    """
    if not isinstance(inputs.args, tuple | list):
        raise PipelineError(
            f"`example` is {kind_text(inputs.args)}: give a tuple of positional arguments, such as (x,)"
        )
    data, rows = contract.example_data(inputs, num_micro_batches, num_stages)
    number: dict[str, int] = {}
    distinct: list[tuple[tuple[Any, ...], dict[int, Mapping[str, Any]]]] = []
    order: list[int] = []
    for index, args in enumerate(data.args):
        kwargs = {stage: named[index] for stage, named in data.kwargs.items()}
        key = str([_shape(leaf) for leaf in tree_leaves((args, kwargs))])
        if key not in number:
            number[key] = len(distinct)
            distinct.append((args, kwargs))
        order.append(number[key])
    if len(distinct) == 1:
        return Examples(tuple(distinct), rows)
    return Examples(tuple(distinct), rows, tuple(order), _lengths(distinct))


def varied_sizes(views: Sequence[Mapping[str, Sequence[str]]]) -> tuple[int, ...]:
    """The sequence lengths of views of micro-batches, see ``signatures.View``.

    Raises:
        PipelineError: no dim has another size in each view.
    """
    shapes = [[_sizes_in(leaf) for leaves in view.values() for leaf in leaves] for view in views]
    lengths = _differing(shapes)
    if lengths is None:
        raise PipelineError.reported("the micro-batches of the step differ, but no dim of a tensor has another size in "
                                     "each of them")  # fmt: skip
    return lengths


def _sizes_in(leaf: str) -> list[int]:
    return decode_json(leaf[leaf.index("[") :]) if leaf.endswith("]") else []


def plan_entries(
    outputs: Sequence[Sequence[LeafSpec]], num_rows: int, lengths: Sequence[int], number: int
) -> list[dict[str, Any]]:
    """The plan's ``out`` of stage ``number``, by its outputs for each of the ``lengths``.

    Raises:
        PipelineError: a dim differs and is not the sequence length, or something other than a size differs.
    """
    entries = []
    for position, specs in enumerate(zip(*outputs, strict=True)):
        entry = specs[0].plan_entry(num_rows)
        if len({(len(spec.shape), spec.dtype, spec.has_gradient) for spec in specs}) > 1:
            raise PipelineError(
                f"output {position} of stage {number} is {', '.join(map(str, specs))} in micro-batches of sequence "
                f"lengths {list(lengths)}: only sizes may differ"
            )
        for dim, sizes in enumerate(zip(*(spec.shape for spec in specs), strict=True)):
            if len(set(sizes)) > 1:
                if list(sizes) != list(lengths):
                    raise PipelineError(
                        f"output {position} of stage {number} has the sizes {list(sizes)} in dim {dim}, and the "
                        f"sequence lengths are {list(lengths)}: only a dim of that size may differ"
                    )
                entry["shape"][dim] = "s"
        entries.append(entry)
    return entries


def _shape(leaf: Any) -> str:
    """The part of a value that may decide the shapes of an output: numbers may, and texts may not."""
    if isinstance(leaf, torch.Tensor):
        return f"{leaf.dtype}{list(leaf.shape)}"
    return "str" if isinstance(leaf, str) else repr(leaf)


def _lengths(distinct: Sequence[Any]) -> tuple[int, ...]:
    """The sizes of the first dim that differs between the examples."""
    lengths = _differing([[x.shape for x in tree_leaves(one) if isinstance(x, torch.Tensor)] for one in distinct])
    if lengths is None:
        raise PipelineError(
            "the micro-batches of the example differ, but no dim of a tensor has another size in each of them"
        )
    return lengths


def _differing(shapes: Sequence[Sequence[Sequence[int]]]) -> tuple[int, ...] | None:
    """The sizes of the first dim that differs between the tensors of all variants."""
    for tensors in zip(*shapes, strict=True):
        for sizes in zip(*tensors, strict=False):
            if len(set(sizes)) == len(shapes):
                return tuple(sizes)
    return None


@dataclass(frozen=True)
class StageDescriber:
    """Describes the stages of one rank, ``replicas`` by their numbers, and collects the descriptions of all ranks.

    ``splits`` is True if backwards may run in parts. ``layers`` are the names of each stage's layers; with
    ``is_planned`` the plan has them, else a stage becomes one layer where the outputs of its layers are not seen.
    ``frozen`` are the stages of frozen modules.
    """

    agreement: Agreement
    rank: int
    num_stages: int
    replicas: Mapping[int, Replicas]
    device: torch.device
    splits: bool
    contract: StepContract
    layers: Cut
    is_planned: bool
    edges: StageEdges
    frozen: Collection[int] = ()

    def describe(
        self,
        example: StepInputs,
        placed: Sequence[Sequence[int]],
        num_micro_batches: int,
    ) -> tuple[list[StageFacts], dict[int, Boundaries], int, Examples]:
        """Facts and boundaries of all stages, the rows of a micro-batch, and the examples."""
        examples = self.agreement.own(
            "example", lambda: examples_of(self.contract, example, num_micro_batches, self.num_stages)
        )
        return *self.describe_examples(examples, placed, "boundaries"), examples

    def describe_examples(
        self, examples: Examples, placed: Sequence[Sequence[int]], phase: str
    ) -> tuple[list[StageFacts], dict[int, Boundaries], int]:
        """Facts of all stages, boundaries of this rank's, and the rows of a micro-batch.

        Each stage runs on its first rank, which publishes its boundary for the next one in the store. ``examples`` need
        the positional arguments where the first stage is, and the keyword arguments of this rank's stages. ``phase``
        must be different in each call.
        """
        homes = {number: next(r for r, own in enumerate(placed) if number in own) for number in range(self.num_stages)}
        own = [number for number in range(self.num_stages) if homes[number] == self.rank]
        entries = described_in_order(
            self.agreement, own, lambda number, before: self._facts(number, before, examples), phase
        )
        num_rows = entries[0]["rows"]
        forms = {n: form_of(e) for n, e in entries.items()}
        specs = {n: [specs_of(out) for out in e["out"]] for n, e in entries.items()}
        facts = [
            StageFacts(*_described(n, e, specs[n], num_rows, examples.lengths, self.edges)) for n, e in entries.items()
        ]
        unused = _unused_outputs(entries)
        boundaries = {
            n: Boundaries(
                self.edges.input_form(n, forms[n - 1], len(specs[n - 1][0])) if n else None, forms[n], specs[n][0],
                tuple(specs[n][variant] for variant in examples.by_micro_batch), unused[n],
                len(self.edges.direct(n, makes=False)),
            )
            for n in entries
        }  # fmt: skip
        return facts, boundaries, num_rows

    def _facts(self, number: int, before: Mapping[str, Any], examples: Examples) -> dict[str, Any]:
        module = self.replicas[number].call()
        layers = None if self.layers[number] == [stage_name(number)] else layers_of(module)
        is_last = number == self.num_stages - 1
        entry: dict[str, Any] = {"form": ["tensor", []], "rows": before.get("rows"), "uses": None}
        runs = self._runs(number, before, examples, layers)
        run = runs[0]
        self.replicas[number].reshard()
        if not number:
            if examples.rows is None:
                raise PipelineError("the example needs a tensor whose first dim is the rows of a micro-batch")
            entry["rows"] = examples.rows
        if run.recomputes_reentrantly and self.splits:
            raise PipelineError(
                f"stage {number} uses activation checkpointing with use_reentrant=True, whose backward cannot be "
                "split: pass use_reentrant=False, or use split='whole'"
            )
        entry["layers"] = self._seen_layers(number, layers, runs, entry["rows"], examples.lengths)
        is_trained = any(stage not in self.frozen for stage in range(number + 1))
        entry["out"] = [
            [[list(spec.shape), spec.dtype, spec.has_gradient and is_trained] for spec in each.leaves] for each in runs
        ]
        entry["num_direct"], entry["direct"] = self._direct(number, before, entry["out"])
        if number:
            form, leaves = self._input(number, before, 0)
            entry["uses"] = _uses(runs, len(leaves), form.keys)
            self._require_used(number, entry["uses"], leaves)
        if any(each.form != run.form for each in runs):
            raise PipelineError(f"stage {number} returns another structure for another length of the sequences")
        if not is_last:
            if is_trained and not any(spec.has_gradient for spec in run.leaves):
                raise PipelineError(f"no output of stage {number} has a gradient, so no stage before it would learn")
            entry["form"] = [run.form.kind, list(run.form.keys)]
        return entry

    def _runs(
        self, number: int, before: Mapping[str, Any], examples: Examples, layers: CutLayers | None
    ) -> list[StageRun]:
        """The runs of a stage on each of the examples."""
        module, is_last = self.replicas[number].call(), number == self.num_stages - 1
        runs = []
        for variant, (args, by_stage) in enumerate(examples.distinct):
            kwargs = dict(by_stage.get(number, {}))
            if number:
                form, specs = self._input(number, before, variant)
                leaves = meta_leaves(specs)
                args, named = form.arguments(leaves)
                names = self.contract.keywords.bound(number, form, len(leaves))
                kwargs = {name: value for name, value in kwargs.items() if name not in names} | named
            runs.append(run_stage(number, module, args, kwargs, self.device, is_last=is_last, layers=layers))
        return runs

    def _direct(
        self, number: int, before: Mapping[str, Any], out: Sequence[Sequence[Any]]
    ) -> tuple[int, dict[str, list[Any]]]:
        """The number of direct edges that a stage makes, and the tensors of all up to it, by name and example."""
        made = self.edges.direct(number, makes=True)
        tensors = zip(*([*each[len(each) - len(made) :]] for each in out), strict=True)
        return len(made), {**before.get("direct", {}), **dict(zip(made, map(list, tensors), strict=True))}

    def _input(self, number: int, before: Mapping[str, Any], variant: int) -> tuple[Form, tuple[LeafSpec, ...]]:
        """The structure and the tensors of a stage's input, after the stage before it."""
        out, used = before["out"][variant], self.edges.direct(number, makes=False)
        crossing = out[: len(out) - before["num_direct"]]
        form = self.edges.input_form(number, form_of(before), len(out))
        return form, specs_of([*crossing, *(before["direct"][name][variant] for name in used)])

    def _require_used(self, number: int, uses: Sequence[Sequence[int]] | None, leaves: Sequence[LeafSpec]) -> None:
        """Refuse a stage that does not use a direct edge, to whose producer it owes a gradient."""
        names = self.edges.direct(number, makes=False)
        for position, name in enumerate(names, len(leaves) - len(names)):
            if uses is not None and leaves[position].has_gradient and not any(position in used for used in uses):
                raise PipelineError(
                    f"no gradient of stage {number} reaches the edge {name!r}: leave it out of its consumers"
                )

    def _seen_layers(
        self, number: int, layers: CutLayers | None, runs: Sequence[StageRun], num_rows: int, lengths: Sequence[int]
    ) -> list[dict[str, Any]]:
        """The layers of a stage with their outputs, except the last layer's, and the bytes that each keeps."""
        inner = _inner_entries(runs, num_rows, lengths, number)
        if inner is None and not self.is_planned:
            layers = None
        is_frozen = number in self.frozen
        entries = described_layers(number, self.replicas[number].call(), layers, is_frozen=is_frozen)
        for layer, outputs in zip(entries, inner or (), strict=False):
            layer["outputs"] = outputs
        kept = max((run.kept for run in runs if run.kept is not None), key=sum, default=())
        for layer, num_bytes in zip(entries, kept if layers is not None else [sum(kept)] * len(kept[:1]), strict=False):
            layer["activation_bytes"] = num_bytes
        return entries


def _described(
    number: int, entry: Mapping[str, Any], outputs: Sequence[Sequence[LeafSpec]], num_rows: int,
    lengths: Sequence[int], edges: StageEdges,
) -> tuple[tuple[LayerFacts, ...], dict[str, dict[str, Any]]]:  # fmt: skip
    """The layers of a stage as its rank has described them, and the edges that it makes.

    The last layer has the ``outputs`` of the stage, without the edges, which are the last ones.
    """
    *inner, last = entry["layers"]
    every = plan_entries(outputs, num_rows, lengths, number)
    leaving = edges.leaving(number)
    own = every[: len(every) - len(leaving)]
    made = {name: out for name, out in zip(leaving, every[len(own) :], strict=True) if edges.edges[name][0] == number}
    return tuple(LayerFacts(**layer) for layer in [*inner, {**last, "outputs": own}]), made


def _inner_entries(
    runs: Sequence[StageRun], num_rows: int, lengths: Sequence[int], number: int
) -> list[list[dict[str, Any]]] | None:
    """The plan's ``out`` of all layers of a stage but the last; None if one was not seen, or cannot be in a plan."""
    seen = [run.inner for run in runs if run.inner is not None]
    if len(seen) < len(runs):
        return None
    try:
        return [plan_entries(outputs, num_rows, lengths, number) for outputs in zip(*seen, strict=True)]
    except (PipelineError, ValueError):  # an output that varies otherwise than by the length
        return None


def _uses(runs: Sequence[StageRun], num_inputs: int, keys: Sequence[str]) -> list[list[int]] | None:
    """The inputs that the gradient of each output reaches, by position in the output of the stage before.

    None if not seen. ``keys`` are the keys of a dict that the stage before returns.
    """
    seen = [each.uses for each in runs if each.uses is not None]
    if len(seen) < len(runs):
        return None
    positions: dict[int | str, int] = dict(zip(keys or range(num_inputs), range(num_inputs), strict=True))
    every = (frozenset[int | str]().union(*uses) for uses in zip(*seen, strict=True))
    return [sorted(positions[x] for x in used if x in positions) for used in every]


def _unused_outputs(entries: Mapping[int, Mapping[str, Any]]) -> dict[int, tuple[int, ...]]:
    """Outputs of each stage that get no gradient, because no later stage computes a value with a gradient from them."""
    unused: dict[int, tuple[int, ...]] = {len(entries) - 1: ()}
    for number in reversed(range(1, len(entries))):
        before, uses = entries[number - 1], entries[number]["uses"]
        num_outputs = len(before["out"][0]) - before["num_direct"]
        is_used = set(range(num_outputs))
        if uses is not None:
            is_used = {position for n, used in enumerate(uses) if n not in unused[number] for position in used}
        unused[number - 1] = tuple(position for position in range(num_outputs) if position not in is_used)
    return unused
