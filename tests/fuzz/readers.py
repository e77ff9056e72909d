"""Readers of foreign files, each with seeds and the command that reads a mutant of one."""

from __future__ import annotations

import gzip
import io
import json
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from pipeproof.analysis.align.record_format import Header, OtherRecorded, Recorded, RecordedStep, Shard
from pipeproof.exec.monitor.ring_recorder import RingRecorder
from tests.interop.hang.written import Recorder
from tests.plans import subject
from tests.profiles import profile_text
from tests.state.tiny import write_state

ROOT = Path(__file__).parents[2]
SEEDS = Path(__file__).parent / "seeds"
"""Mutants that were not handled once, kept by reader: ``READER.NAME``."""


@dataclass(frozen=True, slots=True)
class Reader:
    """A reader of one kind of file: its seeds, and from a mutant's path the arguments of the command that reads it."""

    name: str
    file: str
    seeds: tuple[bytes, ...]
    command: Callable[[Path], list[str | Path]]

    def all_seeds(self) -> list[bytes]:
        """Return the seeds, with the kept ones of this reader first."""
        return [*(path.read_bytes() for path in sorted(SEEDS.glob(f"{self.name}.*"))), *self.seeds]


def _files(*patterns: str) -> tuple[bytes, ...]:
    found = [path.read_bytes() for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    assert found, patterns
    return tuple(content for content in found if len(content) < 2**16)


def _dump() -> dict[str, object]:
    recorder = Recorder(0, {"0": (0, 1)})
    recorder.collective("all_reduce", "completed")
    recorder.message("send", 1, "started")
    return {
        "version": recorder.version,
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
        "entries": recorder.entries,
    }


def _header(*, values: bool = False) -> bytes:
    model = {"num_heads": 2, "num_kv_heads": 1}
    header = Header("program", "1", "", "torch", "float32", 0, layers=True, values=values, model=model)
    return header.to_line().encode()


def _record() -> bytes:
    tensors = [
        Recorded(
            0, "up", (4, 3), "float32", "0" * 32, 1.0, (Shard(0, "0" * 32, ((0, 2), (0, 3))),), "forward", "input"
        ),
        _gradient("sum64:" + "1" * 16),
    ]
    others = tuple(OtherRecorded(f"main/{number}", "0.75", "2" * 32) for number in range(2))
    return _header() + RecordedStep(0, "1.5", "0" * 32, tuple(tensors), others).lines().encode()


_MAP = b"""model: {num_heads: 2}
statements: ["up.weight^T -> up.weight", "q, k -> qk, axis=0"]
swap_dims: ["up*"]
scale: {main: 1/2, "up.*": 2}
alone: ["mask", "*.bias"]
"""


def _log() -> bytes:
    start = {"event": "start", "version": 1, "rank": 0, "num_ranks": 1, "framework": "torch"}
    return "".join(
        json.dumps(line) + "\n" for line in (start, {"event": "create", "ranks": [0]}, {"event": "end"})
    ).encode()


def _kineto() -> bytes:
    event = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 10.5, "dur": 3.25}
    events = [event | {"args": {"correlation": 1}}, event | {"cat": "cuda_runtime", "args": {"correlation": 1}}]
    events += [event | {"cat": "user_annotation", "name": "forward 0"}, event | {"cat": "cpu_op", "name": "aten::mm"}]
    header = {"baseTimeNanoseconds": 5, "distributedInfo": {"rank": 0}, "deviceProperties": [{"name": "H100"}]}
    return json.dumps({**header, "traceEvents": events}).encode()


def _state_index() -> bytes:
    with TemporaryDirectory() as directory:
        return (write_state(subject(topology={"pp": 2}), Path(directory)) / "index.json").read_bytes()


