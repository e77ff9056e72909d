"""One rank of a pipeline that trains a script's modules: its checked plan, and a step by the rank's program."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.exec.monitor.plan_ring import PlanRing
from pipeproof.exec.rank.adapter import Annotate, RankAdapter, RankProgram
from pipeproof.exec.rank.executor_support import factors_not_executed
from pipeproof.exec.rank.framework_protocol import Framework, World
from pipeproof.exec.rank.op_log import Clock
from pipeproof.exec.rank.overlapped_pair import Alternation
from pipeproof.exec.rank.stall_watch import op_facts
from pipeproof.exec.rank.step_end import StepEnd
from pipeproof.exec.store.agreement import Agreement
from pipeproof.exec.store.store import finding_content, finding_of
from pipeproof.exec.store.train_errors import PipelineError, PlanRefused, findings_text
from pipeproof.exec.train.module_plan import TrainedPlan
from pipeproof.exec.train.stage_boundaries import LeafSpec
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.specs.plan import PlanSpec
from pipeproof.verify.certificate import Certificate, Verdict, certificate_of, graph_digest
from pipeproof.verify.check_plan import check_subject
from pipeproof.verify.subject import make_subject


def checked_plan(
    content: dict[str, Any], agreement: Agreement, phase: str, *, unsafe: bool, warns: bool = True
) -> TrainedPlan:
    """Lower a plan on every rank and check it on the first; all ranks compare their graph with its certificate.

    With ``unsafe`` a plan that is not proved is used, and the first rank warns of it if ``warns``.

    Raises:
        PlanRefused: it is not proved, unless ``unsafe``.
        PipelineError: a rank derives another graph, or has other rules, or the plan is not valid.
    """
    lowered: list[LoweredPlan] = []

    def derive() -> list[Any]:
        subject = make_subject(plan_from_dict(content))
        lowered.append(subject.plan)
        for fact in factors_not_executed(subject.graph):
            raise PipelineError(f"in the schedule {fact}, which a script's modules do not apply: scale in the loss")
        if agreement.rank:
            certificate = certificate_of(subject, graph_digest(subject), Verdict.PROVED)
            return [certificate.graph_digest, certificate.rule_set_version, certificate.backend_table_version]
        report = check_subject(subject)
        if report.errors and not unsafe:
            raise PlanRefused(report.errors)
        outcome = report.conclusion
        errors = [finding_content(finding) for finding in report.errors]
        return [outcome.graph_digest, outcome.rule_set_version, outcome.backend_table_version, outcome.verdict, errors]

    derived = agreement.gather(phase, derive)
    _require_same(derived)
    digest, rules, table, verdict, errors = derived[0]
    findings = tuple(finding_of(content) for content in errors)
    if findings and warns and not agreement.rank:
        text = f"the plan is not proved, and is used all the same (unsafe=True):\n{findings_text(findings)}"
        warnings.warn(text, stacklevel=_script_level())
    plan = lowered[0]
    trained_by = replace(plan, graph=plan.canonical)
    return TrainedPlan(content, trained_by, Certificate(digest, rules, table, Verdict(verdict)), findings)


def _script_level() -> int:
    """The ``stacklevel`` of the script's line for a warning by the caller."""
    level, frame = 1, inspect.currentframe()
    frame = None if frame is None else frame.f_back
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("pipeproof."):
        level, frame = level + 1, frame.f_back
    return level


def require_supported(spec: PlanSpec) -> None:
    """Refuse keys of a plan that the script itself must decide.

    Raises:
        PipelineError: names the key and what to use.
    """
    is_torch = spec.run.backend == "torch"
    clip = "call Pipeline.clip_grad_norm_" if is_torch else "clip in the optimizer of fleet.distributed_optimizer"
    shard = "use fully_shard on the stages" if is_torch else "shard by Fleet's strategy"
    refused = (
        (spec.run.clip_norm is not None, "run.clip_norm", clip),
        (spec.memory.shard_optimizer != "none", "memory.shard_optimizer", shard),
        (
            spec.buffers.free_output != "after_backward",
            "buffers.free_output",
            "a module's backward may read its output",
        ),
        (spec.run.replay, "run.replay", "PyTorch's Pipeline has replay=True"),
        (bool(spec.modules) and not is_torch, "modules", "PyTorch's Pipeline has them"),
        (
            spec.schedule.alternation is not None and not is_torch,
            "schedule.overlap",
            "Paddle's collectives all block",
        ),
        (spec.transport.queue not in (None, "directed_edge"), "transport.queue", "each channel has its own group"),
    )
    for is_set, key, fix in refused:
        if is_set:
            raise PipelineError(f"the plan has {key}, which a script's modules cannot have: remove it; {fix}")


