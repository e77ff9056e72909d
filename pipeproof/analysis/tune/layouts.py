"""Layouts of a training on a number of devices: the mesh, the schedule, the cut and the memory settings.

The product of all choices is never made: a mesh that does not divide ends before schedules are tried on it. Each test
counts the layouts that it removed: a user can see why a layout is not listed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import isqrt
from typing import Any

from pipeproof.analysis.tune.frameworks import Framework, FrameworkSchedule
from pipeproof.schedule.kinds import SCHEDULE_KINDS
from pipeproof.specs.pipeline_checks import check_overlap
from pipeproof.specs.plan import PlanSpec

MAX_CP = 16
"""Most context-parallel ranks that are tried unless ``fix`` names more."""

MAX_MICRO_BATCH = 8
"""Largest micro-batch that is tried unless ``fix`` names a larger one."""

MAX_CHUNKS = 20
"""Most stages of a rank that are tried unless ``fix`` names more."""

MAX_FORWARDS = 100_000
"""Most forwards of a step, over all stages: a layout with more is not tried, unless the plan itself has as many."""

FIXABLE = ("tp", "cp", "ep", "dp", "pp", "vpp", "mbs", "schedule", "cut", "recompute", "shard_optimizer", "overlap")
"""Names that ``fix`` takes, in the order of the table."""


@dataclass(frozen=True, slots=True)
class Layout:
    """One choice of everything that ``tune`` varies.

    ``vpp`` is the number of stages of a pipeline rank. ``cut`` is ``even`` (equal numbers of blocks), ``near_even``
    (equal but for the ends, if they do not divide) or ``balanced`` (stages of nearly equal times). ``mbs`` is the
    number of sequences in a micro-batch. ``overlap`` is ``schedule.overlap``: ``none``, ``pairs``, or the given order.
    ``placement``, ``num_sequence_splits`` and ``memory_limit`` are keys of the schedule; only a search on a plan's own
    ranks varies them.
    """

    pp: int
    vpp: int
    tp: int
    cp: int
    ep: int
    dp: int
    mbs: int
    num_micro_batches: int
    kind: str
    variant: str | None
    cut: str
    recompute: str
    shard_optimizer: str
    overlap: str = "none"
    placement: str | None = None
    num_sequence_splits: int = 1
    memory_limit: int | None = None

    @property
    def num_stages(self) -> int:
        """Stages over all pipeline ranks."""
        return self.pp * self.vpp

    @property
    def num_forwards(self) -> int:
        """Forwards of a step, over all stages of a replica."""
        return self.num_stages * self.num_micro_batches * self.num_sequence_splits

    @property
    def schedule_name(self) -> str:
        """The schedule with its variant."""
        return self.kind if self.variant is None else f"{self.kind} ({self.variant})"


@dataclass(frozen=True, slots=True)
class Bound:
    """Lower bounds of a layout: of a step in microseconds, and of the largest rank's memory in bytes."""

    step_us: float
    peak_bytes: float


