"""Every kind of file, given to every command that reads files: it is read, or refused with the name of its command."""

import gzip
import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

from pipeproof.cli.file_kinds import KINDS, kind_of
from tests.cli.commands import EXAMPLES, invoke

IMPORTING, SCHEDULES = EXAMPLES / "importing", EXAMPLES / "schedules"
PLAN = EXAMPLES / "gpt_pp4.yaml"

EXISTING = {
    "plan": PLAN,
    "schedule CSV": SCHEDULES / "zbv_pp2.csv",
    "program": SCHEDULES / "two_by_two.txt",
    "prototxt": IMPORTING / "strategy.prototxt",
    "shell script": IMPORTING / "megatron.sh",
    "Megatron-Bridge": IMPORTING / "megatron_bridge.yaml",
    "PaddleFormers": IMPORTING / "full_tp_pp.yaml",
    "ERNIEKit": IMPORTING / "erniekit.yaml",
    "torchtitan": IMPORTING / "torchtitan.toml",
    "verl": IMPORTING / "verl.sh",
    "dump": IMPORTING / "dumps" / "nccl_trace_rank_0.json",
    "dumps": IMPORTING / "dumps",
    "logs": EXAMPLES / "recording" / "crossed",
    "log": EXAMPLES / "recording" / "crossed" / "rank_0.jsonl",
    "AOA": EXAMPLES / "aoa" / "names.aoa",
}
WRITTEN = {
    "Fleet's schedule": ("fleet.txt", "f0;b0;\n"),
    "pickle": ("dump_0", b"\x80\x04K\x01."),
    "record": ("record/record.jsonl", '{"kind": "record", "format": 1}\n'),
    "index": ("sharded/model.safetensors.index.json",
              json.dumps({"metadata": {}, "weight_map": {"w": "m.safetensors"}})),
    "our index": ("saved/index.json", json.dumps({"pipeproof_state": 1})),
    "configuration in Python": ("recipe.py", "def small_config():\n    raise SystemExit\n"),
    "profile": ("profile.json", json.dumps({"profile": 1, "stages": []})),
    "trace": ("trace.json", json.dumps({"traceEvents": []})),
    "compressed trace": ("t.json.gz", gzip.compress(b"{}")),
    "traces": ("traces/rank0.pt.trace.json", json.dumps({"traceEvents": []})),
    "arguments": ("training.log", f"{'-' * 24} arguments {'-' * 24}\n  hidden_size ...... 2\n"),
    "report": ("report.json", json.dumps({"log_matches_graph": True, "timeline": []})),
    "config": ("config.json", json.dumps({"model_type": "llama", "num_hidden_layers": 2})),
    "another trainer": ("job.yml", "pipe_parallel_size: 4\n"),
    "page": ("timeline.html", "<!doctype html><html></html>"),
    "svg": ("timeline.svg", "<svg></svg>"),
    "AOA in YAML": ("names.yaml", "aoa_statements: []\n"),
    "rehearsal": ("times.json", json.dumps({"rehearsal": 1, "edges": []})),
    "ring": ("rings/rank_0.ring", b"\0" * 64),
    "states": ("states/step-00000002/none", ""),
    "result": ("result.json", json.dumps({"certified": True, "findings": []})),
}  # fmt: skip
DIRECTORIES = {
    "record directory": "record",
    "sharded": "sharded",
    "rings": "rings",
    "all traces": "traces",
    "all states": "states",
}
UNKNOWN = {
    "an empty file": ("empty", ""),
    "other bytes": ("bytes", bytes(range(256)) * 4),
    "a character that begins no pickle": ("dump_1", "\x80"),
    "prose": ("a.md", "# Title\n\nText.\n"),
}

NOUNS = {
    "plan": "a plan",
    "schedule CSV": "a schedule in PyTorch's CSV",
    "program": "a program in our text form",
    "Fleet's schedule": "a schedule in the strings of Fleet",
    "prototxt": "a Fleet DistributedStrategy",
    "shell script": "a shell script",
    "Megatron-Bridge": "the configuration of a training of Megatron-Bridge",
    "PaddleFormers": "training arguments of PaddleFormers or PaddleNLP",
    "torchtitan": "a job configuration of torchtitan",
    "dump": "a Flight Recorder dump",
    "dumps": "a directory of Flight Recorder dumps",
    "pickle": "a pickle, such as a Flight Recorder dump",
    "logs": "a directory of logs of a recorded program",
    "record directory": "a record of a training",
    "trace": "a trace",
    "compressed trace": "a compressed trace",
    "report": "a report of a run",
    "AOA in YAML": "a file of AOA statements",
    "config": "a configuration of a model",
    "checkpoint": "a checkpoint",
    "sharded": "a checkpoint",
    **dict.fromkeys(UNKNOWN),
}
"""Names of some of them in messages."""

