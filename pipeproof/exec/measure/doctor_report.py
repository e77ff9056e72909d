"""Doctor's report for the terminal and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pipeproof.exec.measure.doctor import DoctorReport, value_text

if TYPE_CHECKING:
    from rich.console import Console

    from pipeproof.exec.measure.link_curve import Curve, LinkFit


def doctor_to_json(report: DoctorReport) -> dict[str, Any]:
    """Return the report as JSON data; see ``docs/schemas/doctor.schema.json``."""
    return {
        "backend": report.backend,
        "device": report.device,
        "exit_status": report.exit_status,
        "versions": dict(report.versions),
        "devices": [dict(device) for device in report.devices],
        "links": [asdict(link) for link in report.links],
        "ranks": [dict(facts) for facts in report.facts],
        "rows": [asdict(row) for row in report.rows],
        "not_measured": [
            {"key": row.key, "value": row.value, "meaning": row.meaning, "source": row.source}
            for row in report.not_measured
        ],
        "curve": None if report.curve is None else _curve_to_json(report.curve),
        "network": report.network,
        "problems": list(report.problems),
        "notes": list(report.notes),
    }


def _curve_to_json(curve: Curve) -> dict[str, Any]:
    lines: Mapping[str, LinkFit] = (
        {"forward": curve.forward, "backward": curve.backward, "both": curve.both} if curve.points else {}
    )
    return {
        "points": [
            {"bytes": p.num_bytes, "forward_us": p.forward_us, "backward_us": p.backward_us, "both_us": p.both_us}
            for p in curve.points
        ],
        "lines": {name: asdict(line) for name, line in lines.items()},
        "ended": curve.ended,
    }


def render_doctor(report: DoctorReport, console: Console) -> None:
    """Print the report: versions, devices, the table of rows, the curve, then notes and problems."""
    from rich.text import Text

    for name, value in report.versions.items():
        console.print(Text(f"{name:<12} {value}"))
    _render_devices(report, console)
    if report.rows:
        _render_rows(report, console)
    if report.curve is not None and report.curve.points:
        _render_curve(report.curve, report, console)
    console.print()
    for note in report.notes:
        console.print(Text(f"note: {note}"))
    for problem in report.problems:
        console.print(Text.assemble(("problem: ", "bold red"), problem))
    if not report.problems:
        console.print(Text(f"{report.backend} behaves as plans assume.", style="green"))


def _render_devices(report: DoctorReport, console: Console) -> None:
    from rich.text import Text

    for device in report.devices:
        parts = {
            "memory": "",
            "clock": "now ",
            "max_clock": "at most ",
            "power_limit": "power limit ",
            "driver": "driver ",
        }
        properties = ", ".join(f"{label}{device[key]}" for key, label in parts.items() if key in device)
        console.print(Text(f"GPU {device.get('index', '?'):<8} {device.get('name', '')}: {properties}"))
    for rank, facts in enumerate(report.facts):
        if "device" in facts:
            console.print(Text(f"{f'rank {rank}':<12} {facts['device']}"))
    for link in report.links:
        meaning = f" ({link.meaning})" if link.meaning else ""
        console.print(Text(f"{f'{link.first} - {link.second}':<12} {link.kind}{meaning}"))


def _render_rows(report: DoctorReport, console: Console) -> None:
    from rich.text import Text

    from pipeproof.views.tables import print_table

    console.print()
    console.print(Text(f"{report.backend}, measured with two processes of this machine", style="bold"))
    marks = {True: Text("ok", style="green"), False: Text("DIFFERS", style="bold red")}
    rows = [(marks[row.ok], row.key, value_text(row.expected), value_text(row.observed)) for row in report.rows]
    print_table(("", "behaviour", "table", "measured"), rows, console)
    console.print()
    for cited in report.not_measured:
        console.print(Text(f"not measured: {cited.key} = {value_text(cited.value)} ({cited.source})"))


def _render_curve(curve: Curve, report: DoctorReport, console: Console) -> None:
    from rich.text import Text

    from pipeproof.views.tables import print_table

    console.print()
    console.print(Text("messages between the two, one at a time; `both` at once, GB/s in each direction", style="bold"))
    ways, rows = ("0 -> 1", "1 -> 0", "both"), []
    for point in curve.points:
        times = (point.forward_us, point.backward_us, point.both_us)
        cells = (cell for us in times for cell in (f"{us:.1f}", f"{point.num_bytes / us / 1000:.3g}"))
        rows.append((str(point.num_bytes), *cells))
    print_table((">bytes", *(f">{way} {unit}" for way in ways for unit in ("us", "GB/s"))), rows, console)
    for way, line in zip(ways, (curve.forward, curve.backward, curve.both), strict=True):
        fit = f"{line.latency_us:g} us and {line.bandwidth:g} GB/s, off by at most {line.residual:.0%}"
        console.print(Text(f"{way:<6} line: {fit}"))
    if report.network is not None:
        node = report.network["node"]
        section = (
            f"{{ranks_per_node: {report.network['ranks_per_node']}, node: "
            f"{{latency_us: {node['latency_us']:g}, bandwidth: {node['bandwidth']:g}}}}}"
        )
        console.print(Text(f"in a plan on this machine: cost: {{network: {section}}}"), soft_wrap=True)
