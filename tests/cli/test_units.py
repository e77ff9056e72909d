"""Times and sizes in the output of commands: a unit, and at most three significant digits."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeproof.cli.main import main

EXAMPLES = Path(__file__).parents[2] / "examples"
PLANS = sorted(path for folder in (EXAMPLES, EXAMPLES / "alignment") for path in folder.glob("*.yaml"))
PLAN = str(EXAMPLES / "gpt_pp4.yaml")
COMMANDS = [
    *(f"{command} {plan}" for plan in PLANS for command in ("check", "simulate", "show")),
    f"show {EXAMPLES / 'moe_overlap.yaml'} --costs",
    f"show {EXAMPLES / 'published' / 'llama3_405b.yaml'} --costs",
    f"show {PLAN} --memory", f"simulate {PLAN} --set memory.budget_gib=1 --set memory.overhead_gib=0.1",
    f"check {PLAN} --set memory.budget_gib=0.0001", f"schedule show {PLAN}",
    f"simulate {EXAMPLES / 'schedules' / 'zbv_pp2.csv'}", f"compare {EXAMPLES / 'schedules' / 'zbv_pp2.csv'} zb_v",
    f"compare {PLAN} {PLAN} --set cost.forward_us=12345", f"tune {PLAN}",
    f"tune {PLAN} --gpus 4 --device h100 --global-batch 8 --workers 1 --top 3",
    f"sweep {PLAN} --set schedule.kind=[1f1b,gpipe] --set cost.forward_us=[123456.5] --workers 1",
    f"simulate {EXAMPLES / 'importing' / 'megatron.sh'} --device h100",
    f"check --from fleet {EXAMPLES / 'importing' / 'strategy.prototxt'} --set topology.sequence_parallel=true",
    f"job hang {EXAMPLES / 'importing' / 'dumps'}",
]  # fmt: skip
QUANTITY = re.compile(r"(?<![\w.,\[=:])[+-]{0,2}([\d,]*\d(?:\.\d+)?) (us|ms|s|B|KiB|MiB|GiB)\b(?! \d)")
RAW = re.compile(r"\b\d{4,}(?:\.\d+)? (?:us|bytes)\b")


def broken(text):
    for match in QUANTITY.finditer(text):
        digits = match[1].replace(".", "").replace(",", "").lstrip("0")
        if len(digits if "." in match[1] else digits.rstrip("0")) > 3 or (match[2] in ("us", "B") and len(digits) > 3):
            yield match[0]
    yield from RAW.findall(text)


@pytest.mark.slow(but=COMMANDS[-13:])
@pytest.mark.parametrize("command", COMMANDS, ids=COMMANDS)
def test_a_command_prints_times_and_sizes_with_three_digits(command):
    result = CliRunner(env={"COLUMNS": "200"}).invoke(main, command.split())
    assert result.exit_code in (0, 1), result.output
    assert [*broken(result.stdout)] == []


@pytest.mark.parametrize("text", ["3300 us", "12.345 ms", "1234 MiB", "536870912 bytes", "0.1234 s", "+12.34 ms"])
def test_the_rule_finds_what_it_is_for(text):
    assert [*broken(f"it takes {text} in all")]
