"""Fleet strategies: prototxt with its omitted defaults, objects, the five conditions, and the cost of each fix."""

import json
import re
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.diagnostics.source import PlanFileError
from pipeproof.diagnostics.units import size_text
from pipeproof.interop import check_imported, from_strategy
from pipeproof.interop.importers.paddle.fleet_strategy import parse_prototxt
from pipeproof.schedule.op_table import NONE
from pipeproof.schedule.ops import OpKind
from pipeproof.specs.axis_layout import dtype_bytes
from pipeproof.verify.provenance import DATA_SENDS
from tests.interop.importing import codes, imported, judged, refusal

pytestmark = pytest.mark.usefixtures("known_notes")

SEQUENCE_PARALLEL = {("topology", "sequence_parallel"): True}
BARE = """pipeline_configs {
  micro_batch_size: 2
  accumulate_steps: 8
}
hybrid_configs {
  mp_degree: 2
  pp_degree: 4
}
"""


def fleet(path, text, flags=None, **more):
    return judged("fleet", path, text, name="strategy.prototxt", settings=flags or {}, **more)


MAPPINGS = {
    "pipeline_configs": {"micro_batch_size": 2, "accumulate_steps": 8, "enable_partial_send_recv": False},
    "hybrid_configs": {"mp_degree": 2, "pp_degree": 4, "pp_configs": {"use_batch_p2p_comm": True}},
}
FORMS = {
    "strategy.json": json.dumps(MAPPINGS),
    "strategy.yaml": yaml.safe_dump(MAPPINGS),
    "strategy.txt": repr(MAPPINGS),
}


@pytest.mark.parametrize("name", FORMS)
def test_mappings_are_read_as_the_saved_strategy(tmp_path, name):
    saved = BARE.replace("steps: 8", "steps: 8\n  enable_partial_send_recv: false")
    saved = saved.replace("pp_degree: 4\n", "pp_degree: 4\n  pp_configs {\n    use_batch_p2p_comm: true\n  }\n")
    expected = imported("fleet", tmp_path, saved, name="strategy.prototxt", settings=SEQUENCE_PARALLEL)
    given = imported("fleet", tmp_path, FORMS[name], name=name, settings=SEQUENCE_PARALLEL)
    assert given.plan == expected.plan
    wrong = FORMS[name].replace("mp_degree", "mp_degre")
    finding = refusal(imported, "fleet", tmp_path, wrong, name=name, settings={})
    assert finding.help == "did you mean `mp_degree`?"
    line, column = finding.location.line - 1, finding.location.column - 1
    assert wrong.splitlines()[line][column:].lstrip("\"'").startswith("mp_degre")


def test_a_python_file_is_refused_with_the_two_lines_to_run(tmp_path):
    finding = refusal(imported, "fleet", tmp_path, "strategy = DistributedStrategy()\n", name="train.py", settings={})
    python, command = re.findall("`([^`]*)`", finding.help)
    assert python == 'strategy.save_to_prototxt("strategy.prototxt")'
    assert command == "pipeproof check --from fleet strategy.prototxt"


def with_pp(line):
    return BARE.replace("pp_degree: 4\n", f"pp_degree: 4\n  pp_configs {{\n    {line}\n  }}\n")


def test_partial_sends_are_on_where_the_text_says_nothing(tmp_path):
    report = fleet(tmp_path, BARE, SEQUENCE_PARALLEL)
    found = [finding for finding in report.findings if finding.code == "PP201"]
    assert len(found) == 6  # three boundaries, both ways
    assert found[0].location.line == 1  # the message that leaves the switch out
    assert "`enable_partial_send_recv: false`" in found[0].help


@pytest.mark.parametrize(
    "text",
    [
        BARE.replace("accumulate_steps: 8", "accumulate_steps: 8 enable_partial_send_recv: false"),
        BARE.replace("mp_degree: 2", "mp_degree: 1"),
        with_pp("use_batch_p2p_comm: false"),
        with_pp("overlap_p2p_comm: true"),
        with_pp("use_dualpipev: true"),
    ],
    ids=["switch", "one TP rank", "not batched", "overlapped", "DualPipeV"],
)
def test_with_one_of_the_five_conditions_less_nothing_is_corrupted(tmp_path, text):
    assert not fleet(tmp_path, text, SEQUENCE_PARALLEL).errors


