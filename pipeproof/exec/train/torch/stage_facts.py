"""Description of the stages of a pipeline: each runs once on the example, after the one before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from time import perf_counter_ns
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from pipeproof.exec.store.agreement import Agreement, described_in_order
from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.module_plan import StageFacts
from pipeproof.exec.train.stage_boundaries import Boundaries, form_of, specs_of
from pipeproof.exec.train.torch.boundary_inference import StageRun, meta_leaves, real_tensor, run_stage, unchanged_state
from pipeproof.exec.train.torch.data_parallel import Replicas
from pipeproof.exec.train.torch.module_stage import trained, without_autocast
from pipeproof.exec.train.torch.split_linear import gradients_aside
from pipeproof.exec.train.torch.stage_keywords import StepInputs
from pipeproof.exec.train.torch.step_inputs import StepContract
from pipeproof.exec.train.torch.varied_lengths import (
    Examples,
    declared_examples,
    examples_of,
    plan_entries,
)

_WARM_UPS, _ROUNDS = 2, 5


def time_stage(
    number: int, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
) -> tuple[float, float]:
    """Median microseconds of a stage's forward and of its whole backward, for one micro-batch.

    Tensors without values become zeros. Gradients, buffers and the random state are put back. The loss function is not
    included: the output's gradient is one everywhere.

    Raises:
        PipelineError: the module raises.
    """
    try:
        with gradients_aside([*module.parameters()]), unchanged_state([module], device), torch.enable_grad():
            times = [_time_once(module, args, kwargs, device) for _ in range(_WARM_UPS + _ROUNDS)]
    except Exception as error:
        raise PipelineError(f"stage {number} fails while it is timed: {type(error).__name__}: {error}") from error
    forward, backward = zip(*times[_WARM_UPS:], strict=True)
    return round(median(forward) / 1e3, 3), round(median(backward) / 1e3, 3)


def _time_once(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
) -> tuple[int, int]:
    """Nanoseconds of one forward and its backward."""
    run_args, run_kwargs = tree_map_only(
        torch.Tensor, lambda tensor: real_tensor(tensor, device), (tuple(args), dict(kwargs))
    )
    start = _now(device)
    value = module(*run_args, **run_kwargs)
    middle = _now(device)
    roots = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    gradients = [torch.ones_like(root) for root in roots]
    before_backward = _now(device)
    if roots:
        with without_autocast(device.type):
            torch.autograd.backward(roots, gradients)
    return middle - start, _now(device) - before_backward


def _now(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter_ns()


@dataclass(frozen=True)
class StageDescriber:
    """Describes the stages of one rank, ``replicas`` by their numbers, and collects the descriptions of all ranks.

    ``splits`` is True if backwards may run in parts. With ``profile`` each stage is timed, too.
    """

    agreement: Agreement
    rank: int
    num_stages: int
    replicas: Mapping[int, Replicas]
    device: torch.device
    splits: bool
    profile: bool
    contract: StepContract

    def describe(
        self,
        example: StepInputs | None,
        placed: Sequence[Sequence[int]],
        skeleton: Mapping[str, Any],
    ) -> tuple[list[StageFacts], dict[int, Boundaries], int, Examples]:
        """Facts and boundaries of all stages, the rows of a micro-batch, and the examples."""
        schedule = skeleton["schedule"]

        def given_examples() -> Examples | None:
            if example is None:
                return None
            return examples_of(self.contract, example, schedule["num_micro_batches"], self.num_stages)

        examples = self.agreement.own("example", given_examples) or declared_examples(schedule.get("seq_lengths"))
        return *self.describe_examples(examples, placed, skeleton, "boundaries"), examples

    def describe_examples(
        self, examples: Examples, placed: Sequence[Sequence[int]], skeleton: Mapping[str, Any], phase: str
    ) -> tuple[list[StageFacts], dict[int, Boundaries], int]:
        """Facts of all stages, boundaries of this rank's, and the rows of a micro-batch.

        Each stage runs on its first rank, which publishes its boundary for the next one in the store. ``examples`` need
        the positional arguments where the first stage is, and the keyword arguments of this rank's stages. ``phase`` is
        another one in each call.
        """
        homes = {number: next(r for r, own in enumerate(placed) if number in own) for number in range(self.num_stages)}
        own = [number for number in range(self.num_stages) if homes[number] == self.rank]
        entries = described_in_order(
            self.agreement, own, lambda number, before: self._facts(number, before, examples, skeleton), phase
        )
        num_rows = entries[0]["rows"]
        forms = {n: form_of(e) for n, e in entries.items()}
        specs = {n: [specs_of(out) for out in e["out"]] for n, e in entries.items()}
        facts = [
            StageFacts(
                e["kind"],
                e["parameters"],
                plan_entries(specs[n], num_rows, examples.lengths, n),
                e["kept"],
                *e["times"],
            )
            for n, e in entries.items()
        ]
        unused = _unused_outputs(entries)
        boundaries = {
            n: Boundaries(
                forms[n - 1] if n else None, forms[n], specs[n][0],
                tuple(specs[n][variant] for variant in examples.by_micro_batch), unused[n],
            )
            for n in entries
        }  # fmt: skip
        return facts, boundaries, num_rows

    def _facts(
        self, number: int, before: Mapping[str, Any], examples: Examples, skeleton: Mapping[str, Any]
    ) -> dict[str, Any]:
        """JSON facts of one stage of this rank, after those of the stage before it."""
        module = self.replicas[number].call()
        is_last = number == self.num_stages - 1
        declared = skeleton["model"].get("layers")
        if self.profile and not examples.distinct:
            raise PipelineError("profile=True measures the stages on the example: give Pipeline an `example`")
        if not examples.distinct and not declared:
            raise PipelineError("give Pipeline an `example`: the arguments of the first stage for one micro-batch")
        entry: dict[str, Any] = {
            "kind": type(module).__name__,
            "parameters": [
                {"name": name, "shape": list(weight.shape)} for name, weight in trained(module).items()
            ],
            "kept": None, "form": ["tensor", []], "out": [], "rows": before.get("rows"), "times": [None, None],
            "uses": None,
        }  # fmt: skip
        if not examples.distinct:
            return self._declared_facts(number, entry, skeleton, examples.lengths)
        if self.profile and self.replicas[number].is_sharded:
            raise PipelineError(
                f"stage {number} is sharded by fully_shard, which communicates in each run: leave out profile=True, "
                "and measure steps with `profile(file, ...)`"
            )
        runs, times = [], []
        for variant, (args, by_stage) in enumerate(examples.distinct):
            kwargs = dict(by_stage.get(number, {}))
            if number:
                form, leaves = form_of(before), meta_leaves(specs_of(before["out"][variant]))
                args, named = form.arguments(leaves)
                names = self.contract.keywords.bound(number, form, len(leaves))
                kwargs = {name: value for name, value in kwargs.items() if name not in names} | named
            runs.append(run_stage(number, module, args, kwargs, self.device, is_last=is_last))
            if self.profile:
                times.append(time_stage(number, module, args, kwargs, self.device))
        run, kept = runs[0], [each.activation_bytes for each in runs if each.activation_bytes is not None]
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
        entry["kept"] = max(kept, default=None)
        if times:  # means over the micro-batches, which may differ in length
            every = [times[variant] for variant in examples.by_micro_batch] or times
            entry["times"] = [round(fmean(each), 3) for each in zip(*every, strict=True)]
        entry["out"] = [[[list(spec.shape), spec.dtype, spec.has_gradient] for spec in each.leaves] for each in runs]
        if number:
            entry["uses"] = _uses(runs, len(before["out"][0]), form_of(before).keys)
        if any(each.form != run.form for each in runs):
            raise PipelineError(f"stage {number} returns another structure for another length of the sequences")
        if not is_last:
            if not any(spec.has_gradient for spec in run.leaves):
                raise PipelineError(f"no output of stage {number} has a gradient, so no stage before it would learn")
            entry["form"] = [run.form.kind, list(run.form.keys)]
        return entry

    def _declared_facts(
        self, number: int, entry: dict[str, Any], skeleton: Mapping[str, Any], lengths: Sequence[int]
    ) -> dict[str, Any]:
        """The boundary that the plan declares after a stage: one tensor, or a tuple."""
        layers, rows = skeleton["model"]["layers"], skeleton["schedule"].get("micro_batch_size")
        if rows is None or len(layers) != self.num_stages:
            raise PipelineError(
                "boundaries are read from a plan with schedule.micro_batch_size and one layer for each stage: "
                f"this one has {len(layers)} layers for {self.num_stages} stages; or give Pipeline an `example`"
            )
        out = layers[number].get("out", [])
        dtype = skeleton["run"]["dtype"]
        entry["rows"] = rows
        entry["form"] = ["tensor" if len(out) == 1 else "tuple", []]
        for length in lengths or (None,):
            letters = {"b": rows, "s": length}
            entry["out"].append([])
            for leaf in out:
                of = leaf.get("dtype") or dtype
                gradient = leaf.get("gradient")
                shape = [letters.get(size, size) for size in leaf["shape"]]
                entry["out"][-1].append([shape, of, "float" in of if gradient is None else gradient])
        return entry


def _uses(runs: Sequence[StageRun], num_inputs: int, keys: Sequence[str]) -> list[list[int]] | None:
    """The inputs that the gradient of each output reaches, by position in the output of the stage before.

    None if not seen. ``keys`` are those of a dict that the stage before returns.
    """
    seen = [each.uses for each in runs if each.uses is not None]
    if len(seen) < len(runs):
        return None
    positions: dict[int | str, int] = dict(zip(keys or range(num_inputs), range(num_inputs), strict=True))
    every = (frozenset[int | str]().union(*uses) for uses in zip(*seen, strict=True))
    return [sorted(positions[x] for x in used if x in positions) for used in every]


def _unused_outputs(entries: Mapping[int, Mapping[str, Any]]) -> dict[int, tuple[int, ...]]:
    """Outputs of each stage that get no gradient, because no stage after it uses them for what has one."""
    unused: dict[int, tuple[int, ...]] = {len(entries) - 1: ()}
    for number in reversed(range(1, len(entries))):
        num_outputs, uses = len(entries[number - 1]["out"][0]), entries[number]["uses"]
        is_used = set(range(num_outputs))
        if uses is not None:
            is_used = {position for n, used in enumerate(uses) if n not in unused[number] for position in used}
        unused[number - 1] = tuple(position for position in range(num_outputs) if position not in is_used)
    return unused
