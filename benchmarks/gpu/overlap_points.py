"""A script's own experts that declare overlap points: ``Pipeline(overlap=True)`` alternately with the same without.

    torchrun --nproc-per-node 2 benchmarks/gpu/overlap_points.py "2048,4096,4,8" 64,8,1024 1f1b,dualpipe_v
    torchrun --nproc-per-node 4 benchmarks/gpu/overlap_points.py "2048,4096,4,8" 64,8,1024 dualpipe_v --pp 2

The first argument is the size (hidden, sequence, blocks of a pipeline rank, micro-batches), the second the experts of a
block (how many, how many for a token, inner size), the third schedules. ``--pp N`` is the number of pipeline ranks, by
default 1; the experts of a block are shared out over the others, with one pipeline for each expert-parallel rank. All
shapes are fixed: an expert takes at most ``--capacity`` times its fair share of the visits of a rank.

Forward and backward of all micro-batches, no optimizer; weights that are not of experts are not summed over the
expert-parallel ranks. First the bits of losses and gradients, in each of ``--dtypes``, with kernels that add in one
order and sizes of at most ``CHECKED``: without overlap, again (the control), and with overlap. Then, in the last type,
the times of both, one step after the other; a step counts from a common start to the end of the slowest rank. Printed
are medians, and of pairs of steps the median, smallest and largest ratio. In further steps the device times the
exchanges: ``comm`` is the time in which one is under way, ``exposed`` the time in which the compute stream waits for
them, of the rank where most is exposed. Last, on GPUs, the bits and times of steps replayed as one CUDA graph.

Every wait is bounded: a stage that makes no progress for ``STALL_S`` is reported with its operation and the line of the
script, and any other wait of ``LIMIT_S`` ends the process with the stacks of its threads. Compilation has three times
as long.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from measure import forget, leave, meet, settle
from our_step import start
from plain_gpt import PlainBlock, PlainStage, summed_loss, swiglu
from rival import stage_numbers
from sizes import Size
from torch import Tensor, nn

from pipeproof.torch import Pipeline, overlap_point

NUM_PAIRS = 10
NUM_TIMED = 3
STALL_S, LIMIT_S = 40, 55
CHECKED = {"seq_length": 1024, "num_layers": 2, "num_micro_batches": 6}
NAMES = {False: "none", True: "pairs"}


class Exchanges:
    """Times of the exchanges of a rank's steps, while they are measured."""

    def __init__(self) -> None:
        self.is_on = False
        self._marks: list[tuple[Any, ...]] = []
        self._side: Any = None

    def timed(self, work: Any, begun: Any) -> Any:
        """The work, whose wait is measured; ``begun`` is the mark at which it began."""
        return _TimedWork(self, work, begun) if self.is_on else work

    def mark(self) -> Any:
        """A point in the current stream; on a CPU one in time, in milliseconds."""
        if not torch.cuda.is_available():
            return time.perf_counter() * 1e3
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def end_of(self, work: Any) -> Any:
        """The mark at which the device ends the work; None on a CPU, where only its wait is known."""
        if not torch.cuda.is_available():
            return None
        self._side = self._side or torch.cuda.Stream()
        with torch.cuda.stream(self._side):
            work.wait()
            return self.mark()

    def add(self, *marks: Any) -> None:
        """Begin and end of an exchange, and of the wait for it."""
        self._marks.append(marks)

    def take_ms(self) -> tuple[float, float]:
        """The time in which exchanges were under way, and the time of waits for them; forgets them."""
        comm = exposed = 0.0
        last: Any = None
        for begun, ended, waits, waited in self._marks:
            exposed += _between(waits, waited)
            ended = waited if ended is None else ended
            comm += _between(begun, ended) if last is None else min(_between(begun, ended), _between(last, ended))
            last = ended
        self._marks.clear()
        return comm, exposed


def _between(first: Any, second: Any) -> float:
    return max(0.0, second - first if isinstance(first, float) else first.elapsed_time(second))


