"""Points are evaluated as by the commands, on any executor, and errors are recorded."""

import re
import signal
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor

import pytest

from pipeproof import __version__
from pipeproof.analysis.sweep import run_sweep as run_module
from pipeproof.analysis.sweep.evaluate_point import Status, evaluate
from pipeproof.analysis.sweep.run_sweep import OtherVersionError, run_sweep
from pipeproof.sim.simulate import simulate
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.verify.check_plan import check
from tests.sweep.files import dies_at_four, dies_once, raises_at_four, sweep_of

SLOW = {"bandwidth": 100, "latency_us": 50}
GRID = {"schedule.kind": ["1f1b", "gpipe", "zb_h1"], "schedule.num_micro_batches": [3, 4, 5]}


class Here(Executor):
    """Evaluates at once, in this thread; breaks when ``most`` points were taken."""

    def __init__(self, most=10**9):
        self.taken, self.most = 0, most

    def submit(self, function, /, *arguments):
        if self.taken == self.most:
            raise BrokenExecutor("enough")
        self.taken += 1
        future = Future()
        try:
            future.set_result(function(*arguments))
        except RuntimeError as error:
            future.set_exception(error)
        return future


def test_figures_are_those_of_check_and_simulate(tmp_path):
    sweep = sweep_of(tmp_path, {**GRID, "cost": [{}, {"forward_us": "1/3"}]})
    results = run_sweep(sweep, Here())
    assert [result.id for result in results] == [point.id for point in sweep.points]
    for point, result in zip(sweep.points, results, strict=True):
        report = check(plan_from_dict(point.plan))
        simulation = simulate(report.subject.lowered)
        schedule = report.subject.plan.spec.schedule
        sequences = schedule.num_micro_batches * schedule.micro_batch_size * report.subject.plan.spec.topology.dp
        assert (result.status, result.settings) == (Status.OK, point.settings)
        assert result.makespan == simulation.makespan
        assert result.sequence == simulation.makespan / sequences
        busy = sum(rank.busy_us for rank in simulation.figures)
        assert result.idle_ratio == 1 - busy / (simulation.makespan * len(simulation.figures))
        assert result.most_idle_ratio >= result.idle_ratio
        assert result.peak_activations == max(rank.peak_activations for rank in simulation.figures)
        assert set(result.warnings) == {f.code for f in report.findings if f.severity == "warning"}
    assert results[-1].makespan.denominator == 3


def test_a_shorter_last_micro_batch_counts_as_it_is(tmp_path):
    sweep = sweep_of(tmp_path, {"schedule.last_micro_batch_size": [1]})
    (result,) = run_sweep(sweep, Here())
    assert result.makespan / result.sequence == 3 * 2 + 1


@pytest.mark.parametrize(
    ("point", "code"),
    [
        ({"schedule": {"kind": "interleaved", "num_chunks": 2, "num_micro_batches": 3}}, "PP140"),
        ({"topology.pp": 8}, "PP110"),
        ({"topology.tp": 3}, "PP108"),
        ({"schedule.num_micro_batches": "4"}, "PP105"),
        ({"schedule.num_micro_batches": None}, "PP104"),
        ({"topology": {"tp": 2, "sequence_parallel": True}, "transport": "partial"}, "PP201"),
        ({"topology.tp": 2, "cost": {"forward_us": 1, "network": {"ranks_per_node": 4, "node": SLOW}}}, "PP154"),
        ({"schedule": {"kind": "file", "path": "none.csv"}}, "PP130"),
    ],
)
def test_a_point_that_is_refused_is_a_result(point, code, tmp_path):
    (result,) = run_sweep(sweep_of(tmp_path, {key: [value] for key, value in point.items()}), Here())
    assert (result.status, result.code) == (Status.REFUSED, code), result.message
    assert result.message
    assert result.makespan is None


def test_schedule_files_are_relative_to_the_base_plan(tmp_path):
    folder = tmp_path / "plans"
    folder.mkdir()
    (folder / "orders.csv").write_text("0F0,0B0\n1F0,1B0\n")
    named = {"kind": "file", "path": "orders.csv", "num_micro_batches": 1}
    (result,) = run_sweep(sweep_of(folder, {"schedule": [named]}), Here())
    assert result.status is Status.OK, result.message