READS_PLANS = ("show", "simulate", "rehearse", "run")
"""Commands with a plan as their file."""
IMPORTERS = {
    "megatron": {"shell script", "arguments"},
    "fleet": {"prototxt"},
    "megatron-bridge": {"Megatron-Bridge"},
    "paddleformers": {"PaddleFormers", "ERNIEKit"},
    "ernie": {"PaddleFormers", "ERNIEKit"},
    "schedule": {"schedule CSV", "program", "Fleet's schedule"},
    "torchtitan": {"torchtitan"},
    "verl": {"verl"},
}
"""Kinds of `import`, and the files that each reads."""
FOREIGN = set.union(*IMPORTERS.values())
"""Files of other tools: a command that reads plans reads them, too."""
COMMANDS = {
    **{command: (command.split(), {"plan", *FOREIGN}) for command in READS_PLANS},
    "check": (["check"], {"plan", "logs", *FOREIGN}),
    "tune on ranks": (["tune"], {"plan", *FOREIGN}),
    "tune": (["tune", "--gpus", "1", "--device", "h100", "--global-batch", "1", "--workers", "1"],
             {"plan", "config", *FOREIGN}),
    "sweep": (["sweep", "--set", "schedule.kind=[1f1b]", "--workers", "1"], {"plan", *FOREIGN}),
    "compare": (["compare", PLAN], {"plan", "trace", "traces", "report", *FOREIGN}),
    "schedule convert": (["schedule", "convert", "--as", "text"], IMPORTERS["schedule"]),
    "schedule show": (["schedule", "show"], {"plan", *FOREIGN}),
    "job hang": (["job", "hang"], {"dumps", "rings"}),
    "state show": (["state", "show"], {"checkpoint", "index", "our index", "sharded", "all states"}),
    "state diff": (["state", "diff", "{checkpoint}"], {"checkpoint", "index", "our index", "sharded", "all states"}),
    "state reshard": (["state", "reshard", "--to", PLAN, "-o", "{out}/state"],
                      {"plan", "checkpoint", "index", "our index", "sharded", "all states"}),
    "state aoa": (["state", "aoa", "--source", "{checkpoint}"], {"AOA", "AOA in YAML"}),
    "state align": (["state", "align", PLAN], {"record directory"}),
    "import profile": (["import", "profile", "--plan", PLAN],
                       {"trace", "traces", "all traces", "compressed trace", "arguments"}),
    "import plan": (["import", "plan", "-o", "{out}/plan.yaml"], FOREIGN),
    **{
        f"import plan --from {kind}": (["import", "plan", "--from", kind, "-o", "{out}/plan.yaml"], files)
        for kind, files in IMPORTERS.items()
    },
}  # fmt: skip
"""Commands with their words, and the files that they read (and may still refuse, with their own reasons)."""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("files")
    written = {}
    for name, (file, content) in {**WRITTEN, **UNKNOWN}.items():
        written[name] = root / file
        written[name].parent.mkdir(parents=True, exist_ok=True)
        written[name].write_bytes(content if isinstance(content, bytes) else content.encode())
    save_file({"w": np.zeros(2)}, root / "w.safetensors")
    shutil.copy(root / "w.safetensors", root / "sharded" / "m.safetensors")
    return {
        **EXISTING, **written, "checkpoint": root / "w.safetensors",
        **{name: root / directory for name, directory in DIRECTORIES.items()},
    }  # fmt: skip


def test_every_kind_is_among_the_files(files):
    found = {kind.noun for name in files if (kind := kind_of(files[name])) is not None}
    assert {kind.noun for kind in KINDS} == found


@pytest.mark.parametrize("name", NOUNS)
def test_a_file_is_known_by_its_content(name, files):
    kind = kind_of(files[name])
    assert (kind and kind.noun) == NOUNS[name]
    assert kind_of(files[name] / "none") is None


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_reads_a_file_or_names_the_one_that_does(command, files, tmp_path):
    words, reads = COMMANDS[command]
    filled = [str(word).format(out=tmp_path, checkpoint=files["checkpoint"]) for word in words]
    for name, file in files.items():
        if name in reads:
            continue  # its own tests read it
        refused = invoke(*filled, file)
        assert refused.exit_code == 2, name
        assert "did not expect" not in refused.output, name
        kind = kind_of(file)
        words = tuple(f"{kind}: {file} looks like " for kind in ("note", "error"))
        noted = [line for line in refused.stderr.splitlines() if line.startswith(words)]
        assert bool(noted) == (kind is not None), (name, refused.output)
        if kind is not None:
            assert kind.noun in noted[0], name
            assert "`pipeproof " in noted[0] or not kind.commands, name
