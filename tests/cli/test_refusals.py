"""Refusals of commands before any work: status 2, nothing on standard output, a message with the way out."""

import shlex

import pytest

from tests.cli.commands import EXAMPLES, invoke
from tests.state.tiny import files_below

PROGRAM = EXAMPLES / "schedules" / "two_by_two.txt"
CSV = EXAMPLES / "schedules" / "zbv_pp2.csv"
LOGS = EXAMPLES / "recording" / "crossed"
STRATEGY = EXAMPLES / "importing" / "strategy.prototxt"
SCRIPT = EXAMPLES / "importing" / "megatron.sh"
SMALL = "init -o {here}/new.yaml --model small --gpus 4 --pp 4 --global-batch"
LARGE = "init -o {here}/new.yaml --model llama3-70b --tp 8 --device h100 --gpus 512 --pp 8 --global-batch 64"
TUNE = "--gpus 8 --device h100 --global-batch 16 --workers 1"

REFUSED = [
    # commands and codes that do not exist
    ("reshard", "did you mean `main state reshard`?"),
    ("hang", "did you mean `main job hang`?"),
    ("monitor", "did you mean `main job hang --follow`?"),
    ("chek", "did you mean `main check`?"),
    ("import profle", "did you mean `main import profile`?"),
    ("schedule shw", "did you mean `main schedule show` or `main show`"),
    ("qqqqqqqq", "`main --help` lists the commands"),
    ("--explain PP000", "no code 'PP000'; did you mean PP100"),
    ("--explain x", "no code 'x'; did you mean PP100"),
    ("--explain ''", "no code ''; did you mean PP100"),
    # checked
    ("check", "Missing argument 'FILE...'"),
    ("check --from fleet", "Missing argument 'FILE...'"),
    ("check {here}/no.yaml", "no such file"),
    ("check {here}", "cannot read `{here}`: is a directory"),
    ("check {here}/no.txt", "error[PP130]"),
    ("check {plan} --set model.num_layers=1 --set topology.pp=8", "error[PP1"),
    ("check {plan} --select PP4 --ignore 4xx", "no rule is left to run"),
    ("check {plan} --format xml", "--format"),
    ("check {plan} --plan {plan}", "--plan is for a directory of logs, which {plan} is not"),
    ("check missing.logs --plan {plan}", "cannot read `missing.logs`: no such file or directory"),
    ("check {plan} --transport paddle-gloo", "--transport is for a program text, which {plan} is not"),
    ("check {plan} --queue pair", "--queue is for a directory of logs and a program text"),
    (f"check --from fleet {STRATEGY} --queue pair", "--queue is for a directory of logs and a program text"),
    (f"check {LOGS} {{plan}} --queue pair --transport torch-nccl", "--transport is for a program text"),
    (f"check {LOGS} --queue rainbow", "'rainbow' is not one of"),
    (f"check {LOGS} --select PP9999", "is not a code"),
    (f"check {PROGRAM} --queue rainbow", "'rainbow' is not one of"),
    (f"check {PROGRAM} --transport carrier-pigeon", "no backend 'carrier-pigeon'; there are tables for"),
    (f"check {PROGRAM} --set topology.pp=2", "--set is for a file of another tool and a plan"),
    (f"check {PROGRAM} --world-size 8", "--world-size goes with a file of another tool"),
    ("simulate {plan} --device h100", "--device goes with a file of another tool"),
    ("simulate {plan} --world-size 8", "--world-size goes with a file of another tool"),
    ("simulate {plan} --model-config config.json", "--model-config goes with a file of another tool"),
    ("compare {plan} {plan} --from fleet", "--from goes with a file of another tool"),
    ("check --from paddleformer {plan}", "did you mean 'paddleformers'"),
    (f"import plan {SCRIPT} --device v100", "'v100' is none of a100, h100"),
    ("import profile x.json -o {here}/p.json", "--plan"),
    ("import profile x.json --plan p.yaml --message-us fast", "microseconds"),
    ("job hang {here}/none", "help: name the directory of the job's dumps"),
    # shown
    ("show {plan} --rank 2", "--rank"),
    ("show {plan} --rank -1", "--rank"),
    ("show {plan} --rank x", "--rank"),
    ("show {plan} --costs", "names no device"),
    ("show {plan} --costs", "cost: {{analytic: h200}}"),
    ("show {plan} --costs --rank 0", "one of --rank, --costs and --memory"),
    ("show {plan} --memory --rank 0", "one of --rank, --costs and --memory"),
    ("schedule show {plan} -p 4", "--ranks goes with KIND"),
    ("schedule show 1f1b -p 4", "-m is missing"),
    ("schedule show 1f1b -p 4 -m 4 --world-size 2", "--world-size goes with a file of another tool"),
    ("schedule show none.yaml", "cannot read"),
    ("schedule convert {here}/none.csv --as csv", "PP130"),
    (f"schedule convert {CSV}", "Missing option '--as'"),
    (f"schedule convert {CSV} --as csv -o {{here}}/no/out.csv", "there is no directory"),
    # runs
    *((f"run {{plan}} --timeout={text}", "--timeout") for text in ("0", "-1", "0.5", "nan", "soon", "1e400x")),
    *(
        (f"run {{plan}} --inject={text}", "is not RANK:OP:ACTION")
        for text in ("", ":", "1", "1:0F2", "x:0F2:die", "1:0F2:melt", "1::die", "-1:0F2:die", "die")
    ),
    ("run {plan} --logs {plan}/logs", "{plan}/logs"),
    ("run {plan} --record {plan}/out", "{plan}/out"),
    ("run {plan} --record-layers", "need --record DIR"),
    ("run {plan} --record-values", "need --record DIR"),
    # searches
    ("tune llama3_70b", "--gpus is missing"),
    (f"tune llama3-70x {TUNE}", "did you mean `llama3_70b`"),
    (f"tune qwen3_next_80b {TUNE}", "linear attention"),
    ("tune llama3_8b --gpus 8 --global-batch 8", "--device is missing: the plan names no device; known are a100"),
    ("tune llama3_8b --gpus 8 --device h100", "--global-batch"),
    (f"tune llama3_8b {TUNE} --fix tpp=2", "did you mean tp"),
    (f"tune llama3_8b {TUNE} --fix tp", "NAME=VALUE"),
    (f"tune llama3_8b {TUNE} --fix tp=1 --fix tp=2", "fixed twice"),
    ("tune {plan} --top 0", "--top"),
    ("tune {plan} --global-batch 8", "--global-batch goes with --gpus"),
    ("tune {plan} --fix tp=2", "there is no name to fix tp"),
    ("tune {plan} --gpus 4 --device h100 --framework any", "there is no framework any"),
    ("sweep {plan} --set schedule.knd=[gpipe]", "error[PP102]: `schedule` has no key `knd`"),
    ("sweep {plan} --set schedule.kind=gpipe", "no key has several values: give --set KEY=[VALUE, ..]"),
    ("sweep {plan} --set topology.tp=[1] --sort makspan", "'makspan' is not one of 'makespan'"),
    ("sweep {plan} --set topology.tp=[1] --workers 0", "--workers"),
    # new plans
    ("init -o {here}/new.yaml", "--model, --gpus, --pp, --global-batch are missing"),
    ("init -o {here}/new.yaml --model small --gpus 4 --pp 4", "--global-batch is missing"),
    (f"{SMALL} 17 --tp 1 --micro-batch-size 2", "--global-batch: 17 does not divide by"),
    ("state align {here} {here} --draft --plot {here}/c.svg", "compares nothing that --plot could draw"),
    (f"{SMALL} 8 --gpus 6", "--gpus: 6 does not divide by"),
    (f"{SMALL} 16 --schedule 1f1c", "did you mean '1f1b'?"),
    (f"{SMALL} 16 --schedule zb_v --chunks 3", "--chunks: zb_v has at least 2 and at most 2"),
    (f"{SMALL} 16 --model llama3-71b", "did you mean `llama3_70b`"),
    (f"{SMALL} 16 --set run.stepz=3", "did you mean `steps`"),
    (f"{LARGE} --schedule zb_v", "Megatron-LM has no zb_v; it has 1f1b, interleaved"),
    (
        "init -o {here}/new.yaml --model llama3-70b --gpus 90 --pp 90 --global-batch 90",
        "80 blocks do not fill 90 stages",
    ),
]
"""A command line and a part of its message; ``{plan}`` is a right plan, ``{here}`` its directory."""


@pytest.mark.parametrize(("line", "message"), REFUSED, ids=[line.replace(f"{EXAMPLES}/", "") for line, _ in REFUSED])
def test_it_is_refused_before_any_work(line, message, good, tmp_path, request):
    before = files_below(tmp_path)
    command, *words = (word.format(plan=good, here=tmp_path) for word in shlex.split(line))
    # modules that others import for the first time would keep the replacement of the work
    started = request.getfixturevalue("started") if command in {"run", "simulate"} else []
    result = invoke(command, *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message.format(plan=good, here=tmp_path) in " ".join(result.stderr.split())
    assert started == []
    assert files_below(tmp_path) == before