def test_threads_are_an_executor_too_and_stay_open(tmp_path):
    sweep = sweep_of(tmp_path, GRID)
    with ThreadPoolExecutor(2) as pool:
        assert run_sweep(sweep, pool) == run_sweep(sweep, Here())
        assert pool.submit(lambda: 3).result() == 3
    with pytest.raises(ValueError, match="num_workers"):
        run_sweep(sweep, Here(), num_workers=2)


def test_what_raises_has_failed_with_its_traceback(tmp_path):
    results = run_sweep(sweep_of(tmp_path, GRID), Here(), evaluate_point=raises_at_four)
    failed = [result for result in results if result.status is Status.FAILED]
    assert [result.settings["schedule.num_micro_batches"] for result in failed] == [4, 4, 4]
    assert {result.message for result in failed} == {"RuntimeError: four"}
    assert all('in raises_at_four\n    raise RuntimeError("four")' in result.traceback for result in failed)


@pytest.fixture
def handler():
    """The handler of Ctrl-C that Python installs, whatever started the tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield signal.default_int_handler
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def test_ctrl_c_leaves_locks_and_results_whole(tmp_path, monkeypatch, handler):
    """The signal comes inside of a wait, with the locks of the futures acquired, and while a result is processed."""
    waits = []

    def wait(calls, **options):
        signal.raise_signal(signal.SIGINT)
        waits.append(run_module_wait(calls, **options))
        return waits[-1]

    def keep(result):
        signal.raise_signal(signal.SIGINT)
        kept.append(result)

    sweep = sweep_of(tmp_path, {"schedule.num_micro_batches": [2, 3, 4]})
    run_module_wait, kept = run_module.wait, []
    with pytest.raises(KeyboardInterrupt):
        run_sweep(sweep, Here(), on_result=keep)
    assert [result.id for result in kept] == [point.id for point in sweep.points]  # all were ready
    monkeypatch.setattr(run_module, "wait", wait)
    kept.clear()
    with ThreadPoolExecutor(1) as pool, pytest.raises(KeyboardInterrupt):
        run_sweep(sweep, pool, on_result=kept.append)
    assert waits  # each returned
    assert len(kept) == len([found for found in waits if found.done])


def test_an_ignored_ctrl_c_stays_ignored(tmp_path, handler):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        sweep = sweep_of(tmp_path, {"schedule.num_micro_batches": [2, 3]})
        assert len(run_sweep(sweep, Here(), on_result=lambda result: signal.raise_signal(signal.SIGINT))) == 2
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, handler)


def test_a_worker_of_another_version_ends_the_sweep_with_both_versions(tmp_path, monkeypatch):
    monkeypatch.setattr("pipeproof.analysis.sweep.evaluate_point.__version__", "99.9")
    kept = []
    with pytest.raises(OtherVersionError, match=rf"has pipeproof 99\.9, and this is {re.escape(__version__)}"):
        run_sweep(sweep_of(tmp_path, GRID), Here(), on_result=kept.append)
    assert kept == []


def test_an_executor_that_breaks_is_told_and_results_so_far_are_kept(tmp_path):
    kept = []
    with pytest.raises(BrokenExecutor):
        run_sweep(sweep_of(tmp_path, GRID), Here(most=5), on_result=kept.append)
    assert len(kept) == 5


def test_own_processes_give_the_same(tmp_path):
    sweep = sweep_of(tmp_path, {"schedule.num_micro_batches": [3, 4]})
    assert run_sweep(sweep, num_workers=2) == run_sweep(sweep, Here())


def test_a_killed_worker_costs_its_own_point_only(tmp_path):
    sweep = sweep_of(tmp_path, {"schedule.num_micro_batches": [3, 4, 5]})
    results = run_sweep(sweep, num_workers=2, evaluate_point=dies_at_four)
    assert [result.status for result in results] == [Status.OK, Status.FAILED, Status.OK]
    assert results[1].message == "its worker process died"


def test_a_worker_that_is_killed_once_is_made_good(tmp_path):
    sweep = sweep_of(tmp_path, {"schedule.num_micro_batches": [3, 4]})
    results = run_sweep(sweep, num_workers=1, evaluate_point=dies_once)
    assert results == tuple(evaluate(point, sweep.plan_file) for point in sweep.points)
