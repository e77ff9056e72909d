"""Timer logs of Megatron-LM and of Paddle's trainers become times of stages, or are refused."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from pipeproof.cli.main import main
from pipeproof.diagnostics.finding import BadPlanError
from pipeproof.interop.profiles.profile_from_traces import profile_of_files
from pipeproof.sim.simulate import simulate
from pipeproof.specs.load_plan import plan_from_dict
from tests.plans import plan_dict, subject

ITERATION = (
    " [2026-03-04 10:00:0{0}] iteration        {0}/      20 | consumed samples:          16 | elapsed time per "
    "iteration (ms): 95.0 | learning rate: 1.0E-04 | global batch size:     8 | lm loss: 1.0E+01 |"
)


def all_ranks(times, *, prefix=""):
    """A block of the form ``all``: milliseconds of a step by timer and rank."""
    lines = ["times across ranks (ms):"]
    for name, of_ranks in times.items():
        lines.append(f"  {name}:")
        lines += [f"     rank {rank:2d}: {ms:.2f}" for rank, ms in enumerate(of_ranks) if ms > 0]
    return "\n".join(prefix + line for line in lines)


def bounds(times, *, only_max=False):
    """A block of the form ``minmax`` or ``max``."""
    lines = ["max time across ranks (ms):" if only_max else "(min, max) time across ranks (ms):"]
    for name, of_ranks in times.items():
        value = f"{max(of_ranks):.2f}" if only_max else f"({min(of_ranks):.2f}, {max(of_ranks):.2f})"
        lines.append(f"    {(name + ' ').ljust(48, '.')}: {value}")
    return "\n".join(lines)


def megatron(path, *blocks):
    """A log with iterations; each block follows the line of its iteration."""
    startup = bounds({"model-and-optimizer-setup": [2000.0, 2100.0]})
    lines = [startup, "training ..."]
    for number, block in enumerate(blocks, start=1):
        lines += [ITERATION.format(number), block, "[Rank 0] (after 1 iterations) memory (MB) | allocated: 10.0"]
    path.write_text("\n".join(lines) + "\n")
    return path


def profile_of(files, message_us=5, **sections):
    return profile_of_files(list(files), plan_from_dict(plan_dict(**sections)), message_us)


def medians(profile):
    return {(s.stage, op.kind): op.whole.median_us for s in profile.stages for op in s.ops}


def refused(files, code="PP164", message_us=5, **sections):
    with pytest.raises(BadPlanError) as error:
        profile_of(files, message_us, **sections)
    (finding,) = error.value.findings
    assert finding.code == code
    assert finding.help
    return finding


TIMES = {
    "forward-backward": [90.0, 88.0],
    "forward-compute": [20.0, 24.0],
    "backward-compute": [40.0, 44.0],
    "forward-recv": [0.0, 3.0],
    "forward-send-backward-recv": [10.0, 0.0],
    "optimizer": [6.0, 7.0],
}
FIRST = {name: [9 * ms for ms in of_ranks] for name, of_ranks in TIMES.items()}


@pytest.mark.parametrize("prefix", ["", "[default7]:", "7: "])
def test_megatron_times_of_each_rank(tmp_path, prefix):
    log = megatron(tmp_path / "train.log", all_ranks(FIRST, prefix=prefix), *[all_ranks(TIMES, prefix=prefix)] * 3)
    profile = profile_of([log])
    assert profile.source.format == "megatron_timers"
    assert (profile.steps.run, profile.steps.counted) == (4, 3)
    assert medians(profile) == {
        (0, "F"): 5000, (1, "F"): 6000, (0, "B"): 10000, (1, "B"): 11000, (0, "STEP"): 6000, (1, "STEP"): 7000,
    }  # fmt: skip
    first, second = profile.source.ranks
    assert (first.total_us, first.computation_us, first.communication_us) == (3 * 96000, 3 * 60000, 3 * 10000)
    assert first.unattributed_us == 3 * (96000 - 60000 - 10000 - 6000)
    assert second.communication_us == 3 * 3000
    assert [point.median_us for point in profile.bare_messages] == [5]


def test_sums_of_gradients_are_part_of_the_optimizer(tmp_path):
    log = megatron(tmp_path / "train.log", all_ranks({**TIMES, "all-grads-sync": [2.0, 1.0]}))
    profile = profile_of([log])
    assert medians(profile)[0, "STEP"] == 8000
    assert any("sums of gradients" in note for note in profile.source.assumptions)


def test_messages_have_no_time_in_timers(tmp_path):
    log = megatron(tmp_path / "train.log", all_ranks(TIMES))
    assert "no message" in refused([log], message_us=None).message


def test_equal_ranks_may_be_known_by_their_bounds(tmp_path):
    times = {**TIMES, "forward-compute": [20.0, 21.0], "backward-compute": [40.0, 40.0]}
    log = megatron(tmp_path / "train.log", bounds(FIRST), bounds(times))
    profile = profile_of([log])
    assert medians(profile)[0, "F"] == medians(profile)[1, "F"] == 20500 / 4
    assert medians(profile)[1, "STEP"] == 7000  # the maximum: a step ends with its slowest rank
    assert any("within 10%" in note for note in profile.source.assumptions)
    assert any("optimizer differs" in note for note in profile.source.assumptions)


@pytest.mark.parametrize("only_max", [False, True])
def test_bounds_of_different_ranks_are_refused(tmp_path, only_max):
    finding = refused([megatron(tmp_path / "train.log", bounds(TIMES), bounds(TIMES, only_max=only_max))])
    assert "does not show on which rank" in finding.message
    assert "--timing-log-option all" in finding.help
    assert finding.location.line > 8


def test_a_single_rank_needs_no_names(tmp_path):
    times = {name: [of_ranks[0]] for name, of_ranks in TIMES.items() if of_ranks[0]}
    log = megatron(tmp_path / "train.log", bounds(times, only_max=True))
    assert medians(profile_of([log], topology={"pp": 1}))[0, "B"] == 10000


def test_chunks_of_a_rank_share_its_time(tmp_path):
    log = megatron(tmp_path / "train.log", all_ranks(TIMES))
    profile = profile_of([log], schedule={"kind": "interleaved", "num_chunks": 2})
    assert medians(profile)[2, "F"] == medians(profile)[0, "F"] == 2500
    assert medians(profile)[3, "STEP"] == 3500
    assert any("2 stages of a rank" in note for note in profile.source.assumptions)


def test_tensor_parallel_ranks_are_samples_of_one_stage(tmp_path):
    times = {"forward-compute": [20.0, 24.0, 40.0, 44.0], "backward-compute": [40.0] * 4, "optimizer": [1.0] * 4}
    log = megatron(tmp_path / "train.log", all_ranks(times))
    profile = profile_of([log], topology={"pp": 2, "tp": 2})
    assert medians(profile)[0, "F"] == 5500
    assert profile.stages[1].ops[0].whole.count == 2


@pytest.mark.parametrize(
    ("times", "sections", "words"),
    [
        ({**TIMES, "forward-compute": [1.0, 1.0, 1.0]}, {}, "rank 2"),
        (TIMES, {"schedule": {"kind": "zb_h1"}}, "two parts"),
        (TIMES, {"topology": {"pp": 4}}, "stage 2"),
    ],
)
def test_timers_of_another_plan_are_refused(tmp_path, times, sections, words):
    assert words in refused([megatron(tmp_path / "train.log", all_ranks(times))], **sections).message


def test_a_log_without_computations_is_refused(tmp_path):
    times = {"forward-backward": [90.0, 90.0], "optimizer": [1.0, 1.0]}
    finding = refused([megatron(tmp_path / "train.log", bounds(times))], "PP163")
    assert "--timing-log-level 2" in finding.help


# --- Paddle ---

FLEET = "time (ms) | forward_step: {f:.2f} | recv_forward: 2.00 | backward_step: {b:.2f} | send_backward: 1.00"
TRAINER = (
    "[2026-03-04 10:00:00,000] [    INFO] - [Profile global_step: {step}] time (ms) | forward-backward : {whole:.2f} "
    "| optimizer-step : {o:.2f} | read-data : 0.10 | all-reduce : 0.20  | forward_step: {f:.2f} | recv_forward: 2.00 "
    "| backward_step: {b:.2f}"
)
LOSS = (
    "[2026-03-04 10:00:00,000] [    INFO] - loss: 12.06, learning_rate: 2e-06, global_step: {step}, "
    "max_memory_allocated: 7.5, interval_runtime: {seconds}, interval_samples_per_second: 0.8, progress_or_epoch: 0.0"
)


def paddle(folder, lines_of_ranks):
    files = []
    for rank, lines in enumerate(lines_of_ranks):
        files.append(folder / f"workerlog.{rank}")
        files[-1].write_text("LAUNCH INFO\n" + "\n".join(lines) + "\n")
    return files


def test_timers_of_paddles_pipeline(tmp_path):
    lines = [[FLEET.format(f=ms * 9, b=40), *[FLEET.format(f=ms, b=40 + rank)] * 2] for rank, ms in enumerate((20, 24))]
    files = paddle(tmp_path, lines)
    profile = profile_of(files)
    assert profile.source.format == "paddle_timers"
    found = medians(profile)
    assert (found[0, "F"], found[1, "F"], found[0, "B"], found[1, "B"]) == (5000, 6000, 10000, 10250)
    assert found[0, "STEP"] == 0
    assert any("no time of the optimizer" in note for note in profile.source.assumptions)
    assert profile.source.ranks[0].communication_us == 2 * 3000
    assert profile.steps.counted == 2


def test_timers_of_the_trainer_are_of_one_step_each(tmp_path):
    def of(rank):
        times = {"f": 40.0 + rank, "b": 80.0, "o": 6.0, "whole": 180.0}
        steps = (2, 4, 6)
        return [
            line
            for step in steps
            for line in (
                FLEET.format(f=1, b=1),  # printed again by the pipeline
                TRAINER.format(step=step, **times),
                LOSS.format(step=step, seconds=0.2),
            )
        ]

    profile = profile_of(paddle(tmp_path, [of(0), of(1)]))
    found = medians(profile)
    assert (found[0, "F"], found[1, "F"], found[0, "B"]) == (5000, 5125, 10000)
    assert found[0, "STEP"] == 3000 + 100
    assert profile.source.step_us == 100_000
    first = profile.source.ranks[0]
    assert first.total_us == 2 * (90_000 + 3000 + 100)
    assert first.unattributed_us == pytest.approx(2 * (90_000 - 60_000 - 1000))


def test_whole_steps_alone_are_refused(tmp_path):
    files = paddle(tmp_path, [[LOSS.format(step=step, seconds=0.2) for step in (1, 2)]] * 2)
    finding = refused(files, "PP163")
    assert "whole steps only" in finding.message
    assert "enable_timer" in finding.help


def test_a_log_without_a_rank_is_refused(tmp_path):
    (file,) = paddle(tmp_path, [[FLEET.format(f=20, b=40)]])
    assert "rank" in refused([file.rename(tmp_path / "train.log")]).message


def test_overlapped_pairs_are_refused(tmp_path):
    files = paddle(tmp_path, [[FLEET.format(f=20, b=40) + " | forward_backward_step: 50.00"]] * 2)
    assert "overlap" in refused(files).message


def test_steps_that_go_back_are_refused(tmp_path):
    lines = [TRAINER.format(step=step, f=1, b=1, o=1, whole=5) for step in (4, 2)]
    assert "follows step 4" in refused(paddle(tmp_path, [lines])).message


def test_compressed_logs_are_read(tmp_path):
    log = megatron(tmp_path / "train.log", all_ranks(TIMES))
    packed = tmp_path / "train.log.gz"
    packed.write_bytes(gzip.compress(log.read_bytes()))
    assert medians(profile_of([packed])) == medians(profile_of([log]))


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"\xff\xfe\x00", "not UTF-8"), (b"x" * 2_000_000, "more than"), (b"nothing of it\n", "not known")],
)
def test_other_files_are_refused(tmp_path, content, words):
    path = tmp_path / "train.log"
    path.write_bytes(content)
    assert words in refused([path], "PP163").message


def test_the_page_shows_what_the_command_prints(tmp_path, monkeypatch):
    page = (Path(__file__).parents[3] / "docs" / "profiles-from-traces.md").read_text()
    for block in re.finditer(r'^```\w+ title="([^"]+)"\n(.*?)^```', page, re.DOTALL | re.MULTILINE):
        (tmp_path / block[1]).write_text(block[2])
    monkeypatch.chdir(tmp_path)
    command = re.search(r"^\$ pipeproof (import profile train.log .*)$", page, re.MULTILINE)[1]
    result = CliRunner().invoke(main, command.split())
    assert result.exit_code == 0, result.output
    assert f"```text\n{result.output}```" in page
    measured = plan_dict(**{**_sections(tmp_path / "plan.yaml"), "cost": {"profile": "profile.json"}})
    assert float(simulate(subject(**measured).plan).makespan) < 265_300


def _sections(path):
    content = yaml.safe_load(path.read_text())
    return {key: value for key, value in content.items() if key != "pipeproof"}