def test_a_tensor_that_does_not_divide_is_sent_whole(tmp_path):
    text = BARE.replace("mp_degree: 2", "mp_degree: 4").replace("micro_batch_size: 2", "micro_batch_size: 1")
    sizes = {("model", "seq_length"): 4, ("model", "hidden_size"): 20, ("model", "head_size"): 8}
    assert fleet(tmp_path, text, SEQUENCE_PARALLEL | sizes).errors  # 20 elements, 5 for each of 4 ranks
    report = fleet(tmp_path, text, SEQUENCE_PARALLEL | sizes | {("model", "hidden_size"): 18})
    assert codes(report) == ["PP202"]


def test_a_verdict_that_hangs_on_what_a_strategy_leaves_open_is_undecided(tmp_path):
    report = fleet(tmp_path, BARE)
    assert codes(report) == ["PP176"]
    assert (report.verdict.value, report.certificate) == ("undecided", None)
    (finding,) = (finding for finding in report.findings if finding.code == "PP176")
    assert "false: proved; true: refused" in finding.message
    assert "(PP201)" in finding.message
    assert "--set topology.sequence_parallel=true" in finding.help
    assert "enable_partial_send_recv: false" in finding.help
    off = BARE.replace("accumulate_steps: 8", "accumulate_steps: 8 enable_partial_send_recv: 0")
    assert codes(fleet(tmp_path, off)) == []
    assert fleet(tmp_path, off).verdict.value == "proved"


def strategy(**changes):
    pp_configs = {"use_batch_p2p_comm": True, "overlap_p2p_comm": False, **changes.pop("pp_configs", {})}
    pipeline = {"micro_batch_size": 2, "accumulate_steps": 8, "enable_partial_send_recv": True}
    hybrid = {"dp_degree": -1, "mp_degree": 2, "pp_degree": 4, "pp_configs": SimpleNamespace(**pp_configs)}
    return SimpleNamespace(pipeline_configs=pipeline | changes, hybrid_configs=hybrid)


def test_an_object_is_read_by_its_mappings():
    assert check_imported(from_strategy(strategy(), sequence_parallel=True)).errors
    assert check_imported(from_strategy(strategy())).verdict.value == "undecided"
    off = strategy(enable_partial_send_recv=False)
    assert codes(check_imported(from_strategy(off, sequence_parallel=True))) == []
    virtual = check_imported(from_strategy(strategy(), sequence_parallel=False, num_chunks=2))
    assert virtual.subject.plan.spec.schedule.variant == "fleet"
    assert virtual.subject.plan.spec.num_stages == 8
    with pytest.raises(PlanFileError, match=r"PP170.*of type int"):
        from_strategy(strategy(accumulate_steps="8"))


@pytest.mark.needs_paddle
def test_paddles_own_strategy_says_the_same_as_its_text(tmp_path):
    from paddle.distributed import fleet as paddle_fleet

    own = paddle_fleet.DistributedStrategy()
    own.pipeline_configs = {"accumulate_steps": 8, "micro_batch_size": 2}
    own.hybrid_configs = {"dp_degree": 1, "mp_degree": 2, "pp_degree": 4, "pp_configs": {"use_batch_p2p_comm": True}}
    file = tmp_path / "saved.prototxt"
    own.save_to_prototxt(str(file))
    from_object = from_strategy(own, sequence_parallel=True)
    from_text = imported("fleet", tmp_path, file.read_text(encoding="utf-8"), settings=SEQUENCE_PARALLEL)
    assert from_object.plan == from_text.plan
    assert len(check_imported(from_object).errors) == 6


