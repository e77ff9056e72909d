"""Doctor's report for the terminal and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pipeproof.exec.measure.doctor import DoctorReport, value_text

if TYPE_CHECKING:
    from rich.console import Console


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
        "problems": list(report.problems),
        "notes": list(report.notes),
    }


def render_doctor(report: DoctorReport, console: Console) -> None:
    """Print the report: versions, devices, the table of rows, then notes and problems."""
    from rich.text import Text

    for name, value in report.versions.items():
        console.print(Text(f"{name:<12} {value}"))
    _render_devices(report, console)
    if report.rows:
        _render_rows(report, console)
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
