"""Plans from files and dicts: plans that load, refusals, and no other error ever comes out."""

import errno
import json
import os
from fractions import Fraction
from types import MappingProxyType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeproof.diagnostics.finding import BadPlanError
from pipeproof.diagnostics.source import MAX_BYTES, PlanFileError
from pipeproof.specs.load_plan import load_plan, plan_from_dict
from pipeproof.specs.plan import PlanSpec
from pipeproof.specs.section import sections_in
from tests.specs.plans import EXAMPLE, example, outcome


@pytest.fixture
def write(tmp_path):
    def write(content, name="plan.yaml"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def refused(data):
    with pytest.raises(BadPlanError) as caught:
        plan_from_dict(data)
    assert all(finding.location is None for finding in caught.value.findings)
    return [(finding.code, finding.message) for finding in caught.value.findings]


def test_example_with_its_defaults(write):
    loaded = load_plan(write(EXAMPLE))
    spec = loaded.spec
    assert spec.topology.num_ranks == 4
    assert spec.topology.order == ("tp", "cp", "ep", "dp", "pp")
    assert spec.model.activation_order == "sbh"
    assert spec.loss.normalization == "global_tokens"
    assert spec.cost.p2p == "async"
    assert spec.run.optimizer == "adamw"
    assert spec.run.seed == 7
    assert spec.stages is None
    assert loaded.source.locate(("run", "seed")).line == 8


def test_json_and_dict_give_the_same_plan(write):
    data = example()
    from_yaml = load_plan(write(EXAMPLE)).spec
    assert load_plan(write(json.dumps(data, indent="\t"), "plan.json")).spec == from_yaml
    assert plan_from_dict(data).spec == from_yaml
    assert plan_from_dict(MappingProxyType({k: MappingProxyType(v) if isinstance(v, dict) else v
                                            for k, v in data.items()})).spec == from_yaml  # fmt: skip
    assert plan_from_dict(data).source is None


def test_byte_order_mark_is_no_text(write):
    loaded = load_plan(write(b"\xef\xbb\xbf" + EXAMPLE.encode()))
    assert loaded.source.locate(("pipeproof",)).column == 12


def test_plain_string_sets_both_directions():
    transport = plan_from_dict(example(transport="partial")).spec.transport
    assert (transport.forward, transport.backward) == ("partial", "partial")


def test_neutral_values_of_later_features_are_accepted():
    neutral = example(
        model={"tied_embedding": False},
        topology={"cp": 1, "ep": 1},
        schedule={"num_chunks": 1, "num_sequence_splits": 1, "placement": None, "variant": None},
        transport={"connections": "warm", "recv_order": "just_in_time"},
    )
    assert plan_from_dict(neutral).spec == plan_from_dict(example()).spec


def test_sequence_parallel_without_tensor_parallel_is_accepted():
    assert plan_from_dict(example(model={"seq_length": 31}, topology={"tp": 1})).spec.topology.sequence_parallel


# Times


@pytest.mark.parametrize(
    ("written", "exact"),
    [(100, Fraction(100)), (0.1, Fraction(1, 10)), (1e-3, Fraction(1, 1000)), ("1/3", Fraction(1, 3)),
     (Fraction(2, 7), Fraction(2, 7)), (1e12, Fraction(10**12)), ("00001/3", Fraction(1, 3))],
)  # fmt: skip
def test_times_are_exact(written, exact):
    cost = plan_from_dict(example(cost={"forward_us": written})).spec.cost
    assert cost.forward_of(0) == cost.forward_of(1) == exact
    assert isinstance(cost.forward_of(0), Fraction)


def test_times_by_stage():
    cost = plan_from_dict(example(cost={"forward_us": [1, "1/2"], "backward_us": (0, 0.25)})).spec.cost
    assert [cost.forward_of(s) for s in (0, 1)] == [1, Fraction(1, 2)]
    assert [cost.backward_of(s) for s in (0, 1)] == [0, Fraction(1, 4)]


def test_backward_time_in_two_parts_or_by_default():
    parts = {"backward_us": None, "backward_input_us": [1, 2], "backward_weight_us": "1/2"}
    cost = plan_from_dict(example(cost=parts)).spec.cost
    assert [cost.backward_of(s) for s in (0, 1)] == [Fraction(3, 2), Fraction(5, 2)]
    assert plan_from_dict(example(cost={"backward_us": None})).spec.cost.backward_of(1) == 200


@pytest.mark.parametrize(
    ("written", "code"),
    [(0, "PP106"), (-1, "PP106"), (float("nan"), "PP106"), (float("inf"), "PP106"), (10**13, "PP106"),
     (1e-300, "PP106"), (f"1/{10**13}", "PP106"), (True, "PP105"), ("100", "PP105"), ("1/0", "PP105"),
     ("1 / 3", "PP105"), ("-1/3", "PP105"), ("1/3\n", "PP105"), ("\u0661/\u0663", "PP105"),
     ("1/" + "9" * 5000, "PP105"),
     (None, "PP105"), ({}, "PP105"), ([1, [2]], "PP105"), ([], "PP109"), ([1], "PP109")],
)  # fmt: skip
def test_bad_forward_times(written, code):
    assert [found for found, _ in refused(example(cost={"forward_us": written}))] == [code]


def test_a_latency_may_be_zero_and_is_no_list():
    assert plan_from_dict(example(cost={"p2p_latency_us": 0})).spec.cost.p2p_latency_us == 0
    assert refused(example(cost={"p2p_latency_us": [1, 2]}))[0][0] == "PP105"


# Round trip

times = st.fractions(min_value=Fraction(1, 1000), max_value=10**6, max_denominator=10**6)


@settings(max_examples=40, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4]), pp=st.integers(1, 4), sp=st.booleans(),
    order=st.permutations(["tp", "cp", "ep", "dp", "pp"]),
    transport=st.sampled_from(["full", "partial", {"forward": "partial"}, {"backward": "partial"}]),
    data=st.data(), rate=st.floats(1e-6, 1e3), seed=st.integers(0, 2**63 - 1),
)  # fmt: skip
def test_dump_loads_to_an_equal_plan(tmp_path_factory, tp, pp, sp, order, transport, data, rate, seed):
    by_stage = st.one_of(times, st.lists(times, min_size=pp, max_size=pp))
    cost = {
        "forward_us": data.draw(by_stage),
        "backward_us": data.draw(by_stage),
        "p2p_latency_us": data.draw(times),
    }
    plan = example(
        topology={"tp": tp, "pp": pp, "sequence_parallel": sp, "order": order},
        transport=transport,
        cost=cost,
        run={"learning_rate": rate, "seed": seed},
        stages=data.draw(st.none() | st.lists(st.lists(st.text(min_size=1)), min_size=pp, max_size=pp)),
    )
    spec = plan_from_dict(plan).spec
    text = json.dumps(spec.model_dump(mode="json"))
    assert plan_from_dict(json.loads(text)).spec == spec
    path = tmp_path_factory.mktemp("dump") / "plan.json"
    path.write_text(text)
    assert load_plan(path).spec == spec