def bytes_moved(report):
    """Bytes of all sends between stages, and bytes that all-gathers bring each rank in addition to its slice."""
    graph = report.subject.unfolded().graph
    num_tp = report.subject.plan.spec.topology.tp
    sends = np.flatnonzero(graph.is_kind(DATA_SENDS) & (graph.tensor != NONE))
    gathers = np.flatnonzero(graph.is_kind((OpKind.GATHER_FORWARD, OpKind.GATHER_BACKWARD)))
    sent = sum(int(graph.stop[row] - graph.start[row]) * size_of(graph, row) for row in sends)
    gathered = sum(tensor_of(graph, row).numel * (num_tp - 1) // num_tp * size_of(graph, row) for row in gathers)
    return sent, gathered


def tensor_of(graph, row):
    return graph.tensors[int(graph.tensor[row])]


def size_of(graph, row):
    return dtype_bytes(tensor_of(graph, row).dtype)


def figures(text):
    """Sizes between stages and in all-gathers of each of the four modes, in the suggested fix."""
    found = []
    for line in text.split("\n")[1:]:
        sent = re.search(r"([\d.]+ \w+) between stages", line)[1]
        gathered = re.search(r"([\d.]+ \w+) in all-gathers", line)
        found.append((sent, gathered[1] if gathered else size_text(0)))
    return found


@pytest.mark.parametrize("tp", [2, 4])
def test_the_mend_counts_the_bytes_that_plans_move(tmp_path, tp):
    text = BARE.replace("mp_degree: 2", f"mp_degree: {tp}").replace("pp_degree: 4", "pp_degree: 2")
    report = fleet(tmp_path, text, SEQUENCE_PARALLEL)
    helps = [finding.help for finding in report.errors]
    assert [len(text.split("\n")) for text in helps] == [5, 1]  # said once
    ways = [(True, "full"), (True, "partial"), (False, "partial"), (False, "full")]
    for (sequence_parallel, transport), figure in zip(ways, figures(helps[0]), strict=True):
        flags = {
            ("topology", "sequence_parallel"): sequence_parallel,
            ("transport", "forward"): transport,
            ("transport", "backward"): transport,
            ("model", "seq_length"): 128 * tp,
        }
        moved = tuple(map(size_text, bytes_moved(fleet(tmp_path, text, flags))))
        assert moved == figure, (sequence_parallel, transport)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("pipeline_configs {", 1, "`}` is expected"),
        ("pipeline_configs {\n accumulate_steps 8 }", 2, "`:` or `{`"),
        ("pipeline_config { }", 1, "no field `pipeline_config`"),
        ("pipeline_configs { accumulate_step: 8 }", 1, "did you mean `accumulate_steps`?"),
        ("hybrid_configs {\n pp_configs { overlap: true } }", 2, "`pp_configs` has no field"),
        ("pipeline_configs { accumulate_steps: eight }", 1, "must be a whole number"),
        ("pipeline_configs { accumulate_steps: 8\n accumulate_steps: 4 }", 2, "is repeated here"),
        ("pipeline_configs { p2p_cache_shape: yes }", 1, "must be true or false"),
        ("hybrid_configs: 3", 1, "must be a message"),
        ("amp: [true]", 1, "not valid in protobuf's text format"),
        ("amp: }", 1, "a value is expected"),
        ("# nothing\n", 1, "no field of a strategy"),
        ("qat_configs {" * 20, 1, "more than 16 nested messages"),
    ],
)
def test_a_text_that_is_no_strategy(tmp_path, text, line, words):
    finding = refusal(fleet, tmp_path, text)
    assert finding.code == "PP170"
    assert words in f"{finding.message} {finding.help}"
    assert finding.location.line == line


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("pp_degree: 4 dp_degree: 0", "not a number of ranks"),
        ("pp_degree: 4 pp_configs { use_dualpipev: true } # of 4 ranks", "DualPipeV on 4 ranks"),
    ],
)
def test_what_fleet_refuses(tmp_path, line, words):
    text = BARE.replace("pp_degree: 4", line).replace("accumulate_steps: 8", "accumulate_steps: 6")
    with pytest.raises(PlanFileError, match="PP171") as caught:
        fleet(tmp_path, text)
    assert words in caught.value.findings[0].message


_NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True)
_INTEGERS = st.integers(-(2**63), 2**63 - 1)
_TREES = st.recursive(_INTEGERS, lambda inner: st.dictionaries(_NAMES, inner, max_size=4), max_leaves=12)


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(_NAMES, _TREES, max_size=4), st.sampled_from([" ", "\n", " # x\n"]))
def test_what_is_written_is_read(fields, space):
    def text(tree):
        return space.join(
            f"{name} {{{space}{text(value)}{space}}}" if isinstance(value, dict) else f"{name}: {value}"
            for name, value in tree.items()
        )

    def data(strategy, *path):
        return {
            name: data(strategy, *path, name) if (value := strategy.get(*path, name)) is None else value.value
            for name in strategy.names(*path)
        }

    assert data(parse_prototxt(text(fields), "f")) == fields


@settings(deadline=None, max_examples=100)
@given(st.text(alphabet="ab{}<>:;,\"'#1.-\n \\", max_size=30))
def test_any_text_is_read_or_refused_with_a_place(text):
    with suppress(PlanFileError):
        assert parse_prototxt(text, "f").source.file == "f"