@dataclass(frozen=True)
class SearchSpace:
    """The layouts to try, for a model on ``num_gpus`` devices with ``global_batch`` sequences in a step.

    ``fix`` has the allowed values of the names in ``FIXABLE``. ``removed`` counts untried layouts by reason.
    """

    spec: PlanSpec
    framework: Framework
    num_gpus: int
    global_batch: int
    ranks_per_node: int
    fix: Mapping[str, Sequence[Any]]
    removed: Counter[str] = field(default_factory=Counter)

    def layouts(self) -> Iterator[Layout]:
        """Yield all layouts that divide and that the framework has, meshes first."""
        for tp, cp, ep, pp in self._meshes():
            dp = self.num_gpus // (tp * cp * ep * pp)
            for mbs in self._micro_batches(dp * ep):
                num_micro_batches = self.global_batch // (dp * ep * mbs)
                for schedule, vpp in self._schedules(pp, num_micro_batches):
                    if pp * vpp * num_micro_batches > MAX_FORWARDS:
                        self.removed[f"more than {MAX_FORWARDS:,} forwards in a step"] += 1
                        continue
                    for cut in self._cuts(pp * vpp):
                        for recompute, sharding in self._memory_settings(dp, ep):
                            for overlap in self._overlaps(schedule, pp, vpp, ep, recompute):
                                yield Layout(
                                    pp, vpp, tp, cp, ep, dp, mbs, num_micro_batches, schedule.kind, schedule.variant,
                                    cut, recompute, sharding, overlap,
                                )  # fmt: skip

    def _meshes(self) -> Iterator[tuple[int, int, int, int]]:
        model, seq = self.spec.gpt, self.spec.gpt.seq_length
        num_experts = 1 if model.moe is None else model.moe.num_experts
        sizes = divisors(self.num_gpus)
        for tp, cp, ep in product(sizes, sizes, sizes):
            if self.num_gpus % (tp * cp * ep):
                continue
            if not (self._allows("tp", tp) and self._allows("cp", cp) and self._allows("ep", ep)):
                continue
            if num_experts % ep or (ep > 1 and model.moe is None):
                continue  # no such layout: not counted
            if tp > self.ranks_per_node and "tp" not in self.fix:
                self.removed["tensor parallelism over more than a node"] += 1
            elif cp > MAX_CP and "cp" not in self.fix:
                self.removed[f"more than {MAX_CP} context-parallel ranks"] += 1
            elif (key := self._undivided(tp)) is not None:
                self.removed[f"model.{key} does not divide by tp"] += 1
            elif seq % (2 * cp * tp if cp > 1 else tp):
                self.removed["the sequence does not divide over cp and tp"] += 1
            elif model.moe is not None and ep > 1 and seq * model.moe.top_k % (ep * cp):
                self.removed["tokens do not divide over ep and cp"] += 1
            else:
                yield from ((tp, cp, ep, pp) for pp in self._pipelines(tp * cp * ep))

    def _undivided(self, tp: int) -> str | None:
        """The first size of the model that does not divide over the tensor-parallel ranks."""
        model = self.spec.gpt
        sizes = {"num_heads": model.num_heads, "num_kv_heads": model.num_kv_heads or model.num_heads}
        if model.moe is None or model.moe.dense_layers:
            sizes["ffn_size"] = model.ffn_size
        if model.moe is not None:
            sizes["moe.ffn_size"] = model.moe.ffn_size
        if model.compressed_attention is not None:
            sizes["compressed_attention.o_groups"] = model.compressed_attention.o_groups
        return next((key for key, size in {**sizes, "vocab_size": model.vocab_size}.items() if size % tp), None)

    def _pipelines(self, others: int) -> Iterator[int]:
        for pp in divisors(self.num_gpus // others):
            dp = self.num_gpus // (others * pp)
            if not (self._allows("pp", pp) and self._allows("dp", dp)):
                continue
            if pp > self.spec.gpt.num_layers:
                self.removed["more pipeline ranks than blocks"] += 1
            else:
                yield pp

    def _micro_batches(self, replicas: int) -> Iterator[int]:
        if self.global_batch % replicas:
            self.removed["the global batch does not divide over dp and ep"] += 1
            return
        for mbs in divisors(self.global_batch // replicas):
            if self._allows("mbs", mbs) and (mbs <= MAX_MICRO_BATCH or "mbs" in self.fix):
                yield mbs

    def _schedules(self, pp: int, num_micro_batches: int) -> Iterator[tuple[FrameworkSchedule, int]]:
        for schedule in self.framework.schedules:
            if self._allows("schedule", schedule.kind):
                counts = chunk_counts_of(schedule, self._chunk_counts(pp))
                if schedule.fits(pp, num_micro_batches):
                    yield from ((schedule, vpp) for vpp in counts)
                elif counts:
                    reason = f"{self.framework.title} does not run the schedule with these micro-batches"
                    self.removed[reason] += len(counts)

    def _chunk_counts(self, pp: int) -> list[int]:
        """Numbers of stages of a rank: those that divide the blocks, also with the ends counted as one each."""
        num_layers = self.spec.gpt.num_layers
        most = (num_layers + 2) // pp  # the first and the last stage may have no block
        limit = most if "vpp" in self.fix else min(MAX_CHUNKS, most)
        return [
            vpp
            for vpp in range(1, limit + 1)
            if self._allows("vpp", vpp)
            and (num_layers % (pp * vpp) == 0 or (num_layers + 2) % (pp * vpp) == 0 or vpp in (1, 2, 4, 8))
        ]

    def _cuts(self, num_stages: int) -> Iterator[str]:
        cuts = []
        if self.spec.gpt.num_layers % num_stages == 0:
            cuts.append("even")
        if num_stages > 1 and self.framework.free_cut:
            if not cuts and near_even_blocks(self.spec.gpt.num_layers, num_stages) is not None:
                cuts.append("near_even")
            cuts.append("balanced")
        if not cuts:
            self.removed["the blocks do not divide over the stages"] += 1
        yield from (cut for cut in cuts if self._allows("cut", cut))

    def _memory_settings(self, dp: int, ep: int) -> Iterator[tuple[str, str]]:
        shardings = self.framework.sharding if ep == 1 else self.framework.sharding_with_experts
        if dp == 1:  # nothing to shard over dp; a framework that always shards with experts has the key all the same
            shardings = ("none",) if ep == 1 else shardings[:1]
        for recompute, sharding in product(self.framework.recompute, shardings):
            if self._allows("recompute", recompute) and self._allows("shard_optimizer", sharding):
                yield recompute, sharding

    def _overlaps(self, schedule: FrameworkSchedule, pp: int, vpp: int, ep: int, recompute: str) -> Iterator[str]:
        has_pairs = schedule.has_pairs(pp, vpp) and ep > 1 and recompute != "full" and self._can_overlap
        yield from (overlap for overlap in ("none", "pairs")[: 1 + has_pairs] if self._allows("overlap", overlap))

    @cached_property
    def _can_overlap(self) -> bool:
        """True if pairs may alternate at the all-to-alls of experts, by the keys that all layouts share.

        Megatron-LM allows it with at most one module of multi-token prediction, and not if tokens are gathered.
        """
        spec, model = self.spec, self.spec.gpt
        if model.moe is None or model.moe.dispatcher == "all_gather":
            return False
        if model.mtp is not None and model.mtp.num_modules > 1:
            return False
        sections = {
            "schedule": spec.schedule.model_copy(update={"kind": "1f1b", "overlap": "pairs"}),
            "topology": spec.topology.model_copy(update={"ep": 2}),
            "memory": spec.memory.model_copy(update={"recompute": "none"}),
            "cost": spec.cost.model_copy(update={"overlapped_us": None}),
        }
        return not any(check_overlap(spec.model_copy(update=sections)))

    def _allows(self, name: str, value: object) -> bool:
        return name not in self.fix or value in self.fix[name]


def chunk_counts_of(schedule: FrameworkSchedule, counts: Sequence[int]) -> list[int]:
    """The numbers of stages of a rank in ``counts`` that a schedule has."""
    kind = SCHEDULE_KINDS[schedule.kind]
    least, most = max(kind.min_chunks, schedule.min_chunks), kind.max_chunks or max(counts, default=0)
    return [vpp for vpp in counts if least <= vpp <= most]


def near_even_blocks(num_layers: int, num_stages: int) -> list[int] | None:
    """The number of blocks of each stage, equal but for the ends; None if a stage would have nothing.

    The embedding and the head count as a block each, if that divides; otherwise each stage but the last has the
    rounded-up number of blocks.
    """
    if (num_layers + 2) % num_stages == 0 and num_stages > 1:
        each = (num_layers + 2) // num_stages
        blocks = [each - 1, *[each] * (num_stages - 2), each - 1]
    else:
        each = -(-num_layers // num_stages)
        blocks = [*[each] * (num_stages - 1), num_layers - each * (num_stages - 1)]
    return None if min(blocks) < 0 or 0 in blocks[1:-1] else blocks


def divisors(number: int) -> list[int]:
    """Divisors of a number in ascending order."""
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return [*small, *(number // divisor for divisor in reversed(small) if divisor * divisor != number)]
