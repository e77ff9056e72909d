"""Bad input and failures of ``Pipeline`` in real processes: every rank gets the error, in time, or ends."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from pipeproof.exec.store.rendezvous import reserved_ports
from tests.default_signals import default_signals
from tests.train.launch import PROGRAMS, ROOT, run

pytestmark = pytest.mark.needs_torch

# --- errors that the processes survive: one launch for all ---

HERE = r"pipeline_errors\.py:\d+"
REFUSED = {
    "stage_missing": "^no rank has stage 1: stages are numbered from 0 to 2",
    "stage_on_two_ranks": r"stage 1 is on ranks \[0, 1\], and the schedule puts it on \[1\] alone",
    "stages_of_another_schedule": r"rank 0 has stages \[0, 1\], and zb_v on 2 ranks puts stages \[0, 3\] there",
    "no_stage": "rank 1: give this rank at least one stage",
    "keys_are_names": r"rank 0: `stages` has the keys \['stage0'\].*\n.*\['stage1'\]",
    "no_modules": "^give this rank at least one stage",
    "unknown_schedule": "PP106: `schedule` must be .*, optimal, a file, or the operations of each rank, found",
    "no_such_sizes": "PP140: .*5 micro-batches on 2 ranks",
    "no_micro_batches": "num_micro_batches",
    "zero_micro_batches": "PP106: `num_micro_batches` must be at least 1",
    "three_stages_in_a_v": "^zb_v has 2 stages on each rank, and there are 3 on 2 ranks: cut the model into 4 stages",
    "other_micro_batches": "`num_micro_batches` differs between the ranks: 4 on rank 0, 5 on rank 1",
    "other_arguments": "scale_grads is false on rank 0, true on rank 1",
    "unknown_split": "split is 'parts'",
    "no_example": "give Pipeline an `example`",
    "example_of_no_tensor": "rank 0: stage 0 fails on the example: TypeError: linear",
    "example_is_a_tensor": r"`example` is a Tensor: give a tuple of positional arguments, such as \(x,\)",
    "stages_are_a_list": "`stages` is a list",
    "module_returns_complex": "stage 0 returns a tensor of type torch.complex64.*torch.view_as_real",
    "module_returns_empty": r"stage 0 returns an empty tensor of shape \[2, 0\]",
    "module_returns_no_gradient": "^rank 0: no output of stage 0 has a gradient",
    "shared_weight_is_not_tied": r"rank 0: .*pass tied=\[\{0: 'inner.0.weight', 3: 'inner.1.weight'\}\]",
    "no_time": "timeout_s is 0",
    "on_meta": r"rank 1: inner\.0\.weight of a stage of this rank is on the meta device",
    "buffer_without_values": "rank 0: stage 0: buffer frequencies has no values.*rank 1: stage 1",
    "model_of_other_size": "2 on rank 0, 3 on rank 1",
    "unknown_tied_weight": "rank 1: `tied` names 'embedding.weight' of stage 1",
    "module_fails_on_example": "rank 1: stage 1 fails on the example: RuntimeError: mat1 and mat2",
    "module_returns_text": r"rank 0: stage 0 returns a str at \[1\]",
    "plan_file_missing": "the plan is not valid:\n  PP100: cannot read `no such plan.yaml`",
    "plan_file_missing_on_one": "rank 1: the plan is not valid:\n  PP100",
    "plan_syntax": r"\.yaml:3:1: PP101: not valid YAML",
    "plan_is_no_plan": "give the name of a file",
    "plan_section": "PP105: `topology`",
    "plan_key": "PP102: `schedule` has no key `kindness`",
    "plan_other_pp": "topology.pp 4, and here it is 2",
    "plan_of_gpt": "the plan's model is a gpt",
    "plan_of_other_widths": r"stage 0 returns float32\[2, 8\], and the plan has float32\[2, 9\] after it",
    "plan_of_other_weights": r"rank 1: stage 1, weight stage\.1\.head: shape none in the module, \[3\] in the plan",
    "plans_differ": "memory.budget_gib is 8 on rank 0, 9 on rank 1",
    "plan_refused": "the plan is not proved.*unsafe=True.*\n  PP123: rank 1 .* runs 1B1 before 1F1",
    "plan_deadlocks": "PP401: ranks 0, 1 deadlock under torch-gloo",
}
"""Errors of the start, with the same text on both ranks."""

REFUSED_STEPS = {
    "rows_on_one_rank": "^the step has 7 rows.*: pass 8 rows or a multiple of 2",
    "no_arguments": "^rank 0: .*pass its arguments to step",
    "no_target": "^rank 1: .*pass `target` to step",
    "target_rows": "^rank 1: .*target .*9 rows",
    "unfrozen": r"^rank 0: .*stage 0: parameter inner\.0\.weight was frozen .*make a new Pipeline",
    "parameters_replaced": r"^rank 1: .*stage 1: parameter inner\.0\.weight .*load_state_dict without assign=True",
    "without_gradients": r"^step\(\) runs backwards, and gradients are disabled.*use eval_step\(\)",
}
"""Steps that all ranks refuse with one text, before a right one."""

FAILED = {
    "module_raises": (1, f"stage 1, micro-batch 2: the module raised ValueError: no such expert .*{HERE}"),
    "module_raises_on_first": (0, f"stage 0, micro-batch 1: the module raised ValueError: no such expert .*{HERE}"),
    "loss_raises": (1, f"stage 1, micro-batch 0: the module raised IndexError: .*{HERE}"),
    "loss_no_scalar": (1, r"stage 1, micro-batch 0: loss_fn returns a tensor of shape \[2, 8\]"),
    "backward_raises": (0, f"stage 0, micro-batch 0: the backward raised ArithmeticError: .*{HERE}"),
    "not_finite": (0, r"stage 0, micro-batch 0: values are not finite, first in module `inner\.1`"),
    "output_changes": (0, "stage 0, micro-batch 0: the module has changed a tensor in place that it returned before"),
    "input_in_place": (1, r"stage 1, micro-batch 0: module `0` raised RuntimeError: .*use inplace=False, or clone"),
    "shape_changes": (0, r"stage 0, micro-batch 2 returns float32\[1, 8\] .* boundary after it has float32\[2, 8\]"),
    "type_changes": (0, r"stage 0, micro-batch 2 returns float64\[2, 8\] .* boundary after it has float32\[2, 8\]"),
    "eval_raises": (1, f"stage 1, micro-batch 0: the module raised ValueError: .*{HERE}"),
}
"""Errors of a step, with the rank that fails: the other one names it."""

CAUSES = {
    "example_of_no_tensor": (0, "TypeError"),
    "module_fails_on_example": (1, "RuntimeError"),
    "module_raises": (1, "ValueError"),
    "module_raises_on_first": (0, "ValueError"),
    "loss_raises": (1, "IndexError"),
    "backward_raises": (0, "ArithmeticError"),
    "input_in_place": (1, "RuntimeError"),
    "eval_raises": (1, "ValueError"),
}
"""The rank that shows the traceback of the user's own error, and its kind. No other error has a cause."""

