"""Limits of a step as text: a table of the stages, and a line on the largest loss."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text

from pipeproof.specs.profile_file import LargestLoss, LossCause, MeasuredPlan, Profile, StageLimits, StepLimits
from pipeproof.views.tables import table_lines

_HEADINGS = (">pp", ">stage", ">computation", ">bubble", ">exposed communication", ">launch-bound", ">update")

_CAUSES: dict[LossCause, str] = {
    "bubble": "bubble: it waits for other ranks",
    "messages": "exposed messages",
    "collectives": "exposed collectives",
    "launch_bound": "launch-bound: the host is late",
    "update": "the optimizer and the reductions",
    "imbalance": "more computation than the mean of the ranks",
    "below_peak": "computation below the peak of the products",
}


@dataclass(frozen=True, slots=True)
class LimitsReport:
    """The limits of a step of a measured profile; its text is the table that ``pipeproof run --profile`` prints."""

    profile: Profile

    @property
    def limits(self) -> StepLimits:
        """The figures.

        Raises:
            ValueError: the profile is of a release that did not divide steps.
        """
        if self.profile.limits is None:
            raise ValueError("the profile has no limits of a step: measure again")
        return self.profile.limits

    def __str__(self) -> str:
        return "\n".join(line.plain for line in self.lines())

    def lines(self) -> list[Text]:
        """The title, the table, one row for each pipeline rank and stage, and the largest loss."""
        limits, plan = self.limits, self.profile.plan
        rates = [each.tflops for each in limits.stages if each.tflops is not None]
        is_large = max((*rates, *(peak.tflops for peak in limits.peaks)), default=1.0) >= 1
        unit, scale = ("TFLOP/s", 1.0) if is_large else ("GFLOP/s", 1000.0)
        rows: dict[tuple[int, int], list[StageLimits]] = defaultdict(list)
        for each in limits.stages:
            rows[each.pp, each.stage].append(each)
        cells = [_row(limits, replicas, scale) for _, replicas in sorted(rows.items())]
        lines = [
            Text(f"step of {limits.step_us / 1000:.2f} ms, mean of {self.profile.steps.counted}, in % of it:"),
            *table_lines((*_HEADINGS, f">{unit}", ">of peak"), cells),
        ]
        if limits.peaks:
            types = sorted({peak.dtype for peak in limits.peaks})
            peaks = [scale * peak.tflops for peak in limits.peaks]
            spread = f"{min(peaks):.3g}" if len(peaks) == 1 else f"{min(peaks):.3g} to {max(peaks):.3g}"
            lines.append(Text(f"measured peak of products: {spread} {unit} in {' and '.join(types)}"))
        if not rates:
            lines.append(Text("FLOPs are not known: the layers are custom layers, or no product was counted"))
        if limits.largest_loss is not None:
            lines.append(_loss_line(limits.largest_loss, limits.step_us, plan))
        return lines


def _row(limits: StepLimits, replicas: Sequence[StageLimits], scale: float) -> list[str]:
    """Cells of a stage on a pipeline rank: means over its tensor-, context-, expert- and data-parallel ranks."""

    def share(part: Callable[[StageLimits], float]) -> str:
        return f"{100 * sum(map(part, replicas)) / len(replicas) / limits.step_us:.1f}"

    def mean(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if len(known) == len(replicas) else None

    rate, of_peak = (mean([getattr(each, name) for each in replicas]) for name in ("tflops", "share_of_peak"))
    return [
        str(replicas[0].pp),
        str(replicas[0].stage),
        share(lambda each: each.computation_us),
        share(lambda each: each.bubble_us),
        share(lambda each: each.messages_us + each.collectives_us),
        share(lambda each: each.launch_bound_us),
        share(lambda each: each.update_us),
        "-" if rate is None else f"{scale * rate:.3g}",
        "-" if of_peak is None else f"{100 * of_peak:.2g} %",
    ]


def _loss_line(loss: LargestLoss, step_us: float, plan: MeasuredPlan) -> Text:
    share = f"{100 * loss.us / step_us:.1f} %"
    return Text(
        f"largest loss on the slowest rank ({loss.rank}): {share}, {_CAUSES[loss.cause]}; {_remedy(loss, plan)}"
    )


def _remedy(loss: LargestLoss, plan: MeasuredPlan) -> str:
    """Return the change that makes a loss smaller, for the framework, the device and the model of the run."""
    is_script = plan.model.get("kind") == "layers" and plan.backend == "torch"
    match loss.cause:
        case "bubble":
            return (
                f"use more than {plan.num_micro_batches} micro-batches, or another schedule than {plan.schedule}: "
                "`pipeproof tune` with this profile compares them"
            )
        case "messages":
            return (
                "overlap them: earlier receives (`transport.recv_order`), or a schedule with other work meanwhile: "
                "`pipeproof tune` with this profile compares schedules"
            )
        case "collectives":
            return "use smaller tp, cp, ep or dp groups, or more micro-batches for those at the end of the step"
        case "launch_bound" if plan.device == "gpu":
            return "capture the step as a CUDA graph" if is_script else "replay the step: `run.replay: true`"
        case "launch_bound":
            return "use larger micro-batches: the host takes the same time for each operation"
        case "update":
            return "use more micro-batches for each update"
        case "imbalance":
            return "move layers to other stages"
        case "below_peak":
            compiled = ", or compile the blocks (`torch.compile`)" if is_script else ""
            return f"use larger products (a larger micro-batch){compiled}"
