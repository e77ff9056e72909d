"""Every file in ``broken/`` is refused with exactly the codes and places that its first lines expect."""

import re
from pathlib import Path

import pytest

from pipeproof.diagnostics.finding import BadPlanError, Severity
from pipeproof.specs.load_plan import load_plan

BROKEN = sorted((Path(__file__).parent / "broken").glob("*.yaml"))
EXPECT = re.compile(r"^# expect (PP\d{3}) (\d+):(\d+)$", re.MULTILINE)


def refusal(path):
    with pytest.raises(BadPlanError) as caught:
        load_plan(path)
    return caught.value


def test_there_are_enough_of_them():
    assert len(BROKEN) >= 25
    codes = {match[1] for path in BROKEN for match in EXPECT.finditer(path.read_text())}
    assert codes == {f"PP{number}" for number in range(101, 110) if number != 107}


@pytest.mark.parametrize("path", BROKEN, ids=lambda path: path.stem)
def test_findings_and_places(path):
    expected = [(code, int(line), int(column)) for code, line, column in EXPECT.findall(path.read_text())]
    findings = refusal(path).findings
    assert [(f.code, f.location.line, f.location.column) for f in findings] == expected
    for finding in findings:
        assert finding.severity is Severity.ERROR
        assert finding.location.file == str(path)


HELP = {
    "unknown_key": "did you mean `num_layers`?",
    "unknown_key_of_another_section": "did you mean `model.hidden_size`?",
    "unknown_key_deep_inside": "did you mean `latency_us`?",
    "unknown_section": "did you mean `topology`?",
    "unknown_key_without_near_miss": "known here: backend, device",
    "no_space_after_colon": "a space after the colon",
    "quoted_number": "remove the quotes",
    "float_for_integer": "write 4",
    "yes_is_a_string": "write true",
    "wrong_enum": "did you mean `global_tokens`?",
    "plain_transport_misspelt": "did you mean `partial`?",
    "heads_do_not_divide": "model.hidden_size to 64 or 72, or model.num_heads to 3 or 11",
    "odd_head_size": "model.hidden_size to 56 or 64, or model.num_heads to 3 or 5",
    "tp_does_not_divide": "set model.num_heads to 3 or 6, or topology.tp to 2 or 4",
    "missing_version": "add `pipeproof: 1`",
    "tab_indentation": "write spaces",
    "unclosed_brace": "close the brace",
}


@pytest.mark.parametrize("name", HELP)
def test_help(name):
    findings = refusal(BROKEN[0].with_name(f"{name}.yaml")).findings
    assert HELP[name] in findings[0].help


def test_messages_carry_the_numbers():
    messages = [f.message for f in refusal(BROKEN[0].with_name("tp_does_not_divide.yaml")).findings]
    for message, size in zip(messages, ("num_heads 4", "ffn_size 128", "vocab_size 256", "seq_length 32"), strict=True):
        assert size in message
        assert "topology.tp 3" in message