def _ring() -> bytes:
    with TemporaryDirectory() as name:
        ring = RingRecorder(Path(name), 0, 2, "torch 2.11", capacity=8, marker=lambda _: lambda: False)
        ring.group("0", (0, 1), "nccl")
        for number in range(5):
            seq = ring.issue("send" if number == 3 else "all_reduce", "0", 1 if number == 3 else None, 0, "float32",
                             (4,), 4, 4, {"kind": "F", "stage": 0, "micro_batch": 1})  # fmt: skip
            ring.waits((seq,))
            ring.done((seq,))
        ring.raised(KeyError("loss"))
        return ring.path.read_bytes()


def _gradient(md5: str) -> Recorded:
    return Recorded(0, "layer.0", (2, 3), "float32", md5, 1.0, (Shard(0, md5, ((0, 2), (0, 3))),), parameter="w")


def _npz() -> bytes:
    file = io.BytesIO()
    np.savez(file, **{_gradient("").key: np.zeros((2, 3), np.float32)})
    return file.getvalue()


def record_of_values(md5: str) -> bytes:
    """Return a record whose only gradient has this MD5, and the values of `_npz`."""
    return _header(values=True) + RecordedStep(0, "1.5", "0" * 32, (_gradient(md5),)).lines().encode()


def _report() -> bytes:
    entry = {"rank": 0, "step": 0, "queue": "compute", "op": "0F0", "start_us": 0, "end_us": 2.5}
    return json.dumps({"log_matches_graph": True, "timeline": [entry, entry | {"op": "0B0"}]}).encode()


IMPORTED = {
    "fleet": "strategy.prototxt", "paddleformers": "full_tp_pp.yaml", "paddlenlp": "full_tp_pp.yaml",
    "ernie": "erniekit.yaml", "megatron": "megatron.sh", "verl": "verl.sh",
    "megatron-bridge": "megatron_bridge.yaml", "torchtitan": "torchtitan.toml",
    "schedule": "schedule.csv",
}  # fmt: skip
"""By the kind of ``pipeproof import``, an example."""


def _importers(script: bytes, toml: bytes, csv: bytes) -> Iterator[Reader]:
    block = b"------------------------ arguments ------------------------\n  num_layers ...................... 4\n"
    block += b"  hidden_size ..................... 64\n-------------------- end of arguments ---------------------\n"
    yield Reader("argument_block", "train.log", (block,), partial(_import, "megatron"))
    others = {"megatron": script, "torchtitan": toml, "schedule": csv}
    for kind, name in IMPORTED.items():
        example = ROOT / "examples" / "importing" / name
        seeds = (others.get(kind), example.read_bytes() if example.exists() else None)
        command = partial(_import, kind)
        yield Reader(kind.replace("-", "_"), name, tuple(seed for seed in seeds if seed is not None), command)


def _import(kind: str, path: Path) -> list[str | Path]:
    return ["import", "plan", "--from", kind, path]


