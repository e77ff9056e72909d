"""Quantiles, histogram, output of ``pipeproof schedule jitter``."""

import json
import re
import shlex
from fractions import Fraction
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from scipy import stats

from pipeproof.analysis.jitter.histogram import histogram
from pipeproof.analysis.jitter.quantiles import mean, quantile
from pipeproof.cli.main import main
from tests.plans import plan_dict

ROOT = Path(__file__).parents[2]
values = st.lists(st.builds(Fraction, st.integers(0, 50), st.integers(1, 3)), min_size=1, max_size=60)


@given(sample=values, share=st.integers(1, 99))
@settings(deadline=None)
def test_a_quantile_is_the_smallest_value_that_the_share_does_not_exceed(sample, share):
    ordered = sorted(sample)
    value = quantile(ordered, Fraction(share, 100)).value
    assert 100 * sum(one <= value for one in sample) >= share * len(sample)
    assert 100 * sum(one < value for one in sample) < share * len(sample)


@pytest.mark.parametrize("size", [1, 5, 20, 200, 3000])
@pytest.mark.parametrize("share", [5, 50, 95, 99])
def test_bounds_of_a_quantile_hold_in_95_of_100_samples(size, share):
    """The true quantile is below the lower, and above the upper bound, in at most 2.5 % each; the bounds are tight."""
    estimate = quantile(list(range(1, size + 1)), Fraction(share, 100))
    below = stats.binom(size, share / 100)
    if estimate.low is not None:
        assert below.cdf(estimate.low - 1) <= 0.025 < below.cdf(estimate.low)
    else:
        assert below.cdf(0) > 0.025
    if estimate.high is not None:
        assert below.sf(estimate.high - 1) <= 0.025 + 1e-9
        assert estimate.high == 1 or below.sf(estimate.high - 2) > 0.025
    else:
        assert below.sf(size - 1) > 0.025


def test_mean():
    one = mean([Fraction(3)])
    assert (one.value, one.low, one.high) == (3, None, None)
    four = mean([Fraction(value) for value in (1, 2, 3, 6)])
    half = 1.959964 * (14 / 3 / 4) ** 0.5
    assert four.value == 3
    assert (float(four.low), float(four.high)) == pytest.approx((3 - half, 3 + half))


@pytest.mark.parametrize("of", [lambda: mean([]), lambda: quantile([], Fraction(1, 2)), lambda: histogram([], 3)])
def test_there_is_nothing_to_say_of_nothing(of):
    with pytest.raises(ValueError, match="an empty sample has no"):
        of()


@given(sample=values, num_bins=st.integers(1, 9))
@settings(deadline=None)
def test_a_histogram_counts_every_value_once(sample, num_bins):
    ordered = sorted(sample)
    bins = histogram(ordered, num_bins)
    assert sum(count for _, _, count in bins) == len(sample)
    assert (bins[0][0], bins[-1][1]) == (ordered[0], ordered[-1])
    for start, stop, count in bins[:-1]:
        assert count == sum(start <= one < stop for one in sample)
    assert len(bins) == (num_bins if ordered[0] < ordered[-1] else 1)


# --- the command ---


@pytest.fixture
def plan(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan_dict()))
    return path


def jitter(*arguments):
    return CliRunner().invoke(main, ["schedule", "jitter", *map(str, arguments)])


def test_text(plan):
    result = jitter(plan, "--runs", 30, "--seed", 4, "--network-cv", 0.2, "--slow", "1=1.25", "--stragglers", "0.1:2")
    assert result.exit_code == 0, result.output
    noise = (
        "30 runs, seed 4: each computation lognormal with cv 0.05; each message and collective lognormal with cv 0.2; "
        "rank 1 takes 1.25 times as long; each rank takes 2 times as long in a run with probability 0.1"
    )
    for words in (
        noise,
        "engine fast; times in us",
        "95 % of runs within",
        "longest",
        "largest sensitivity: rank 1",
        "█",
    ):
        assert words in result.output
    assert jitter(plan, "--runs", 30, "--seed", 4).output == jitter(plan, "--runs", 30, "--seed", 4).output


def test_the_engines_are_named(tmp_path):
    """Messages that may overtake each other are left to the reference model."""
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(plan_dict(cost={"p2p_latency_us": 10})))
    assert "engine fast; times" in jitter(plan, "--runs", 2, "--no-delays").output
    assert "engine fast and simpy; times" in jitter(plan, "--runs", 2, "--network-cv", 1, "--no-delays").output


def test_replicas_are_named(plan, monkeypatch):
    monkeypatch.setattr("pipeproof.comm.lower.FOLD_ABOVE", 0)
    monkeypatch.setattr("pipeproof.analysis.jitter.noisy_runs.MOST_UNFOLDED", 0)
    plan.write_text(json.dumps(plan_dict(topology={"dp": 3}, cost={"forward_us": 10**6})))
    shown = jitter(plan, "--runs", 2, "--no-delays").output
    assert "note: each rank stands for 3 replicas, disturbed alike" in shown
    assert re.search(r"undisturbed +\d+ *\n", shown)  # in whole microseconds