FINE = ("on_meta_elsewhere", "plan_declared", "hook_with_messages", "after_all_failures")


@pytest.fixture(scope="module")
def outcomes():
    """Outcome of each case on each rank."""
    done = run("pipeline_errors.py", 2, timeout=500)
    found = {}
    for text in re.findall(r'\{"case":.*?\}(?=\{|\n|$)', done.stdout):
        outcome = json.loads(text)
        found.setdefault(outcome["case"], {})[outcome["rank"]] = outcome
    assert all(sorted(by_rank) == [0, 1] for by_rank in found.values())
    return found


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_one_error_on_every_rank(outcomes, case):
    first, second = outcomes[case][0], outcomes[case][1]
    assert re.search(REFUSED[case], first["text"], re.DOTALL), first["text"]
    assert {first["kind"], second["kind"]} <= {"PipelineError", "PlanRefused"}
    if case != "plan_syntax":  # each rank has a file of its own there
        assert (first["kind"], first["text"]) == (second["kind"], second["text"])


@pytest.mark.parametrize("case", REFUSED_STEPS)
def test_a_refused_step_is_one_error_on_every_rank_and_leaves_the_pipeline_usable(outcomes, case):
    first, second = outcomes[case][0], outcomes[case][1]
    assert re.search(REFUSED_STEPS[case], first["text"]), first["text"]
    assert first["kind"] == second["kind"] == "PipelineError"
    assert first["text"] == second["text"]