def _readers() -> tuple[Reader, ...]:
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'.ljust(64)
    toml = (
        b'[model]\nname = "llama3"\nflavor = "8B"\n[parallelism]\npipeline_parallel_degree = 2\n[training]\nsteps = 1\n'
    )
    script = b'A=2\nB=("--num-layers" 4)\nif [ $A -gt 1 ]; then C=${D:-8}; fi\n'
    script += b"torchrun p.py ${B[@]} --hidden-size $((A*4))\n"
    config = (
        b'{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 4, "hidden_size": 64, '
    )
    config += b'"num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 128, "rms_norm_eps": 1e-5}'
    csv = b"0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    loss_log = (
        b"global_step: 1, loss: 2.5, loss_md5: " + b"0" * 32 + b"\nfinal_loss: rank=0 val=2.5 md5=" + b"1" * 32 + b"\n"
    )
    return (
        Reader("plan", "plan.yaml", _files("examples/*.yaml"), lambda path: ["check", path]),
        Reader("program", "program.txt", _files("tests/schedule/files/*.txt", "examples/schedules/*") or (csv,),
               lambda path: ["check", path]),
        Reader("schedule", "schedule.csv", (csv,), lambda path: ["schedule", "convert", path, "--as", "text"]),
        Reader("schedule_of_fleet", "schedule.txt", (b"f0;f1;b0;b1;\nf0;b0;f1;b1;\n",),
               lambda path: ["schedule", "convert", path, "--as", "text"]),
        Reader("schedule_rows", "rows.txt", (b"F0 F1 B0 B1\nF0 B0 F1 B1\n",),
               lambda path: ["schedule", "convert", path, "--as", "text"]),
        *_importers(script, toml, csv),
        Reader("model_config", "config.json", (config,),
               lambda path: ["import", "plan", ROOT / "examples/importing/megatron.sh", "--model-config", path]),
        Reader("ring", "rank_0.ring", (_ring(),), lambda path: ["job", "hang", path.parent]),
        Reader("stack", "rank_0.txt", _files("tests/goldens/stacks/*/*"), lambda path: ["job", "hang", path.parent]),
        Reader("stack_of_dump", "rank_0.txt", _files("tests/goldens/stacks/*/*"),
               lambda path: ["job", "hang", ROOT / "examples" / "importing" / "dumps", "--stacks", path.parent]),
        Reader("profile", "profile.json", (profile_text().encode(),),
               lambda path: ["simulate", ROOT / "examples" / "gpt_pp4.yaml", "--set", f"cost={{profile: {path}}}"]),
        Reader("statements", "names.aoa", _files("examples/aoa/*"),
               lambda path: ["state", "aoa", path, "--source", ROOT / "examples" / "gpt_pp4.yaml"]),
        Reader("values", "values/step0.npz", (_npz(),),
               lambda path: ["state", "align", path.parents[1], path.parents[2] / "other"]),
        Reader("report", "report.json", (_report(),), lambda path: ["compare", path, path]),
        Reader("dump_pickle", "rank_0", (pickle.dumps(_dump(), 2), pickle.dumps(_dump(), 4)),
               lambda path: ["job", "hang", path.parent]),
        Reader("dump_json", "nccl_trace_0.json", (json.dumps(_dump()).encode(),),
               lambda path: ["job", "hang", path.parent]),
        Reader("flex", "0.metadata", (pickle.dumps({"state_dict_metadata": {"a": [(1, 2)]}, "x": (1, [2])}, 4),),
               lambda path: ["state", "show", path.parent]),
        Reader("dcp", ".metadata", (pickle.dumps({"storage_data": {("a", 1): 2}}, 4),),
               lambda path: ["state", "show", path.parent]),
        Reader("safetensors", "model.safetensors",
               (len(header).to_bytes(8, "little") + header + b"\0" * 4,),
               lambda path: ["state", "show", path]),
        Reader("record", "record.jsonl", (_record(),), lambda path: ["state", "align", path, path]),
        Reader("rank_record", "record.rank0.jsonl", (_record(),),
               lambda path: ["state", "align", path.parent, path.parent, "--rounding"]),
        Reader("record_map", "map.yaml", (_MAP,),
               lambda path: ["state", "align", path.parent, path.parent, "--map", path]),
        Reader("loss_log", "train.log", (loss_log,), lambda path: ["state", "align", path, path]),
        Reader("log", "rank_0.jsonl", (_log(),), lambda path: ["check", path.parent]),
        Reader("timeline", "trace.json", _files("tests/goldens/trace_1f1b_pp2_m2.json"),
               lambda path: ["compare", path, path]),
        Reader("kineto_gzip", "trace.pt.trace.json.gz", (gzip.compress(_kineto()),),
               lambda path: ["import", "profile", path, "--plan", ROOT / "examples" / "gpt_pp4.yaml"]),
        Reader("kineto", "trace.pt.trace.json", (_kineto(),),
               lambda path: ["import", "profile", path.parent, "--plan", ROOT / "examples" / "gpt_pp4.yaml"]),
        Reader("state_index", "index.json", (_state_index(),), lambda path: ["state", "show", path.parent]),
        Reader("hf_index", "model.safetensors.index.json",
               (b'{"metadata": {"total_size": 4}, "weight_map": {"a": "model.safetensors"}}',),
               lambda path: ["state", "show", path.parent]),
    )  # fmt: skip


READERS: Mapping[str, Reader] = {reader.name: reader for reader in _readers()}
