"""Real processes: plans that match the reference, plans that do not, and all kinds of failures."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from pipeproof.exec.launch.run_plan import RunOptions, run
from pipeproof.exec.store.rendezvous import reserved_ports
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.verify.check_plan import check
from tests.exec.processes import PATIENCE_S, REPOSITORY, Run, bitwise_report
from tests.plans import plan_dict

pytestmark = pytest.mark.needs_paddle

MATCHING = {
    "slices_received_early": {
        "topology": {"pp": 2, "tp": 2}, "schedule": {"kind": "interleaved", "num_chunks": 2},
        "transport": {"forward": "partial", "backward": "partial", "recv_order": "prefetch_one"},
    },
    "pp2_dp2_in_another_order": {"topology": {"pp": 2, "dp": 2, "order": ["pp", "dp", "tp", "cp", "ep"]}},
    "interleaved_two_stages_on_each_rank": {
        "schedule": {"kind": "interleaved", "num_chunks": 2}, "topology": {"pp": 2, "tp": 2, "sequence_parallel": True},
    },
    "uneven_stages_and_few_micro_batches_float64_sgd_bsh_mean_of_micro_batches": {
        "topology": {"pp": 3},
        "schedule": {"kind": "gpipe", "num_micro_batches": 2},
        "stages": [["embed", "layer.0", "layer.1"], ["layer.2"], ["layer.3", "norm", "head"]],
        "model": {"activation_order": "bsh"},
        "loss": {"normalization": "mean_of_micro_batches"},
        "run": {"dtype": "float64", "optimizer": "sgd", "learning_rate": 0.1, "steps": 5},
    },
    "programs_of_its_own_on_a_v": {
        "schedule": {
            "kind": "custom", "num_micro_batches": 2, "placement": [[0, 3], [1, 2]],
            "programs": [
                ["0F0", "0F1", "3F0", "3B0", "3F1", "3B1", "0B0", "0B1"],
                ["1F0", "2F0", "1F1", "2F1", "2B0", "1B0", "2B1", "1B1"],
            ],
        },
        "topology": {"pp": 2, "tp": 2},
        "transport": "partial",
    },
    "looped_bfs_adds_from_the_last_micro_batch": {
        "schedule": {"kind": "looped_bfs", "num_chunks": 2}, "topology": {"pp": 2},
    },
    "used_in_another_order_than_sent": {
        "schedule": {
            "kind": "custom", "num_micro_batches": 3,
            "programs": [
                ["0F0", "0F1", "0F2", "0B1", "0B2", "0B0"],
                ["1F2", "1F0", "1F1", "1B0", "1B1", "1B2"],
            ],
        },
        "topology": {"pp": 2, "tp": 2},
    },
}  # fmt: skip
REORDERED = {"looped_bfs_adds_from_the_last_micro_batch", "used_in_another_order_than_sent"}


@pytest.mark.slow(but=["looped_bfs_adds_from_the_last_micro_batch"])
@pytest.mark.parametrize("name", MATCHING)
def test_matches_the_reference_bit_for_bit(name, tmp_path):
    plan = plan_dict(**MATCHING[name])
    ended = Run(tmp_path, plan).end()
    assert ended.status == 0, ended.output
    report = ended.report
    steps = plan.get("run", {}).get("steps", 2)
    assert report["verified"]
    assert report["log_matches_graph"]
    assert report["threads"] == 1
    assert report["accumulation"] == ("reordered" if name in REORDERED else "in_order")
    assert report["dtype"] == plan.get("run", {}).get("dtype", "float32")
    assert [step["step"] for step in report["steps"]] == list(range(steps))
    assert all(step["bitwise"] and step["loss"] == step["reference_loss"] for step in report["steps"])
    assert len({step["loss"] for step in report["steps"]}) == steps  # it does learn
    names = {gradient["name"] for gradient in report["gradients"]}
    assert len(report["gradients"]) == steps * len(names) > 0
    assert {name.split(".")[1] for name in names if name.startswith("layer.")} == {"0", "1", "2", "3"}
    for gradient in report["gradients"]:
        assert gradient["md5"] == gradient["reference_md5"]
        assert gradient["max_rel_diff"] == 0.0
        assert gradient["replicas_agree"]
    topology = plan["topology"]
    if topology.get("tp", 1) == topology.get("dp", 1) == 1 and name not in REORDERED:
        assert report["parallel_bound"] == 0.0
        assert all(step["uncut_loss"] == step["loss"] for step in report["steps"])
    of_first_step = [g for g in report["gradients"] if g["step"] == 0]
    assert all(g["uncut_max_rel_diff"] <= report["parallel_bound"] for g in of_first_step)
    ranks = {span["rank"] for span in report["timeline"]}
    assert ranks == set(range(topology.get("pp", 1) * topology.get("tp", 1) * topology.get("dp", 1)))
    assert "matches: every loss and every gradient, bit for bit" in ended.output
    assert "\x1b" not in ended.output


def test_many_features_at_once_match_the_reference_bit_for_bit(tmp_path):
    """One real run of the features that other files try one by one, which takes longer."""
    experts = {"num_experts": 4, "top_k": 2, "ffn_size": 8, "num_shared_experts": 1, "dense_layers": 1}
    balance = {"aux_loss": 0.1, "z_loss": 0.01, "expert_bias_rate": 0.003, "score": "sigmoid"}
    plan = plan_dict(
        model={
            "moe": experts | balance,
            "dropout": 0.1,
            "tied_embedding": True,
            "num_kv_heads": 2,
            "swiglu_limit": 0.01,
        },
        topology={"pp": 2, "ep": 2},
        schedule={"kind": "zb_v", "num_chunks": 2, "reduce_gradients": "when_ready"},
        memory={"shard_optimizer": "dp", "recompute": "full"},
        run={"steps": 2, "clip_norm": 0.05, "main_grad_dtype": "float64"},
    )
    ended = Run(tmp_path, plan, "--verbose").end()
    assert ended.status == 0, ended.output
    assert "float32, main gradients in float64, 1 compute thread per process" in ended.output
    assert ended.report["log_matches_graph"]
    assert ended.report["accumulation"] == "two_copies"
    for step in ended.report["steps"]:
        assert step["bitwise"]
        assert step["routers"]["differing"] == []
        assert set(step["routers"]["losses"]) == {"aux", "z"}


# --- runs that must not match ---


@pytest.mark.slow
def test_corruption_in_the_backward_direction_only_keeps_the_first_loss_and_spoils_upstream_gradients(tmp_path):
    corrupt = {"topology": {"pp": 2, "tp": 2, "sequence_parallel": True}}
    sound = Run(tmp_path / "full", plan_dict(**corrupt)).end()
    ended = Run(
        tmp_path / "partial", plan_dict(**corrupt, transport={"forward": "full", "backward": "partial"}), "--unsafe"
    ).end()
    assert sound.status == 0, sound.output
    assert ended.status == 1, ended.output
    report = ended.report
    assert not report["verified"]
    assert not report["passed"]
    first, second = report["steps"]
    assert first["loss_is_bitwise"]
    assert not first["bitwise"]
    assert first["loss"] == first["reference_loss"] == sound.report["steps"][0]["loss"]
    assert not second["loss_is_bitwise"]
    of_first_step = [g for g in report["gradients"] if g["step"] == 0]
    differs = {
        stage: [g["md5"] != g["reference_md5"] for g in of_first_step if g["stage"] == stage] for stage in (0, 1)
    }
    assert all(differs[0])
    assert not any(differs[1])
    assert len(differs[0]) > 10
    assert {f["code"] for f in report["findings"]} == {"PP904", "PP905", "PP908"}
    assert report["log_matches_graph"]
    assert "error[PP201]" in ended.output
    assert f"{len(differs[0])} of {len(differs[0])} on stage 0, 0 of {len(differs[1])} on stage 1" in ended.output


@pytest.mark.slow
def test_a_schedule_file_of_pytorch_runs(tmp_path):
    """Interleaved 1F1B as torch writes it, on four processes."""
    files = REPOSITORY / "tests" / "schedule" / "files"
    schedule = {"kind": "file", "path": str(files / "interleaved_4x2.csv"), "num_micro_batches": 8, "num_chunks": 2}
    bitwise_report(tmp_path, plan_dict(model={"num_layers": 8}, topology={"pp": 4}, schedule=schedule))


@pytest.mark.parametrize(
    ("sections", "fact"),
    [
        ({"boundaries": [{"name": "hidden", "dims": "bsh"}]}, "the activation `hidden` is bsh [2, 8, 16] where"),
        (
            {"model": {"moe": {"num_experts": 2, "top_k": 1, "ffn_size": 8, "dispatch_dtype": "float8"}}},
            "the plan has model.moe.dispatch_dtype",
        ),
    ],
)
def test_what_the_adapter_does_not_know_is_refused_by_name(sections, fact, tmp_path):
    ended = Run(tmp_path, plan_dict(**sections)).end()
    assert ended.status == 2
    assert f"error[PP909]: {fact}" in ended.output


def test_a_plan_that_does_not_pass_is_not_run(tmp_path):
    started = Run(tmp_path, plan_dict(topology={"pp": 2, "tp": 2, "sequence_parallel": True}, transport="partial"))
    ended = started.end()
    assert ended.status == 1
    assert ended.report is None
    assert "error[PP201]" in ended.output
    assert "not run: the plan does not pass check" in ended.output
    assert "processes and a reference" not in ended.output


WRONG_PARTITIONS = {
    "dropped": [["embed", "layer.0", "layer.1"], ["layer.2", "norm", "head"]],
    "doubled": [["embed", "layer.0", "layer.1"], ["layer.1", "layer.2", "layer.3", "norm", "head"]],
    "swapped": [["embed", "layer.1", "layer.0"], ["layer.2", "layer.3", "norm", "head"]],
}


@pytest.mark.slow(but=["dropped"])
@pytest.mark.parametrize("name", WRONG_PARTITIONS)
def test_a_wrong_partition_fails_against_the_reference(name, tmp_path):
    ended = Run(tmp_path, plan_dict(stages=WRONG_PARTITIONS[name], run={"steps": 1}), "--unsafe").end()
    assert ended.status == 1, ended.output
    (step,) = ended.report["steps"]
    assert not step["loss_is_bitwise"]
    assert step["loss"] != step["reference_loss"]
    assert "PP904" in {f["code"] for f in ended.report["findings"]}
    assert "does not match the reference" in ended.output


# --- failures ---

LONG = plan_dict(run={"steps": 100_000})


def failed(ended, code):
    """The message of a failed run, on one line."""
    assert ended.status == 3, ended.output
    assert ended.report is None
    assert f"error[{code}]" in ended.output
    return ended.output


def test_a_worker_that_is_killed(tmp_path):
    started = Run(tmp_path, LONG)
    started.await_output("step 1  ")
    os.kill(started.worker(1), signal.SIGKILL)
    message = failed(started.end(), "PP902")
    assert "rank 1 (pp 1) was killed by SIGKILL, at " in message
    assert "the graph expects" in message
    assert "meanwhile rank 0 running at " in message


def test_planted_raise(tmp_path):
    message = failed(Run(tmp_path, LONG, "--inject", "1:1F2:raise").end(), "PP902")
    assert "rank 1 (pp 1) raised: RuntimeError: injected failure at 1F2, at 1F2 of step 0" in message
    assert re.search(r"the graph expects it to \D*1SEND_B2, \D*rank 0 \D*0RECV_B2", message)


def test_planted_death_at_a_collective_keeps_the_logs(tmp_path):
    plan = plan_dict(topology={"pp": 1, "tp": 2})
    logs = tmp_path / "deep" / "logs"
    message = failed(Run(tmp_path, plan, "--inject", "1:0F1/0.ALL_REDUCE:tp:die", "--logs", str(logs)).end(), "PP902")
    assert "rank 1 (tp 1) was killed by SIGKILL, at 0F1/0.ALL_REDUCE:tp of step 0" in message
    assert "the graph expects ranks [0, 1] to join this tp collective" in message
    assert sorted(path.name for path in logs.iterdir()) == ["rank0.out", "rank1.out", "reference.out"]


def test_planted_hang(tmp_path):
    message = failed(Run(tmp_path, LONG, "--inject", "1:1F1:hang", "--timeout", "5").end(), "PP903")
    assert "rank 1 (pp 1) hangs: no rank has made progress for 5 s; it is at 1F1 of step 0" in message
    assert "meanwhile rank 0 running at WAIT(0RECV_B" in message


@pytest.mark.slow
def test_a_worker_that_is_stopped(tmp_path):
    started = Run(tmp_path, LONG, "--timeout", "5")
    started.await_output("step 1  ")
    os.kill(started.worker(0), signal.SIGSTOP)
    message = failed(started.end(), "PP903")
    assert "rank 0 (pp 0) hangs: no rank has made progress for 5 s; it is at " in message


@pytest.mark.slow(but=["15-143", "9--9"])
@pytest.mark.parametrize(
    ("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, -9)]
)
def test_the_launcher_is_terminated(signum, status, tmp_path):
    started = Run(tmp_path, LONG)
    started.await_output("step 0  ")
    started.process.send_signal(signum)
    ended = started.end()
    assert ended.status == status, ended.output
    if signum != signal.SIGKILL:
        assert "all processes were stopped" in ended.output


def test_a_reader_of_one_line(tmp_path):
    """The status of ``run | head -1``, which is neither a proof nor a failure."""
    (tmp_path / "plan.json").write_text(json.dumps(LONG))
    with subprocess.Popen(
        [sys.executable, "-m", "pipeproof", "run", str(tmp_path / "plan.json")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as process:  # fmt: skip
        assert process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(PATIENCE_S) == 141
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_interrupted_during_set_up(tmp_path):
    started = Run(tmp_path, LONG)
    started.await_output("2 processes and a reference")
    started.process.send_signal(signal.SIGINT)
    assert started.end().status == 130


def test_the_launcher_killed_while_a_worker_is_stopped(tmp_path):
    started = Run(tmp_path, LONG)
    started.await_output("step 0  ")
    os.kill(started.worker(1), signal.SIGSTOP)
    started.process.kill()
    assert started.end().status == -signal.SIGKILL


@pytest.mark.slow
def test_a_launcher_that_is_busy_longer_than_the_timeout_blames_no_rank():
    """It reads no events meanwhile, but the ranks have sent some."""
    report = check(plan_from_dict(plan_dict(topology={"pp": 1}, run={"steps": 3})))
    slept = []

    def on_step(step):
        if not slept:
            slept.append(step)
            time.sleep(9.0)

    assert run(report, RunOptions(timeout_s=8.0), lambda progress: None, on_step).passed


# --- under another's launcher ---


def launched(tmp_path, plan, num_processes):
    wrapper = tmp_path / "wrapper.py"
    wrapper.write_text("from pipeproof.cli.main import main\nmain()\n")
    launcher = ("-m", "paddle.distributed.launch", "--nproc_per_node", str(num_processes))
    return Run(tmp_path, plan, command=(*launcher, "--log_dir", str(tmp_path / "log"), str(wrapper)), verb="rehearse")


def logs_of(tmp_path):
    return "\n".join(path.read_text() for path in sorted((tmp_path / "log").glob("workerlog.*")))


@pytest.mark.slow
def test_under_paddles_launcher(tmp_path):
    started = launched(tmp_path, plan_dict(topology={"pp": 2, "tp": 2}), 4)
    ended = started.end()
    assert ended.status == 0, logs_of(tmp_path)
    assert ended.report["passed"]
    assert ended.report["log_matches_graph"]
    assert logs_of(tmp_path).count("every element arrived where the plan needs it") == 1
    assert "Traceback" not in logs_of(tmp_path)


@pytest.mark.slow
def test_under_slurm_paddle_finds_its_ranks(tmp_path):
    """Two processes started by hand with the variables of srun, which knows no framework."""
    with reserved_ports(1) as (port,):
        by_hand = (str(REPOSITORY / "tests" / "exec" / "start_by_hand.py"), str(port))
        ended = Run(tmp_path, plan_dict(topology={"pp": 2}), command=by_hand, verb="rehearse").end()
    assert ended.status == 0, ended.output
    assert ended.report["passed"]
    assert ended.output.count("every element arrived where the plan needs it") == 1


def test_under_paddles_launcher_with_another_number_of_processes(tmp_path):
    ended = launched(tmp_path, plan_dict(topology={"pp": 4}), 2).end()
    assert ended.status != 0
    assert ended.report is None
    assert "error[PP907]: the launcher started 2 processes, but the plan's topology has 4 ranks" in logs_of(tmp_path)
    assert "--nproc_per_node 4" in logs_of(tmp_path)


@pytest.mark.slow
def test_a_launched_rank_that_has_no_peers_ends_with_the_status_of_a_failed_worker(tmp_path):
    """Rank 1 alone: rank 0 never serves the store at which they meet."""
    started = subprocess.run(
        [
            sys.executable,
            "-m",
            "pipeproof",
            "rehearse",
            "--timeout",
            "1",
            str(REPOSITORY / "examples" / "gpt_pp4.yaml"),
        ],
        env={
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "TMPDIR": str(tmp_path),
            "PADDLE_TRAINER_ID": "1",
            "PADDLE_TRAINERS_NUM": "4",
            "PADDLE_MASTER": "127.0.0.1:1",
        },
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert started.returncode == 3
    assert "error[PP947]: rank 1 of 4 cannot meet the others at the store 127.0.0.1:1: no store at" in started.stdout
    assert "is the launcher's process of rank 0 alive" in started.stdout
    assert "Traceback" not in started.stderr
    assert list(tmp_path.iterdir()) == []