def require_fits(
    plan: LoweredPlan,
    rank: int,
    weights: Mapping[int, Mapping[str, Any]],
    outputs: Mapping[int, Sequence[LeafSpec]],
) -> None:
    """Refuse modules that differ from the plan, by this rank's stages.

    ``weights`` are the trained weights by their names in the plan; ``outputs`` are the tensors that cross after a
    stage.

    Raises:
        PipelineError: names the stage and the weight or the output.
    """
    again = "the plan was made of other modules: correct its `model.layers`, or remove `model`, which makes them again"
    planned = {weight.name: (n, list(weight.shape)) for n in weights for weight in plan.weights_of(n, rank)}
    actual = {name: (n, list(weight.shape)) for n, own in weights.items() for name, weight in own.items()}
    for name in dict.fromkeys((*planned, *actual)):
        number = (actual if name in actual else planned)[name][0]
        module_text, there = (f"{of[name][1]}" if name in of else "none" for of in (actual, planned))
        if module_text != there:
            raise PipelineError(
                f"stage {number}, weight {name}: shape {module_text} in the module, {there} in the plan; {again}"
            )
    for number, specs in outputs.items():
        if number == len(plan.edges) or len(plan.edges[number].variants) > 1:
            continue
        direct = (edge.variants[0] for edge in plan.direct if edge.producer == number)
        members = (*plan.edges[number].variants[0], *direct)
        module_text, there = (", ".join(f"{x.dtype}{list(x.shape)}" for x in side) for side in (specs, members))
        if module_text != there:
            raise PipelineError(f"stage {number} returns {module_text}, and the plan has {there} after it; {again}")


def _require_same(derived: list[list[Any]]) -> None:
    names = ("graph digest", "rule set version", "backend table version")
    for rank, other in enumerate(derived):
        differ = [
            f"{name} {str(there)[:12]}, not {str(reference)[:12]}"
            for name, there, reference in zip(names, other, derived[0], strict=False)
            if there != reference
        ]
        if differ:
            raise PipelineError.reported(
                f"rank {rank} derives another certificate than rank 0: {', '.join(differ)}; install the same "
                "pipeproof on every host, and give every rank the same plan"
            )


class TrainRank(RankProgram):
    """The program of one rank for one plan; ``index`` is the rank in the pipeline.

    ``enter`` is called with the step and number of each host operation before it runs. ``overlap_points``: see
    ``RankAdapter``. Operations are logged if there is a ``clock``. With ``ring`` they are written into the ring of a
    watched process.
    """

    def __init__(
        self,
        plan: LoweredPlan,
        index: int,
        framework: Framework,
        world: World,
        enter: Callable[[int, int], None],
        make_step_end: Callable[..., StepEnd] = StepEnd,
        clock: Clock | None = None,
        *,
        is_proved: bool,
        overlap_points: Callable[[Alternation], AbstractContextManager[object]] | None = None,
        annotate: Callable[[], Annotate | None] = lambda: None,
        ring: PlanRing | None = None,
    ) -> None:
        self.plan, self.index, self._ring = plan, index, ring

        def enter_both(step: int, op_id: int) -> None:
            assert ring is not None
            ring.enter(op_id)
            enter(step, op_id)

        adapter = RankAdapter(
            plan, plan.graph.global_rank[index], framework, world if ring is None else ring.world(world),
            enter if ring is None else enter_both, clock=clock, make_step_end=make_step_end, frees_sends=True,
            overlap_points=overlap_points, annotate=annotate,
        )  # fmt: skip
        if clock is None:
            adapter.leave_out_log()
        super().__init__(plan.graph, index, adapter, is_proved=is_proved)

    def run(self, step: int) -> None:
        """Run one step, operation by operation; the log has only its entries."""
        self.adapter.log.clear()
        if self._ring is not None:
            self._ring.begin(step)
        self.adapter.begin(step)
        super().run(step)
        if self._ring is not None:
            self._ring.leave()

    def describe(self, op_id: int) -> Mapping[str, Any]:
        """The operation with its stage, micro-batch and the peer it waits for, as JSON values."""
        return op_facts(self.plan.graph, op_id)
