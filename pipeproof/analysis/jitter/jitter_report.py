"""The runs of a step with noise, for people and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from pipeproof.analysis.jitter.delays import Delay, Delays, costliest
from pipeproof.analysis.jitter.histogram import histogram
from pipeproof.analysis.jitter.noise import Noise
from pipeproof.analysis.jitter.noisy_runs import JitterRuns
from pipeproof.analysis.jitter.quantiles import CONFIDENCE, Estimate
from pipeproof.sim.figures import number_to_json
from pipeproof.specs.cost import CostSource

if TYPE_CHECKING:
    from rich.console import Console

_MOST_ROWS = 16
"""Ranks and channels that are listed each."""
_BAR = 40
_BINS = 12


def noise_text(noise: Noise) -> str:
    """Description of the noise of the runs."""
    parts = []
    for what, cv in (("each computation", noise.compute_cv), ("each message and collective", noise.network_cv)):
        if cv:
            parts.append(f"{what} {noise.distribution} with cv {cv:.3g}")
    parts += [f"rank {rank} takes {factor:.3g} times as long" for rank, factor in sorted(noise.slow.items())]
    if noise.straggler_probability:
        parts.append(
            f"each rank takes {noise.straggler_factor:.3g} times as long in a run "
            f"with probability {noise.straggler_probability:.3g}"
        )
    return "; ".join(parts) or "nothing is disturbed"


def render_jitter(runs: JitterRuns, delays: Delays | None, console: Console, note: str) -> None:
    """Print the quantiles, the histogram and what delays cost; ``note`` is about the times of the plan."""
    from rich.text import Text

    many = "runs" if len(runs.makespans) > 1 else "run"
    engines = " and ".join(sorted(runs.engines))
    console.print(
        Text(f"{len(runs.makespans)} {many}, seed {runs.noise.seed}: {noise_text(runs.noise)}"), soft_wrap=True
    )
    console.print(Text(f"engine {engines}; times in us"))
    if note:
        console.print(Text(note), soft_wrap=True)
    if runs.replicas > 1:
        note = f"note: each rank stands for {runs.replicas} replicas, disturbed alike: noise of their own"
        note += " would make steps longer, slow ranks that are not all of one replica shorter"
        console.print(Text(note), soft_wrap=True)
    console.print()
    _print_quantiles(runs, console)
    console.print()
    bins = histogram(runs.ordered, _BINS)
    most = max(count for _, _, count in bins)
    for start, stop, count in bins:
        bar = "█" * round(_BAR * count / most)
        console.print(Text(f"{_us(start):>12} .. {_us(stop):>12}  {count:>6}  {bar}"), soft_wrap=True, no_wrap=True)
    if delays is not None:
        _render_delays(delays, console)


def _print_quantiles(runs: JitterRuns, console: Console) -> None:
    from pipeproof.views.tables import print_table

    def over(value: Fraction) -> str:
        return f"{float(100 * (value / runs.undisturbed - 1)):+.2f} %" if runs.undisturbed else "-"

    named = {f"{int(share * 100)} % of runs within": estimate for share, estimate in runs.quantiles.items()}
    rows = [
        ("undisturbed", _us(runs.undisturbed), "", ""),
        *(
            (name, _us(estimate.value), over(estimate.value), _bounds(estimate))
            for name, estimate in {"mean": runs.mean, **named}.items()
        ),
        ("longest", _us(runs.longest), over(runs.longest), ""),
    ]
    print_table(("makespan", ">us", ">over undisturbed", f">between, at {CONFIDENCE * 100:.0f} %"), rows, console)


def _render_delays(delays: Delays, console: Console) -> None:
    from rich.text import Text

    from pipeproof.views.tables import print_table

    about = (
        ("rank", "whose computations take 1 % longer", delays.ranks),
        ("channel", "whose messages take longer by 1 % of a mean computation", delays.channels),
    )
    for name, how, listed in about:
        if not listed:
            continue
        console.print()
        costly = sorted(listed, key=lambda one: -one.step_us)[:_MOST_ROWS]
        rows = [
            (one.where, _us(one.added_us), _us(one.step_us), f"{float(100 * one.sensitivity):.1f} %")
            for one in listed
            if one in costly
        ]
        console.print(Text(f"a {name} {how}:"))
        print_table((name, ">adds us", ">step longer by us", ">sensitivity"), rows, console)
        if len(listed) > _MOST_ROWS:
            console.print(Text(f"the {_MOST_ROWS} that cost most of {len(listed)}"))
        console.print(Text(_verdict(name, costliest(listed))), soft_wrap=True)


def _verdict(name: str, worst: tuple[Delay, ...]) -> str:
    if not worst:
        return f"the step waits for no {name} that is late by so little"
    others = f", as much as {len(worst) - 1} others" if len(worst) > 1 else ""
    return f"largest sensitivity: {name} {worst[0].where}{others}"


def _us(value: Fraction) -> str:
    """To the nanosecond below a tenth of a second, else to the microsecond."""
    return f"{float(value):.3f}" if value < 100_000 else f"{float(value):.0f}"


def _bounds(estimate: Estimate) -> str:
    low = "-" if estimate.low is None else _us(estimate.low)
    high = "-" if estimate.high is None else _us(estimate.high)
    return f"{low} .. {high}"


def jitter_to_json(runs: JitterRuns, delays: Delays | None, cost_source: CostSource) -> dict[str, Any]:
    """The form of ``jitter --format json``; see ``docs/schemas/jitter.schema.json``."""
    noise = runs.noise
    content: dict[str, Any] = {
        "unit": "us",
        "cost_source": cost_source,
        "noise": {**asdict(noise), "slow": {str(rank): factor for rank, factor in sorted(noise.slow.items())}},
        "engines": sorted(runs.engines),
        "replicas": runs.replicas,
        **number_to_json("undisturbed", runs.undisturbed),
        "confidence": CONFIDENCE,
        "mean": _estimate_to_json(runs.mean),
        "quantiles": [
            {"share": float(share), **_estimate_to_json(estimate)} for share, estimate in runs.quantiles.items()
        ],
        **number_to_json("longest", runs.longest),
        "makespans": [float(makespan) for makespan in runs.makespans],
    }
    if delays is not None:
        content["delays"] = {
            "ranks": [_delay_to_json(delay) for delay in delays.ranks],
            "channels": [_delay_to_json(delay) for delay in delays.channels],
        }
    return content


def _estimate_to_json(estimate: Estimate) -> dict[str, Any]:
    return {
        "value": float(estimate.value),
        "low": None if estimate.low is None else float(estimate.low),
        "high": None if estimate.high is None else float(estimate.high),
    }


def _delay_to_json(delay: Delay) -> dict[str, Any]:
    return {
        "where": delay.where,
        **number_to_json("added", delay.added_us),
        **number_to_json("step_longer", delay.step_us),
        **number_to_json("felt", delay.sensitivity),
    }
