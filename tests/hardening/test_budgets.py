"""Budgets for foreign input: small files of hours or gigabytes are refused at once (hardening.md of the results)."""

import json
import pickle
import resource

import pytest

from pipeproof.analysis.align import read_record, training_logs
from pipeproof.analysis.align.read_record import RecordFile
from pipeproof.analysis.align.record_format import AlignmentError
from pipeproof.analysis.align.training_logs import LogForm, read_log
from pipeproof.diagnostics.source import PlanFileError
from pipeproof.foreign_text import MAX_DEPTH
from pipeproof.interop.hang.diagnose_hang import diagnose_dumps
from pipeproof.interop.importers.megatron.launch_script import MAX_EXPANDED, ScriptError, read_script
from pipeproof.interop.importers.tree import read_toml
from pipeproof.interop.traces.trace_log import read_logs
from pipeproof.state.flex import pickles
from pipeproof.state.flex.pickles import read_pickle
from pipeproof.state.state_codes import FlexError
from tests.interop.hang.written import Recorder

DOUBLED_TUPLES = b"\x80\x02" + b")" + b"q\x00h\x00\x86" * 100
"""A tuple of two of the tuple before, 100 times."""
DEEP_TUPLES = b"\x80\x02)" + b"\x85" * 100_000
HOSTILE_PICKLES = {
    "a memo entry of a high number": b"\x80\x02}r\xff\xff\xff\x7f.",
    "doubled tuples": DOUBLED_TUPLES + b".",
    "doubled tuples as a key": b"\x80\x02}" + DOUBLED_TUPLES[2:] + b"K\x01s.",
    "deep tuples": DEEP_TUPLES + b".",
    "deep tuples as a key": b"\x80\x02}" + DEEP_TUPLES[2:] + b"K\x01s.",
    "deep lists": b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "a list in itself": b"\x80\x02]q\x00h\x00a.",
    "a long that is not there": b"\x80\x02\x8b\xff\xff\xff\x7f.",
}
"""Each takes Python's own reader gigabytes, forever, or its life."""


@pytest.fixture
def hang_of(tmp_path):
    """The findings of ``hang`` for a directory with one file."""

    def run(content):
        (tmp_path / "dumps").mkdir(exist_ok=True)
        (tmp_path / "dumps" / "rank_0").write_bytes(content)
        with pytest.raises(PlanFileError) as caught:
            diagnose_dumps(tmp_path / "dumps")
        return caught.value.findings[0]

    return run


@pytest.mark.parametrize("name", HOSTILE_PICKLES)
def test_a_hostile_pickle_is_refused_in_little_memory(tmp_path, name, hang_of):
    (tmp_path / "0.metadata").write_bytes(HOSTILE_PICKLES[name])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if name == "a memo entry of a high number":
        assert read_pickle(tmp_path / "0.metadata") == {}
    else:
        with pytest.raises(FlexError):
            read_pickle(tmp_path / "0.metadata")
    assert hang_of(HOSTILE_PICKLES[name]).code == "PP930"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB


def test_the_operations_of_a_pickle_are_counted(tmp_path, monkeypatch):
    (tmp_path / "x").write_bytes(pickle.dumps([*range(100)], protocol=4))
    monkeypatch.setattr(pickles, "MAX_OPERATIONS", 100)
    with pytest.raises(FlexError, match="more than 100 operations"):
        read_pickle(tmp_path / "x")


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 5000, '{"a": ' * 100_000])
def test_json_in_the_json_of_a_dump(text, hang_of):
    recorder = Recorder(0, {"0": (0,)})
    dump = {"version": "2.10", "pg_config": {"0": {"ranks": text}}, "entries": recorder.entries}
    assert "ranks of group 0" in hang_of(json.dumps(dump).encode()).message
    assert hang_of(b'{"version": ' + text.encode()).code == "PP930"


def test_expansions_of_a_script_are_counted():
    doubling = "A0=xxxxxxxxxx\n" + "".join(f"A{n + 1}=$A{n}$A{n}$A{n}$A{n}\n" for n in range(12))
    with pytest.raises(ScriptError, match=f"{MAX_EXPANDED:,} characters") as caught:
        read_script(doubling, "x.sh")
    assert 5 < caught.value.location.line < 14
    lists = "A=(x y)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 40
    with pytest.raises(ScriptError, match="characters"):
        read_script(lists, "x.sh")


def test_expansions_of_a_script_are_not_nested_without_end():
    with pytest.raises(ScriptError, match="too deeply"):
        read_script("A=" + "${A:-" * 5000 + "}" * 5000, "x.sh")


@pytest.mark.parametrize(
    "text",
    ["a = " + "[" * 5000 + "]" * 5000, "[" + ".".join("a" * 5000) + "]", ".".join("a" * (MAX_DEPTH + 1)) + " = 1",
     "a = " + "9" * 5000],
)  # fmt: skip
def test_toml_is_shallow(tmp_path, text):
    (tmp_path / "job.toml").write_text(text)
    with pytest.raises(PlanFileError) as caught:
        read_toml(tmp_path / "job.toml")
    assert caught.value.findings[0].code == "PP170"


def test_a_line_of_a_record_or_a_log_has_a_limit(tmp_path, monkeypatch):
    for module in (read_record, training_logs):
        monkeypatch.setattr(module, "MAX_LINE", 1000)
    (tmp_path / "record.jsonl").write_text("{" + " " * 5000 + "}\n")
    with pytest.raises(AlignmentError, match="1: the line has more than 1,000 characters"):
        RecordFile(tmp_path / "record.jsonl")
    (tmp_path / "train.log").write_text("step\n" + "loss " * 5000)
    with pytest.raises(AlignmentError, match="2: the line has more than 1,000 characters"):
        list(read_log(tmp_path / "train.log", LogForm()))


def test_a_recording_nested_too_deeply(tmp_path):
    (tmp_path / "rank_0.jsonl").write_text("[" * 100_000 + "\n")
    with pytest.raises(PlanFileError) as caught:
        read_logs(tmp_path)
    assert (caught.value.findings[0].code, caught.value.findings[0].location.line) == ("PP940", 1)