@pytest.mark.parametrize("case", FAILED)
def test_a_failed_step_names_the_rank_that_failed(outcomes, case):
    rank, text = FAILED[case]
    failing, waiting = outcomes[case][rank], outcomes[case][1 - rank]
    assert re.search(text, failing["text"]), failing["text"]
    assert waiting["text"] == f"rank {rank}: {failing['text']}"
    assert failing["kind"] == waiting["kind"] == "PipelineError"


@pytest.mark.parametrize("case", [*REFUSED, *REFUSED_STEPS, *FAILED])
def test_only_the_users_own_error_is_a_cause(outcomes, case):
    rank, cause = CAUSES.get(case, (0, ""))
    assert [outcomes[case][r]["cause"] for r in (0, 1)] == [cause if r == rank else "" for r in (0, 1)]


@pytest.mark.parametrize("case", FINE)
def test_what_is_right_works(outcomes, case):
    assert [outcomes[case][rank]["text"] for rank in (0, 1)] == ["", ""]
    assert [outcomes[case][rank]["kind"] for rank in (0, 1)] == ["", ""]


def test_a_module_that_exits_is_named_on_the_other_rank(outcomes):
    assert outcomes["module_exits"][1]["kind"] == "SystemExit"
    assert outcomes["module_exits"][0]["text"].startswith("rank 1: SystemExit (bad batch) while it is in step 0, 1F1")


def test_parameters_that_change_inside_of_a_step_are_refused(outcomes):
    for rank in (0, 1):
        assert "parameters changed inside of step()" in outcomes["optimizer_in_hook"][rank]["text"]


def test_a_failed_pipeline_refuses_further_steps_and_recalls_why(outcomes):
    for rank in (0, 1):
        assert "this pipeline has failed before" in outcomes["step_after_failure"][rank]["text"]
        assert "rank 1: stage 1, micro-batch 0" in outcomes["step_after_failure"][rank]["text"]


def test_a_step_on_one_rank_alone_is_named_on_both(outcomes):
    for rank in (0, 1):
        text = outcomes["optimizer_step_on_one"][rank]["text"]
        assert "rank 0 waits in step 1 for rank 1: the call of a step, at " in text
        assert "rank 1 is outside of step(), at " in text


def test_a_rank_outside_of_the_group_gets_an_error_and_the_members_work(outcomes):
    assert outcomes["group_without_this_rank"][0]["kind"] == ""
    assert "not a member of the group" in outcomes["group_without_this_rank"][1]["text"]


def test_an_unproved_plan_that_is_asked_for_is_a_warning_on_one_rank(outcomes):
    assert outcomes["unsafe"][1]["kind"] == ""
    assert outcomes["unsafe"][0]["kind"] == "UserWarning"
    assert "unsafe=True" in outcomes["unsafe"][0]["text"]
    assert "PP999" in outcomes["unsafe"][0]["text"]


def test_a_rank_that_makes_no_pipeline_is_named(outcomes):
    text = outcomes["never_constructed"][0]["text"]
    assert "rank 1 has ended, hangs, or makes another call than rank 0" in text
    assert "within 2 s" in text


# --- failures that end processes ---