def test_one_run_without_noise(plan):
    result = jitter(plan, "--runs", 1, "--cv", 0, "--no-delays")
    assert "1 run, seed 0: nothing is disturbed" in result.output
    assert "+0.00 %" in result.output
    assert "largest sensitivity" not in result.output


def test_json_has_what_the_text_has(plan):
    content = json.loads(jitter(plan, "--runs", 20, "--format", "json").output)
    assert content["undisturbed"] == 1500
    assert len(content["makespans"]) == 20
    assert content["longest"] == max(content["makespans"])
    assert sum(content["makespans"]) / 20 == pytest.approx(content["mean"]["value"])
    assert [one["share"] for one in content["quantiles"]] == [0.05, 0.5, 0.95, 0.99]
    assert [one["where"] for one in content["delays"]["ranks"]] == ["0", "1"]
    assert "delays" not in json.loads(jitter(plan, "--runs", 2, "--format", "json", "--no-delays").output)


def test_json_is_of_the_published_form(plan):
    schema = Draft202012Validator(json.loads((ROOT / "docs" / "schemas" / "jitter.schema.json").read_text()))
    thirds = plan.with_name("thirds.json")
    thirds.write_text(json.dumps(plan_dict(cost={"forward_us": "1/3"})))
    for file, *options in ((plan, "--slow", "1=2", "--network-cv", 0.5), (thirds, "--cv", 0), (plan, "--no-delays")):
        schema.validate(json.loads(jitter(file, "--runs", 2, "--format", "json", *options).output))


def test_the_code_on_the_page_runs(monkeypatch):
    monkeypatch.chdir(ROOT)
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "jitter.md").read_text(), re.DOTALL)
    exec(compile(code, "jitter.md", "exec"), {})


def test_the_output_on_the_page_is_that_of_its_commands(monkeypatch):
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs" / "jitter.md").read_text()
    shown = re.findall(r"```console\n\$ \S+ schedule jitter ([^\n]*)\n```\n\n```text\n(.*?)```", text, re.DOTALL)
    assert len(shown) == 2
    for command, output in shown:
        arguments = shlex.split(command)
        lines = [line.rstrip() for line in jitter(*arguments).output.splitlines()]
        assert lines == output.rstrip("\n").splitlines()


@pytest.mark.needs("matplotlib")
@pytest.mark.parametrize(("suffix", "begins"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_pictures(plan, tmp_path, suffix, begins):
    path = tmp_path / f"picture.{suffix}"
    result = jitter(plan, "--runs", 5, "-o", path)
    assert f"picture written to {path}" in result.stderr
    assert path.read_bytes().startswith(begins)


@pytest.mark.needs("matplotlib")
def test_a_picture_of_one_rank_without_noise(tmp_path):
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(plan_dict(topology={"pp": 1})))
    for options in (("--cv", 0), ("--no-delays",)):
        assert jitter(plan, "--runs", 2, "-o", tmp_path / "one.svg", *options).exit_code == 0
    assert (tmp_path / "one.svg").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--slow", "1"], "'1' is not RANK=FACTOR, such as 3=1.2"),
        (["--slow", "x=2"], "'x=2' is not RANK=FACTOR"),
        (["--slow", "1=inf"], "'1=inf' is not RANK=FACTOR"),
        (["--slow", "9=2"], "9: the plan has ranks 0..1"),
        (["--slow", "0=0"], "a rank is slow by a factor above 0"),
        (["--stragglers", "0.1"], "'0.1' is not PROBABILITY:FACTOR, such as 0.01:1.5"),
        (["--stragglers", "2:2"], "straggler_probability must be from 0 to 1, found 2.0"),
        (["--cv", "nan"], "nan is not a number"),
        (["--cv", "-1"], "is not in the range"),
        (["--runs", "0"], "is not in the range"),
        (["-o", "a.html"], "pictures end with .png, .svg, .pdf"),
        pytest.param(["-o", "nowhere/a.png"], "there is no directory", marks=pytest.mark.needs("matplotlib")),
    ],
)
def test_what_is_wrong_is_said(plan, arguments, message):
    result = jitter(plan, *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())


def test_a_plan_that_is_not_there_or_bad_is_refused(tmp_path):
    assert jitter(tmp_path / "none.yaml").exit_code == 2
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps(plan_dict(schedule={"kind": "zigzag"})))
    result = jitter(bad, "--format", "json")
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_links_that_are_shared_are_refused(tmp_path):
    """Their times are not those of single messages, which could be drawn."""
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(plan_dict(cost={"analytic": "h200", "network": {"contention": True}})))
    result = jitter(plan, "--runs", 2)
    assert result.exit_code == 2
    assert "error[PP106]" in result.stderr
    assert "set it to false for runs with noise" in result.stderr
