"""The help of all commands: its sections, and an example of each command."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

import click

SECTIONS: Final = (
    ("Prove a plan", ("check", "explain", "show", "schema")),
    ("Start from existing files", ("import", "convert", "describe")),
    ("Predict", ("profile", "simulate", "schedule", "advise", "tune", "sweep", "jitter", "board")),
    ("Execute", ("doctor", "rehearse", "run", "merge", "job-file", "fleet")),
    ("Saved state", ("reshard", "state", "aoa")),
    ("Compare and diagnose", ("compare", "align", "hang")),
    ("Shell", ("completion",)),
)
"""In the order of a first use."""

_OTHERS = "More"

EXAMPLES: Final = MappingProxyType(
    {
        "advise": "pipeproof advise plan.yaml",
        "align": "pipeproof align records/run records/reference",
        "aoa": "pipeproof aoa names.aoa --source states --inverse",
        "board": "pipeproof board --set mlperf --rows",
        "check": "pipeproof check plan.yaml",
        "compare": "pipeproof compare plan.yaml run.json",
        "completion": "pipeproof completion bash",
        "convert": "pipeproof convert schedule.csv --to text",
        "describe": "pipeproof describe plan.yaml --write",
        "doctor": "pipeproof doctor --backend torch",
        "explain": "pipeproof explain PP201",
        "fleet": "pipeproof fleet plan.yaml --report fleet.json",
        "hang": "pipeproof hang dumps/",
        "import": "pipeproof import megatron pretrain.sh -o plan.yaml",
        "jitter": "pipeproof jitter plan.yaml --cv 0.1",
        "job-file": "pipeproof job-file plan.yaml --for slurm -o job.sh",
        "merge": "pipeproof merge node-1/ node-2/ -o timeline.html",
        "profile": "pipeproof profile traces/ --plan plan.yaml -o profile.json",
        "rehearse": "pipeproof rehearse plan.yaml --scale 1/4",
        "reshard": "pipeproof reshard states --to plan_b.yaml -o moved",
        "run": "pipeproof run plan.yaml --report run.json",
        "schedule list": "pipeproof schedule list",
        "schedule show": "pipeproof schedule show zb_v -p 4 -m 8",
        "schedule solve": "pipeproof schedule solve plan.yaml -o solved.csv",
        "schema": "pipeproof schema > plan.schema.json",
        "show": "pipeproof show plan.yaml --rank 0",
        "simulate": "pipeproof simulate plan.yaml -o timeline.html",
        "state": "pipeproof state states/step-00000002 --md5",
        "sweep": "pipeproof sweep sweep.yaml --top 5",
        "tune": "pipeproof tune llama3_70b --gpus 512 --device h100 --global-batch 1024",
    }
)
"""Examples by the words of the command."""


class SectionedGroup(click.Group):
    """A group whose commands have an example each, and are listed in sections with their full first sentence."""

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        """Add a command; its help ends with its example."""
        super().add_command(cmd, name)
        _give_examples(cmd, name or cmd.name or "")

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a list of commands for each section."""
        in_sections = {name for _, names in SECTIONS for name in names}
        others = tuple(name for name in self.list_commands(ctx) if name not in in_sections)
        for title, names in (*SECTIONS, (_OTHERS, others)):
            commands = [(name, self.commands[name]) for name in names if name in self.commands]
            rows = [(name, command.get_short_help_str(limit=200)) for name, command in commands if not command.hidden]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def _give_examples(command: click.Command, words: str) -> None:
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            _give_examples(inner, f"{words} {name}")
    elif words in EXAMPLES:
        command.epilog = f"\b\nExample:\n  {EXAMPLES[words]}"