class Ended:
    """Ranks that were started without a launcher, which would end them all: exit statuses and outputs."""

    def __init__(self, failure, num_ranks):
        self._ports = reserved_ports(1)
        (port,) = self._ports.__enter__()
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks)}
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        env = {**os.environ, **shared, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        self.outputs, self.is_failing = [""] * num_ranks, threading.Event()
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-u", PROGRAMS / "pipeline_ends.py", failure], stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, env={**env, "RANK": str(rank)}, preexec_fn=default_signals,
            )
            for rank in range(num_ranks)
        ]  # fmt: skip
        self._readers = [threading.Thread(target=self._read, args=(rank,)) for rank in range(num_ranks)]
        for reader in self._readers:
            reader.start()

    def _read(self, rank):
        for line in self.processes[rank].stdout:
            self.outputs[rank] += line
            if line == "now\n":
                self.is_failing.set()

    def signal(self, number):
        """Send a signal to all ranks, once they are at work."""
        assert self.is_failing.wait(200), self.outputs
        time.sleep(0.3)
        for process in self.processes:
            process.send_signal(number)

    def statuses(self, limit_s=200):
        """Exit statuses of all ranks; ranks that do not end are killed, and the outputs of all fail the test."""
        statuses = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                statuses = [process.wait(limit_s) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
            for reader in self._readers:
                reader.join()
            self._ports.__exit__(None, None, None)
        outputs = "\n".join(f"rank {rank}:\n{text}" for rank, text in enumerate(self.outputs))
        assert statuses is not None, f"not all ranks have ended within {limit_s} s\n{outputs}"
        return statuses


ENDED = {1, 3}
"""By the error, or by the watch where the error does not come in time: which of them depends on the load."""
SLOW = pytest.mark.slow


STALLS = {
    "sleep": [
        "the pipeline made no progress for 10 s",
        r"rank 0 waits in step 0 for rank 1: WAIT\(0RECV_B\d\), at \S*pipeline_ends\.py:\d+",
        r"rank 1 is in step 0, 1F1 \(stage 1, micro-batch 1\), at \S*pipeline_ends\.py:\d+",
    ],
    "no_step": [
        "rank 0 waits in step 1 for rank 1: the call of a step, at ",
        r"rank 1 is outside of step\(\), at \S*pipeline_ends\.py:\d+",
    ],
    "deadlock": [
        r"rank 0 waits in step 0 for rank 1: WAIT\(0RECV_B0\), at ",
        r"rank 1 waits in step 0 for rank 0: WAIT\(1RECV_F1\), at ",
    ],
}


@pytest.mark.slow(but=["sleep"])
@pytest.mark.parametrize("stall", STALLS)
def test_both_ranks_of_a_stall_are_named_and_ended(stall):
    ended = Ended(stall, 2)
    assert set(ended.statuses()) <= ENDED, ended.outputs
    assert ("UserWarning: the plan is not proved" in ended.outputs[0]) == (stall == "deadlock")
    for text in ended.outputs:
        assert all(re.search(expected, text) for expected in STALLS[stall]), text


@SLOW
def test_an_exception_ends_all_of_four_ranks():
    ended = Ended("raise", 4)
    assert set(ended.statuses()) <= ENDED, ended.outputs
    for rank, text in enumerate(ended.outputs):
        named = "" if rank == 1 else "rank 1: "
        assert f"PipelineError: {named}stage 1, micro-batch 1: the module raised ValueError: bad batch" in text
        assert ("ValueError: bad batch\n" in text) == (rank == 1)


@SLOW
@pytest.mark.parametrize(("failure", "killed", "step"), [("kill", 1, 0), ("kill_first", 0, 1)])
def test_a_killed_rank_is_named_by_the_one_that_waits_for_it(failure, killed, step):
    """Without the rank that holds the store, too."""
    ended = Ended(failure, 2)
    statuses = ended.statuses()
    assert statuses[killed] == -signal.SIGKILL
    assert statuses[1 - killed] in ENDED
    text = ended.outputs[1 - killed]
    assert re.search(rf"its communication ended while it waits in step {step} for rank {killed}: \S*(SEND|RECV)_", text)
    assert "the peer's process has probably ended" in text
    assert "During handling of" not in text


@SLOW
def test_a_script_may_end_without_close():
    ended = Ended("no_close", 2)
    assert ended.statuses() == [0, 0], ended.outputs


@SLOW
def test_an_interrupt_ends_every_rank():
    ended = Ended("interrupt", 2)
    ended.signal(signal.SIGINT)
    assert -signal.SIGINT in ended.statuses(), ended.outputs
    assert all(process.returncode for process in ended.processes)
    assert any("KeyboardInterrupt" in text for text in ended.outputs)