# Refusals


def test_all_findings_come_at_once():
    plan = example(model={"num_heads": "4"}, run={"seed": -1, "sead": 1}, topology={"pp": 0})
    assert sorted(code for code, _ in refused(plan)) == ["PP102", "PP105", "PP106", "PP106"]


def test_a_misspelt_key_is_not_also_missing():
    plan = example()
    plan["shedule"] = plan.pop("schedule")
    assert [code for code, _ in refused(plan)] == ["PP102"]


@pytest.mark.parametrize("data", [None, [], "x", 3])
def test_a_plan_is_a_mapping(data):
    assert [code for code, _ in refused(data)] == ["PP105"]


@pytest.mark.parametrize("value", [0, 1, 1.0, "false", None])
def test_only_false_is_false(value):
    assert [code for code, _ in refused(example(model={"tied_embedding": value}))] == ["PP105"]


@pytest.mark.parametrize("value", [True, 1.0, "1"])
def test_only_one_is_one(value):
    assert [code for code, _ in refused(example(pipeproof=value))] == ["PP105"]


def test_python_values_that_no_file_has():
    findings = refused(example(topology={"pp": object(), 3: 4}, stages={"a": 1}))
    assert sorted(code for code, _ in findings) == ["PP102", "PP105", "PP105"]


