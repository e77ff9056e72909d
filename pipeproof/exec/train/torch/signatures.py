"""Signatures of steps: the kinds of calls and sizes that all ranks agree on, each inferred and proved once.

Each rank sends one word, a digest of the structure, shapes and types of its arguments, to all others. If this
combination of words is known, all ranks know the signature, and the step begins. Otherwise the ranks exchange
descriptions of their arguments, split them, run the stages on the new shapes, and lower and prove the plan of the new
sizes. If one rank refuses its arguments, all refuse, with one text and before anything is posted: the pipeline stays
usable.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves

from pipeproof.diagnostics.problems import grouped
from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.module_plan import TrainedPlan, forward_plan, sized_plan
from pipeproof.exec.train.stage_boundaries import Boundaries
from pipeproof.exec.train.torch.module_stage import StepData
from pipeproof.exec.train.torch.roll_call import REFUSED, RollCall, Words
from pipeproof.exec.train.torch.stage_facts import Examples, varied_sizes
from pipeproof.exec.train.torch.stage_keywords import AssignedInputs, StepInputs
from pipeproof.exec.train.torch.stage_values import MicroBatches
from pipeproof.exec.train.torch.start_phases import Placed, Planned, Ranks, Settings, alternates
from pipeproof.exec.train.train_rank import TrainRank, checked_plan
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.verify.subject import make_subject

MOST_SIGNATURES = 64
"""Signatures that a pipeline keeps; the least recently used signature is forgotten first."""

View = dict[str, list[str]]
"""The arguments of one micro-batch by name: shapes and types of their leaves. ``args`` are the positional ones."""


@dataclass(eq=False)
class Signature:
    """Sizes of steps, and what exists for them.

    ``num_rows`` are the rows of a micro-batch. ``views`` are the distinct arguments of micro-batches; ``order`` has the
    view of each micro-batch, and is empty for one view. ``outputs`` has the outputs of all layers of the plan, and
    ``edges`` its edges by name.
    """

    num_micro_batches: int
    num_rows: int
    views: list[View]
    order: list[int]
    boundaries: dict[int, Boundaries]
    outputs: list[list[dict[str, Any]]]
    edges: dict[str, dict[str, Any]]
    content: dict[str, Any]
    plan: TrainedPlan | None = None
    forward_plan: TrainedPlan | None = None
    train: TrainRank | None = None
    forward: TrainRank | None = None

    def has_views(self, views: Sequence[View], order: Sequence[int]) -> bool:
        """True if micro-batches with these views have the boundaries of this signature."""
        if len(views) != len(self.views) or list(order) != self.order:
            return False
        return all(
            own.get("args") == view.get("args") and all(own.get(name) == leaves for name, leaves in view.items())
            for own, view in zip(self.views, views, strict=True)
        )


class Signatures:
    """The signatures of one rank's pipeline; the first signature is inferred at the start."""

    def __init__(
        self, ranks: Ranks, settings: Settings, placed: Placed, planned: Planned, plan: TrainedPlan, roll: RollCall,
    ) -> None:  # fmt: skip
        self._ranks, self._placed, self._planned, self._plan, self._roll = ranks, placed, planned, plan, roll
        self._by_kind = alternates(plan, settings) or plan.lowered.has_copies
        self._words = Words(has_values=settings.replay)
        examples, schedule = planned.examples, planned.content["schedule"]
        own = [view_of(args, kwargs) for args, kwargs in examples.distinct]
        self._first_rank = next(rank for rank, numbers in enumerate(placed.by_rank) if 0 in numbers)
        views = _merged(ranks.agreement.gather("views of the example", lambda: own), self._first_rank)
        self.first = Signature(
            schedule["num_micro_batches"], planned.num_rows, views, [*examples.by_micro_batch],
            planned.boundaries, [layer.get("out", []) for layer in planned.content["model"]["layers"]],
            {edge["name"]: edge for edge in planned.content.get("edges", ())}, planned.content, plan,
        )  # fmt: skip
        self.known: OrderedDict[tuple[int, ...], Signature] = OrderedDict()
        """Signatures by the words of all ranks, the last used at the end."""
        self.words: tuple[int, ...] = ()
        """The words of the last call."""
        self._num_new = 0

    def agreed(
        self,
        call: str,
        inputs: StepInputs,
        require: Callable[[], None],
        split: Callable[[int, int | None], StepData],
    ) -> Signature:
        """The signature of a call on all ranks; ``call`` is ``step`` or ``eval_step``.

        ``require`` raises if this rank cannot make the call; ``split`` splits this rank's values into a number of
        micro-batches, for a total number of rows.

        Raises:
            PipelineError: a rank refuses its arguments; all ranks raise it with one text, and may make other calls.
        """
        refusal: PipelineError | None = None
        try:
            require()
            kind = self._placed.device.type
            word = self._words.word(call, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), inputs)
        except PipelineError as error:
            refusal, word = error, REFUSED
        self.words = words = self._roll.exchange(word)
        if words in self.known:
            self.known.move_to_end(words)
            return self.known[words]
        self._num_new += 1
        with _usable_after_refusal(), torch.inference_mode(mode=False):
            signature = self._new(f"signature {self._num_new}", call, inputs, refusal, split)
        self.known[words] = signature
        if len(self.known) > MOST_SIGNATURES:
            self.known.popitem(last=False)
        return signature

    def _new(
        self, phase: str, call: str, inputs: StepInputs, refusal: PipelineError | None,
        split: Callable[[int, int | None], StepData],
    ) -> Signature:  # fmt: skip
        """Agree on a call whose words are not known, and prove the plan that it needs."""
        agreement, data = self._ranks.agreement, list[StepData]()

        def own_sizes() -> list[Any]:
            if refusal is not None:
                raise refusal
            return [call, *self._planned.contract.sizes(inputs)]

        calls = agreement.gather(f"{phase}: call", own_sizes)
        num, rows = self._micro_batches(calls)

        def own_views() -> list[View]:
            data.append(split(num, rows))
            return [view_of(*_of_micro_batch(data[0], index)) for index in range(num)]

        views, order = _distinct(agreement.gather(f"{phase}: split", own_views))
        signature = self._found(num, views, order)
        if signature is None:
            signature = self._inferred(phase, num, rows, views, order, data[0])
        if call == "step" and signature.plan is None:
            signature.plan = self._proved(signature.content, f"{phase}: plan")
        if call != "step" and signature.forward_plan is None:
            signature.forward_plan = self._proved(self._forward_content(signature), f"{phase}: forward plan")
        return signature

    def _micro_batches(self, calls: Sequence[Sequence[Any]]) -> tuple[int, int | None]:
        """The number of micro-batches and the rows of a step, from the call, number and rows of each rank."""
        if len({call for call, *_ in calls}) > 1:
            shown = ", ".join(f"{call} on rank {rank}" for rank, (call, *_) in enumerate(calls))
            raise PipelineError.reported(f"the ranks call different steps: {shown}")
        first = calls[self._first_rank]
        _, num, rows = next((each for each in (first, *calls) if each[1:] != [None, None]), first)
        usual, usual_rows = self.first.num_micro_batches, self.first.num_rows
        if num is not None:
            return num, rows
        if rows is None:
            return usual, usual * usual_rows
        if rows and rows % usual == 0:
            return usual, rows
        if rows and rows % usual_rows == 0:
            return rows // usual_rows, rows
        raise PipelineError.reported(
            f"the step has {rows} rows: neither {usual} micro-batches, as the plan has, nor micro-batches of "
            f"{usual_rows} rows, as the example has, divide them: pass {usual * usual_rows} rows or a multiple of "
            f"{usual_rows}, or MicroBatches([..]) with the rows of each"
        )

    def _found(self, num: int, views: list[View], order: list[int]) -> Signature | None:
        """The known signature of these sizes, or a new one with the boundaries of a known signature."""
        every = [self.first, *{id(each): each for each in self.known.values()}.values()]
        same = [each for each in every if each.has_views(views, order)]
        exact_match = next((each for each in same if each.num_micro_batches == num), None)
        if exact_match is not None or not same:
            return exact_match
        like = same[0]
        content = self._sized(like.outputs, like.edges, like.num_rows, num, None)
        return Signature(num, like.num_rows, views, order, like.boundaries, like.outputs, like.edges, content)

    def _inferred(
        self, phase: str, num: int, rows: int | None, views: list[View], order: list[int], data: StepData
    ) -> Signature:
        self._ranks.agreement.gather(f"{phase}: stages", self._require_runs)
        chosen = [order.index(variant) for variant in range(len(views))] if order else [0]
        lengths = varied_sizes(views) if order else ()
        distinct = tuple(_of_micro_batch(data, index) for index in chosen)
        examples = Examples(distinct, None if rows is None else rows // num, tuple(order), lengths)
        facts, boundaries, num_rows = self._planned.describer.describe_examples(
            examples, self._placed.by_rank, f"{phase}: boundaries"
        )
        outputs = [[dict(out) for out in layer.outputs] for each in facts for layer in each.layers]
        edges = {name: dict(out) for each in facts for name, out in each.edges.items()}
        content = self._sized(outputs, edges, num_rows, num, examples.seq_lengths)
        return Signature(num, num_rows, views, order, boundaries, outputs, edges, content)

    def _require_runs(self) -> None:
        for number, each in self._placed.replicas.items():
            if each.is_sharded:
                raise PipelineError(
                    f"stage {number} is sharded by fully_shard, which communicates in each run: stages are not run "
                    "for new shapes after the start; pass micro-batches like the example, fewer or more of them"
                )

    def _sized(
        self, outputs: Sequence[list[dict[str, Any]]], edges: dict[str, dict[str, Any]], num_rows: int, num: int,
        seq_lengths: list[int] | None,
    ) -> dict[str, Any]:  # fmt: skip
        return sized_plan(
            self._plan.content, self._plan.lowered.programs, outputs, edges, num_rows, num, seq_lengths,
            by_kind=self._by_kind,
        )  # fmt: skip

    def _proved(self, content: dict[str, Any], phase: str) -> TrainedPlan:
        is_unsafe = bool(self._plan.findings)
        return checked_plan(content, self._ranks.agreement, phase, unsafe=is_unsafe, warns=False)

    def _forward_content(self, signature: Signature) -> dict[str, Any]:
        plan = signature.plan
        programs = (
            make_subject(plan_from_dict(signature.content)).plan.programs if plan is None else plan.lowered.programs
        )
        return forward_plan(signature.content, programs)


def _of_micro_batch(data: StepData, index: int) -> tuple[tuple[Any, ...], dict[int, Mapping[str, Any]]]:
    return data.args[index] if data.args else (), {stage: named[index] for stage, named in data.kwargs.items()}


def view_of(args: Sequence[Any], kwargs: Mapping[int, Mapping[str, Any]]) -> View:
    """The view of one micro-batch; ``args`` is empty on ranks without the first stage."""
    view = {"args": [_leaf(leaf) for leaf in tree_leaves(tuple(args))]} if args else {}
    for stage, named in kwargs.items():
        view |= {f"{name} of stage {stage}": [_leaf(leaf) for leaf in tree_leaves(value)]
                 for name, value in named.items()}  # fmt: skip
    return view


def _merged(by_rank: Sequence[Sequence[View]], first: int) -> list[View]:
    """The views of the example, merged from ranks that may each have a part; ``first`` has the first stage."""
    merged = [dict(view) for view in by_rank[first]]
    for own in by_rank:
        for view, more in zip(merged, own, strict=False):
            view |= {name: leaves for name, leaves in more.items() if name not in view}
    return merged


def _leaf(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}" if isinstance(leaf, torch.Tensor) else type(leaf).__name__


def _distinct(by_rank: Sequence[Sequence[View]]) -> tuple[list[View], list[int]]:
    """The distinct views of micro-batches over all ranks, and which one each micro-batch has; empty for one view."""
    views: list[View] = []
    order: list[int] = []
    for of_ranks in zip(*by_rank, strict=True):
        view: View = {}
        for rank, own in enumerate(of_ranks):
            for name, leaves in own.items():
                if view.setdefault(name, leaves) != leaves:
                    raise PipelineError.reported(
                        f"`{name}` of micro-batch {len(order)} is {leaves} on rank {rank} and {view[name]} on a rank "
                        "before it: all ranks of a pipeline take the same rows"
                    )
        if view not in views:
            views.append(view)
        order.append(views.index(view))
    return views, order if len(views) > 1 else []


@contextmanager
def _usable_after_refusal() -> Iterator[None]:
    """Mark what all ranks refuse: nothing was posted."""
    try:
        yield
    except PipelineError as error:
        error.leaves_usable = error.is_reported
        raise


def digests_of(assigned: AssignedInputs) -> dict[str, str]:
    """A digest of each argument by its name; objects other than tensors and scalars count by their type."""
    named = {**assigned.args, **assigned.target, **assigned.kwargs}
    for number, own in assigned.stage_kwargs.items():
        named |= {f"{name} of stage {number}": value for name, value in own.items()}
    return {name: _digest(value) for name, value in named.items()}


def require_same_digests(by_rank: Sequence[Mapping[str, str]]) -> None:
    """Refuse different values of one argument on two ranks; a rank may have fewer arguments.

    Raises:
        PipelineError: names the argument, and the ranks by digest.
    """
    for name in dict.fromkeys(name for digests in by_rank for name in digests):
        ranks = grouped((digests[name], rank) for rank, digests in enumerate(by_rank) if name in digests)
        if len(ranks) > 1:
            shown = ", ".join(f"digest {digest} on ranks {numbers}" for digest, numbers in ranks.items())
            raise PipelineError.reported(
                f"check_inputs: {name} differs between the ranks of the pipeline: {shown}. All ranks of a pipeline "
                "take the same rows: let a sampler divide the data among the ranks of `data_group` alone, with one seed"
            )


def _digest(value: Any) -> str:
    sums = hashlib.blake2b(digest_size=6)
    _add(sums, value)
    return sums.hexdigest()


def _add(sums: Any, value: Any) -> None:
    leaves, spec = tree_flatten(value)
    sums.update(str(spec).encode())
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            sums.update(f"{leaf.dtype}{list(leaf.shape)}".encode())
            if type(leaf) in (torch.Tensor, torch.nn.Parameter) and leaf.layout is torch.strided:
                data = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                sums.update(data.numpy().tobytes())
        elif isinstance(leaf, MicroBatches):
            _add(sums, list(leaf))
        elif hasattr(leaf, "kv_num_blocks"):  # a BlockMask
            _add(sums, {name: each for name, each in vars(leaf).items() if isinstance(each, torch.Tensor)})
        else:
            is_scalar = isinstance(leaf, str | int | float | complex | bytes | type(None))
            sums.update((repr(leaf) if is_scalar else type(leaf).__name__).encode())