class _TimedWork:
    def __init__(self, exchanges: Exchanges, work: Any, begun: Any) -> None:
        self._exchanges, self._work, self._begun = exchanges, work, begun
        self._ended = exchanges.end_of(work)

    def wait(self) -> None:
        waits = self._exchanges.mark()
        self._work.wait()
        self._exchanges.add(self._begun, self._ended, waits, self._exchanges.mark())


EXCHANGES = Exchanges()


class _Exchanged(torch.autograd.Function):
    """Rows [E, C, H] by expert to the experts' ranks, [R, E / R, C, H], or back: both are one all-to-all."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _exchanged(rows, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _exchanged(gradient, ctx.group), None


def _exchanged(rows: Tensor, group: Any) -> Tensor:
    rows = rows.contiguous()
    result = torch.empty_like(rows)
    begun = EXCHANGES.mark() if EXCHANGES.is_on else None
    work = dist.all_to_all_single(result, rows, group=group, async_op=True)
    overlap_point(EXCHANGES.timed(work, begun))
    return result


class _Dispatched(torch.autograd.Function):
    """Tokens [N, H] to the slots of experts [E C, H]: ``visit`` [E C] of each slot, ``slot`` [N k] of each visit.

    Both have one index more for none. A gradient is a gather, too, and a sum in one order.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, visit: Tensor, slot: Tensor) -> Tensor:
        ctx.save_for_backward(slot)
        ctx.num_tokens = len(tokens)
        return _with_zero(tokens)[visit // (len(slot) // len(tokens))]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (slot,) = ctx.saved_tensors
        return _with_zero(gradient)[slot].unflatten(0, (ctx.num_tokens, -1)).sum(1), None, None


class _Combined(torch.autograd.Function):
    """Slots of experts [E C, H] to visits [N k, H]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, visit: Tensor, slot: Tensor) -> Tensor:
        ctx.save_for_backward(visit)
        return _with_zero(rows)[slot]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (visit,) = ctx.saved_tensors
        return _with_zero(gradient)[visit], None, None


def _with_zero(rows: Tensor) -> Tensor:
    """Rows, and a row of zeros behind them."""
    return torch.cat([rows, rows.new_zeros(1, rows.shape[1])])


class Experts(nn.Module):
    """Experts of SwiGLU over the ranks of ``group``, each for at most ``capacity`` rows of each rank.

    Shape letters: H hidden, N tokens, E experts, k of them for a token, C capacity, R ranks.
    """

    def __init__(self, size: Size, group: Any, capacity: float, device: torch.device) -> None:
        super().__init__()
        assert size.moe is not None
        self.num_experts, self.top_k, ffn = (size.moe[name] for name in ("num_experts", "top_k", "ffn_size"))
        self.group, self.capacity, self.num_ranks = group, capacity, dist.get_world_size(group)
        made = {"dtype": size.dtype, "device": device}
        own = self.num_experts // self.num_ranks
        self.router = nn.Linear(size.hidden, self.num_experts, bias=False, **made)
        self.gate, self.up = (nn.Parameter(torch.empty(own, size.hidden, ffn, **made)) for _ in range(2))
        self.down = nn.Parameter(torch.empty(own, ffn, size.hidden, **made))

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, H] to the same; the host reads nothing."""
        tokens = x.flatten(0, -2)
        scores = self.router(tokens).float().softmax(-1)
        chosen = scores.detach().sort(dim=-1, descending=True, stable=True).indices[:, : self.top_k]
        is_chosen = chosen.unsqueeze(-1) == torch.arange(self.num_experts, device=x.device)  # [N, k, E]
        gains = (scores.unsqueeze(1) * is_chosen).sum(-1)  # the backward of a gather adds in no fixed order
        gains = (gains / gains.sum(-1, keepdim=True)).to(x.dtype)
        num_slots = max(1, round(self.capacity * chosen.numel() / self.num_experts))
        visit, slot = self._places(chosen.flatten(), is_chosen.sum((0, 1)), num_slots)
        rows = _Dispatched.apply(tokens, visit, slot).unflatten(0, (self.num_experts, num_slots))
        arrived = _Exchanged.apply(rows, self.group).view(self.num_ranks, -1, num_slots, x.shape[-1])
        by_expert = arrived.transpose(0, 1).flatten(1, 2)  # [E / R, R C, H]
        made = torch.bmm(swiglu(torch.bmm(by_expert, self.gate), torch.bmm(by_expert, self.up)), self.down)
        by_rank = made.unflatten(1, (self.num_ranks, num_slots)).transpose(0, 1).flatten(0, 1)
        back = _Combined.apply(_Exchanged.apply(by_rank, self.group).flatten(0, 1), visit, slot)
        return (back.unflatten(0, chosen.shape) * gains.unsqueeze(-1)).sum(1).reshape(x.shape)

    def _places(self, experts: Tensor, counts: Tensor, num_slots: int) -> tuple[Tensor, Tensor]:
        """The visit of each slot [E C], and the slot of each visit [N k]; the number of all where there is none."""
        order, begins = experts.argsort(stable=True), counts.cumsum(0) - counts
        place = order.argsort() - begins[experts]  # of a visit among the visits of its expert
        slot = torch.where(place < num_slots, experts * num_slots + place, self.num_experts * num_slots)
        places = torch.arange(num_slots, device=experts.device)
        of_sorted = (begins.unsqueeze(1) + places).clamp(max=len(experts) - 1)
        visit = torch.where(places < counts.unsqueeze(1), order[of_sorted], len(experts))
        return visit.flatten(), slot


class ExpertsBlock(PlainBlock):
    """A block whose MLP are experts."""

    def __init__(self, size: Size, experts: Experts, device: torch.device) -> None:
        super().__init__(size.hidden, size.num_heads, 1, size.seq_length, size.dtype, device)
        del self.gate, self.up, self.down
        self.experts = experts

    def mlp(self, normed: Tensor) -> Tensor:
        """Output of the experts."""
        made: Tensor = self.experts(normed)
        return made


def _stage(size: Size, number: int, num_stages: int, num_blocks: int, make: Callable[[], ExpertsBlock]) -> PlainStage:
    """A stage with small random weights, other ones on each rank."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    made = {"dtype": size.dtype, "device": device}
    embed = nn.Embedding(size.vocab_size, size.hidden, **made) if number == 0 else None
    last = nn.Sequential(
        nn.RMSNorm(size.hidden, 1e-6, **made), nn.Linear(size.hidden, size.vocab_size, bias=False, **made)
    )
    module = PlainStage([make() for _ in range(num_blocks)], embed, last if number == num_stages - 1 else None)
    torch.manual_seed(100 * dist.get_rank() + number)
    for weight in module.parameters():
        if weight.dim() > 1:
            nn.init.uniform_(weight, -0.02, 0.02)
    return module


class Job:
    """The stages of this rank for one schedule and type, and pipelines of them."""

    def __init__(self, options: argparse.Namespace, kind: str, size: Size, groups: Sequence[Any], device: Any) -> None:
        self._options, self._kind, self._size, self._device = options, kind, size, device
        self._pipeline_group, experts_group = groups
        place = dist.get_rank(self._pipeline_group)
        chunks = size.chunks(kind)
        self._num_stages = options.pp * chunks
        num_blocks = max(1, size.num_layers // chunks)

        def block() -> ExpertsBlock:
            return ExpertsBlock(size, Experts(size, experts_group, options.capacity, device), device)

        self.stages = {
            number: _stage(size, number, self._num_stages, num_blocks, block)
            for number in stage_numbers(kind, chunks, place, options.pp)
        }
        self._open: list[Pipeline] = []
        torch.manual_seed(dist.get_rank(experts_group))
        shape = (size.num_micro_batches * options.rows, size.seq_length)
        self._tokens, self._labels = (torch.randint(0, size.vocab_size, shape, device=device) for _ in range(2))

    def step(self, *, overlap: bool, replay: bool) -> Callable[[], Any]:
        """A step that returns the loss where the last stage is; it has run as often as a capture needs."""
        self._bound()
        plan = {"schedule": {"kind": self._kind, "num_micro_batches": self._size.num_micro_batches}}
        pipe = Pipeline(
            self.stages, plan=plan, loss_fn=summed_loss, example=(self._tokens[: self._options.rows],),
            group=self._pipeline_group, split=self._options.split, compiler=self._options.compiler, overlap=overlap,
            replay=replay, timeout_s=STALL_S,
        )  # fmt: skip
        self._open.append(pipe)

        def step() -> Any:
            return pipe.step(self._tokens, target=self._labels)

        for _ in range(4 if replay else 2):
            self._bound()
            step()
        if self._options.split != "whole" and dist.get_rank() == 0:
            sys.stdout.write(f"splits: {pipe.splits}\n")
        return step

    def close(self) -> None:
        """End the pipelines, which would hold the memory of the stages."""
        for pipe in self._open:
            pipe.close()
        self._open.clear()
        self.stages.clear()
        forget(self._device)

    def _bound(self) -> None:
        _bound(LIMIT_S if self._options.split == "whole" else 3 * LIMIT_S)

    def results(self, step: Callable[[], Any]) -> list[Tensor]:
        """Loss and gradients of a step, in the host's memory."""
        _bound()
        weights = [weight for stage in self.stages.values() for weight in stage.parameters()]
        for weight in weights:
            weight.grad = None
        loss = step()
        found = [] if loss is None else [loss.detach().cpu().clone()]
        return [*found, *(weight.grad.cpu().clone() for weight in weights if weight.grad is not None)]

    def step_ms(self, step: Callable[[], Any]) -> float:
        """One step, of the slowest rank."""
        _bound()
        meet(self._device)
        start = time.perf_counter()
        step()
        settle(self._device)
        return _most(1e3 * (time.perf_counter() - start), self._device)


def _bound(limit_s: float = LIMIT_S) -> None:
    """End this process with the stacks of its threads, unless it comes here again within the time."""
    faulthandler.dump_traceback_later(limit_s, exit=True)


def _most(value: float, device: torch.device) -> float:
    """The largest value of all ranks."""
    most = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return float(most)


def _groups(pp: int, *, on_gpu: bool) -> tuple[Any, Any]:
    """The pipeline of this rank, and the ranks that share its experts, which move tokens with high priority."""
    rank, num_experts_ranks = dist.get_rank(), dist.get_world_size() // pp
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True) if on_gpu else None
    pipelines = [dist.new_group([p * num_experts_ranks + e for p in range(pp)]) for e in range(num_experts_ranks)]
    experts = [
        dist.new_group([p * num_experts_ranks + e for e in range(num_experts_ranks)], pg_options=options)
        for p in range(pp)
    ]
    return pipelines[rank % num_experts_ranks], experts[rank // num_experts_ranks]


def _check_bits(job: Job, report: Callable[[str], None], title: str, *, replay: bool) -> None:
    """Compare losses and gradients with steps without overlap, operation by operation."""
    torch.use_deterministic_algorithms(mode=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    plain = job.step(overlap=False, replay=False)
    expected = job.results(plain)
    overlaps = (False, True) if replay else (True,)
    sides = {NAMES[overlap]: job.step(overlap=overlap, replay=replay) for overlap in overlaps}
    for name, step in (({} if replay else {"none again": plain}) | sides).items():
        found = job.results(step)
        differ = [i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if not torch.equal(a, b)]
        all_differ: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(all_differ, differ)
        bits = "bits equal" if not any(all_differ) else f"of the ranks differ {all_differ}"
        finite = all(bool(tensor.isfinite().all()) for tensor in found)
        report(f"{title}, {'replayed' if replay else 'op by op'} {name:10}: {len(expected)} tensors of rank 0, {bits}"
               f"{'' if finite else ', and some are not finite'}")  # fmt: skip
    torch.use_deterministic_algorithms(mode=False)


def _time(job: Job, report: Callable[[str], None], title: str, *, replay: bool) -> None:
    """Time both sides, one step after the other."""
    sides = {NAMES[overlap]: job.step(overlap=overlap, replay=replay) for overlap in (False, True)}
    for step in sides.values():
        job.step_ms(step)
    pairs = [[job.step_ms(step) for step in sides.values()] for _ in range(NUM_PAIRS)]
    ratios = [second / first for first, second in pairs]
    none, turns = (median(side) for side in zip(*pairs, strict=True))
    way = "replayed" if replay else "op by op"
    report(f"{title}, {way}: none {none:8.2f} pairs {turns:8.2f} ratio {median(ratios):6.3f} "
           f"({min(ratios):.3f} to {max(ratios):.3f})")  # fmt: skip
    if replay:
        return  # events of a captured step have no times
    for name, step in sides.items():
        EXCHANGES.is_on = True
        found = []
        for _ in range(NUM_TIMED):
            job.step_ms(step)
            found.append(EXCHANGES.take_ms())
        EXCHANGES.is_on = False
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, tuple(median(side) for side in zip(*found, strict=True)))
        comm, exposed = max(of_ranks, key=lambda each: each[1])
        report(f"{title}, {name:5}: comm {comm:8.2f} exposed {exposed:8.2f}")


def main() -> None:
    """Check and time the schedules on the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("size")
    parser.add_argument("experts")
    parser.add_argument("kinds")
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--rows", type=int, default=1, help="sequences of a micro-batch")
    parser.add_argument("--capacity", type=float, default=1.25)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--split", choices=["whole", "linear", "graph"], default="whole")
    parser.add_argument("--compiler", choices=["eager", "inductor"], default="eager")
    options = parser.parse_args()
    _bound(2 * LIMIT_S)
    on_gpu = torch.cuda.is_available()
    framework, report = start(timedelta(seconds=LIMIT_S))
    device = framework.device
    groups = _groups(options.pp, on_gpu=on_gpu)
    num_experts, top_k, ffn = map(int, options.experts.split(","))
    size = replace(
        Size.read(options.size), moe={"num_experts": num_experts, "top_k": top_k, "ffn_size": ffn},
        vocab_size=4096 if on_gpu else 64,
    )  # fmt: skip
    report(f"hidden {size.hidden}, sequence {size.seq_length}, {size.num_layers} blocks a pipeline rank, "
           f"{size.num_micro_batches} micro-batches of {options.rows}, {num_experts} experts of {ffn}, "
           f"{top_k} a token, capacity {options.capacity}, pp {options.pp}, ep {dist.get_world_size() // options.pp}, "
           f"split {options.split}")  # fmt: skip
    checked = replace(size, **{name: min(most, getattr(size, name)) for name, most in CHECKED.items()})
    dtypes = options.dtypes.split(",")

    def end(job: Job) -> None:
        if options.pp == 1 or not replay:  # the channels of a captured step would not end
            job.close()

    for replay, kind in itertools.product((False, True) if on_gpu else (False,), options.kinds.split(",")):
        for dtype in dtypes:
            job = Job(options, kind, replace(checked, dtype=getattr(torch, dtype)), groups, device)
            _check_bits(job, report, f"{kind} {dtype}", replay=replay)
            end(job)
        job = Job(options, kind, replace(size, dtype=getattr(torch, dtypes[-1])), groups, device)
        _time(job, report, f"{kind} {dtypes[-1]}", replay=replay)
        end(job)
    leave()


if __name__ == "__main__":
    main()