def test_a_spec_cannot_be_changed():
    spec = plan_from_dict(example()).spec
    with pytest.raises(ValueError, match="frozen"):
        spec.topology.pp = 4


def test_divisors_of_large_primes_are_found_quickly():
    prime = 67_108_859  # the largest below the bound of vocab_size
    codes = refused(example(model={"vocab_size": prime}, topology={"tp": 4}))
    assert [code for code, _ in codes] == ["PP108"]


# Files that cannot be read


def code_of(path):
    with pytest.raises(BadPlanError) as caught:
        load_plan(path)
    (finding,) = caught.value.findings
    return finding


def test_unreadable_files(tmp_path, write):
    assert "no such file" in code_of(tmp_path / "nothing.yaml").message
    assert "is a directory" in code_of(tmp_path).message
    assert "null" in code_of("a\0b").message
    assert str(MAX_BYTES) in code_of(write(b"#" * (MAX_BYTES + 1))).message
    for finding in (code_of(tmp_path / "nothing.yaml"), code_of(tmp_path)):
        assert finding.code == "PP100"
        assert finding.location is None


def test_forbidden_file(write, monkeypatch):
    path = write(EXAMPLE)
    path.chmod(0)
    if os.geteuid() == 0:  # root may read every file: simulate the system's answer to others

        def refuse(path, *options, **named):
            if str(path) == str(denied):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return opened(path, *options, **named)

        denied, opened = path, os.open
        monkeypatch.setattr(os, "open", refuse)
    assert "permission denied" in code_of(path).message


def test_bytes_that_are_no_text(write):
    finding = code_of(write(b"pipeproof: 1\nrun: {\xff}\n"))
    assert finding.code == "PP100"
    assert "0xff" in finding.message
    assert (finding.location.line, finding.location.column) == (2, 7)
    assert code_of(write("pipeproof: 1".encode("utf-16"))).code == "PP100"


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "null"])
def test_empty_files(write, text):
    finding = code_of(write(text))
    assert finding.code == "PP105"
    assert "empty" in finding.message
    assert (finding.location.line, finding.location.column) == (1, 1) or text == "---\n"


def test_the_error_carries_the_source(write):
    with pytest.raises(PlanFileError) as caught:
        load_plan(write("pipeproof: 2"))
    assert caught.value.source.lines == ("pipeproof: 2",)


# Whatever is done to a plan


@st.composite
def mutations(draw):
    text = EXAMPLE
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        stop = start + draw(st.integers(0, 6))
        junk = st.text(alphabet="abz_019 .:,-{}[]\"'&*!|>#%\n\t?~é\x00", max_size=4) | st.just(text[start:stop] * 2)
        text = text[:start] + draw(junk) + text[stop:]
    return text


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mutations())
def test_mutated_plans_load_or_are_refused_with_places(tmp_path, text):
    path = tmp_path / "plan.yaml"
    path.write_bytes(text.encode())
    spec, refusal = outcome(load_plan, path)
    if spec is not None:
        return
    assert refusal.findings
    lines = refusal.source.lines
    for finding in refusal.findings:
        assert finding.message
        assert finding.location.file == str(path)
        assert 1 <= finding.location.line <= len(lines)
        assert 1 <= finding.location.column <= len(lines[finding.location.line - 1]) + 1
    places = [(finding.location.line, finding.location.column) for finding in refusal.findings]
    assert places == sorted(places)


junk_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("1/2"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_junk_anywhere_in_a_dict_is_refused_or_loads(data):
    plan = example(stages=[["a"], ["b"]], loss={})
    section = data.draw(st.sampled_from(sorted(plan)))
    value = data.draw(junk_values)
    if isinstance(plan[section], dict):
        sections = sections_in(PlanSpec.model_fields[section].annotation)
        fields = {name for one in sections for name in one.model_fields}
        plan[section][data.draw(st.sampled_from(sorted(fields)) | st.text(max_size=8))] = value
    else:
        plan[section] = value
    spec, refusal = outcome(plan_from_dict, plan)
    if spec is None:
        assert refusal.findings
    else:
        assert plan_from_dict(spec.model_dump(mode="json")).spec == spec
