"""Recognition of a given file by its content, so that a command which refuses it can name the one that reads it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import click

from pipeproof.foreign_text import decode_json

_HEAD_BYTES = 2**16
_MOST_JSON_BYTES = 2**24
_TOP_KEY = re.compile(r"^([A-Za-z_][\w-]*)\s*:", re.MULTILINE)
_SHELL = re.compile(r"\A#!.*sh\b|--tensor-model-parallel-size|--pipeline-model-parallel-size|\btorchrun\b")
_PROTOTXT = re.compile(r"^\s*(hybrid_configs|pipeline_configs)\s*:?\s*\{", re.MULTILINE)
_TOML_SECTION = re.compile(r"^\[(parallelism|training|experimental)\]\s*$", re.MULTILINE)
_TRAINING_KEYS = re.compile(r"^(tensor|pipeline|sharding|expert)(_model)?_parallel_(size|degree)$")
_DEGREES = re.compile(r"^(tensor|pipeline|sharding)_parallel_degree$")
_ERNIEKIT = frozenset({"compute_type", "fine_tuning"})
_DEEPSPEED = frozenset({"train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization"})
_TIMER = re.compile(r"elapsed time per iteration|time across ranks|interval_runtime")
_ARGUMENTS = re.compile(r"-{24} arguments -{24}|^MODEL_ARGS:\s*$", re.MULTILINE)
_RECIPE = re.compile(r"^def \w+_(config|recipe)\(|\bConfigContainer\b", re.MULTILINE)
_NEMO_RL = re.compile(r"^  megatron_cfg:\s*$", re.MULTILINE)
_VERL = re.compile(r"\b(actor_rollout_ref\.actor\.megatron|engine)\.\w*parallel_size=")
_SWIFT = re.compile(r"\bmegatron\s+(?:sft|pt|rlhf)\b")
_AUTOMODEL = re.compile(r"^  pp_size:", re.MULTILINE)
_REGISTRY = re.compile(r"\bmodel_registry\(|\bTrainer\.Config\b")
_PICKLE, _GZIP, _SQLITE = b"\x80", b"\x1f\x8b", b"SQLite format 3"


@dataclass(frozen=True)
class Given:
    """The beginning of a file, or the names in a directory."""

    path: Path
    head: bytes = b""
    names: frozenset[str] = frozenset()
    keys: frozenset[str] = field(default=frozenset())
    """Keys at the top of YAML or JSON."""

    @property
    def text(self) -> str:
        """The beginning as text."""
        return self.head.decode("utf-8", errors="replace")

    def has(self, *suffixes: str) -> bool:
        """Return True if a name in the directory ends so."""
        return any(name.endswith(suffixes) for name in self.names)


@dataclass(frozen=True)
class FileKind:
    """A kind of file: its noun phrase, the commands that read it, and the test of a file."""

    noun: str
    commands: tuple[str, ...]
    """Words of commands; the file is in the place of ``FILE``."""
    fits: Callable[[Given], bool]
    importer: str | None = None
    """Value of ``--from`` in commands that read plans; None for other files."""


def _imported(noun: str, importer: str, fits: Callable[[Given], bool]) -> FileKind:
    commands = (f"check --from {importer} FILE", f"import {importer} FILE -o plan.yaml")
    return FileKind(noun, commands, fits, importer)


PLAN = FileKind("a plan", ("check FILE", "simulate FILE"), lambda g: "pipeproof" in g.keys)

KINDS: tuple[FileKind, ...] = (
    FileKind("a record of a training", ("state align FILE OTHER",), lambda g: "record.jsonl" in g.names),
    FileKind("a directory of logs of a recorded program", ("check --log FILE",),
             lambda g: any(re.fullmatch(r"rank_?\d+\.jsonl", name) for name in g.names)),
    FileKind("a directory of Flight Recorder dumps", ("job hang FILE",),
             lambda g: any(re.fullmatch(r"\w*(trace|dump)\w*_\d+(\.json|\.pickle)?", name) for name in g.names)),
    FileKind("a checkpoint", ("state show FILE", "state reshard FILE --to PLAN -o OUT"),
             lambda g: g.path.suffix == ".safetensors" or g.has(".safetensors", ".distcp", "index.json", ".metadata")),
    FileKind("a directory of traces", ("import profile FILE --plan PLAN",),
             lambda g: g.has(".pt.trace.json", ".pt.trace.json.gz", ".sqlite")),
    FileKind("an export of Nsight Systems", ("import profile FILE --plan PLAN",), lambda g: g.head.startswith(_SQLITE)),
    FileKind("a compressed trace", ("import profile FILE --plan PLAN",), lambda g: g.head.startswith(_GZIP)),
    FileKind("a pickle, such as a Flight Recorder dump", ("job hang DIRECTORY",),
             lambda g: g.head.startswith(_PICKLE)),
    FileKind("a trace", ("compare FILE OTHER", "import profile FILE --plan PLAN"),
             lambda g: "traceEvents" in g.keys or '"traceEvents"' in g.text),
    FileKind("a Flight Recorder dump", ("job hang DIRECTORY",), lambda g: {"entries", "pg_config"} <= g.keys),
    FileKind("a sweep", ("sweep FILE",), lambda g: "plan" in g.keys and bool(g.keys & {"grid", "zip", "include"})),
    FileKind("a measured profile, which a plan names as `cost: {profile: FILE}`", (),
             lambda g: "profile" in g.keys and "stages" in g.keys and "model" not in g.keys),
    FileKind("a report of a run", ("compare PLAN FILE",), lambda g: {"log_matches_graph", "timeline"} <= g.keys),
    FileKind("a file of AOA statements", ("state aoa FILE --source PLACE",), lambda g: "aoa_statements" in g.keys),
    PLAN,
    FileKind("a configuration of a model", ("check --from megatron SCRIPT --model-config FILE",),
             lambda g: bool(g.keys & {"model_type", "architectures"}) and "num_hidden_layers" in g.keys),
    _imported("a configuration of DeepSpeed", "deepspeed",
              lambda g: bool(g.keys & _DEEPSPEED)),
    _imported("a configuration of ERNIEKit", "ernie",
              lambda g: any(map(_DEGREES.match, g.keys)) and bool(g.keys & _ERNIEKIT) and "ERNIE" in g.text),
    _imported("training arguments of PaddleFormers or PaddleNLP", "paddleformers",
              lambda g: any(map(_TRAINING_KEYS.match, g.keys))),
    _imported("a Fleet DistributedStrategy", "fleet",
              lambda g: bool(_PROTOTXT.search(g.text))),
    _imported("a job configuration of torchtitan", "torchtitan",
              lambda g: bool(_TOML_SECTION.search(g.text))),
    FileKind("a file with the arguments of Megatron-LM",
             ("check --from megatron FILE", "import megatron FILE -o plan.yaml", "import profile FILE --plan PLAN"),
             lambda g: bool(_ARGUMENTS.search(g.text)), "megatron"),
    _imported("a configuration registry of torchtitan", "torchtitan",
              lambda g: g.path.suffix == ".py" and bool(_REGISTRY.search(g.text))),
    _imported("a recipe of NeMo Automodel", "automodel",
              lambda g: "distributed" in g.keys and bool(_AUTOMODEL.search(g.text))),
    _imported("a Python recipe of Megatron-Bridge", "megatron-bridge",
              lambda g: g.path.suffix == ".py" and bool(_RECIPE.search(g.text))),
    _imported("a configuration of NeMo-RL", "nemo-rl",
              lambda g: "policy" in g.keys and bool(_NEMO_RL.search(g.text))),
    _imported("a script that starts verl", "verl",
              lambda g: bool(_VERL.search(g.text))),
    _imported("a script that starts ms-swift's Megatron trainer", "ms-swift",
              lambda g: bool(_SWIFT.search(g.text))),
    _imported("a shell script", "megatron",
              lambda g: bool(_SHELL.search(g.text))),
    FileKind("a log with timers", ("import profile FILE --plan PLAN",), lambda g: bool(_TIMER.search(g.text))),
    FileKind("a schedule in PyTorch's CSV", ("schedule convert FILE --as text", "check --from torch-csv FILE"),
             lambda g: _is_schedule(g, "csv"), "torch-csv"),
    FileKind("a schedule in the strings of Fleet", ("schedule convert FILE --as text",),
             lambda g: _is_schedule(g, "fleet")),
    FileKind("a program in our text form", ("check --program FILE", "schedule convert FILE --as csv"),
             lambda g: _is_schedule(g, "text")),
)  # fmt: skip
"""Kinds, the more specific ones first."""


def _is_schedule(given: Given, form: str) -> bool:
    from pipeproof.schedule.formats.csv_file import looks_like_csv
    from pipeproof.schedule.formats.fleet_text import looks_like_fleet
    from pipeproof.schedule.formats.text_form import looks_like_program

    return {"csv": looks_like_csv, "fleet": looks_like_fleet, "text": looks_like_program}[form](given.text)


def kind_of(path: Path) -> FileKind | None:
    """Return the kind of a file or directory; None for one that is not recognised or cannot be read."""
    try:
        if path.is_dir():
            given = Given(path, names=frozenset(entry.name for entry in path.iterdir()))
        elif not path.is_file():
            return None  # nothing, or a pipe, which is read once
        else:
            with path.open("rb") as stream:
                head = stream.read(_HEAD_BYTES)
            given = Given(path, head, keys=frozenset(_keys(path, head)))
    except OSError:
        return None
    return next((kind for kind in KINDS if kind.fits(given)), None)


def _keys(path: Path, head: bytes) -> Iterator[str]:
    text = head.decode("utf-8", errors="replace")
    if not text.lstrip().startswith("{"):
        yield from _TOP_KEY.findall(text)
    elif path.stat().st_size <= _MOST_JSON_BYTES:
        try:
            data = decode_json(path.read_bytes())
        except ValueError:
            return
        yield from data


def note_of_kind(path: Path) -> str | None:
    """Return a sentence that names the kind of a refused file and the commands that read it.

    None if this command reads that kind, so that its own message has the reason, or if the kind is not recognised.
    """
    context = click.get_current_context(silent=True)
    kind = kind_of(path)
    if context is None or kind is None:
        return None
    words = context.command_path.split()[1:]
    if kind is PLAN and context.params.get("kind") is None and _reads_plans(context.command, words):
        return None
    options = [f"--{name}" for name in ("log", "program") if context.params.get(name) is not None]
    if context.params.get("kind") is not None and words != ["sweep"]:  # there it is that of the plan in the file
        options += ["--from", context.params["kind"]]
    if any(_reads(command.split(), words, options) for command in kind.commands):
        return None
    commands = kind.commands
    given = _arguments(context)
    if kind.importer is not None and not options and str(path) in given and _reads_plans(context.command, words):
        here = " ".join((*words, "--from", kind.importer, *given))
        commands = (here, *(command for command in commands if not command.startswith("check ")))
    named = " or ".join(f"`pipeproof {command.replace('FILE', str(path))}`" for command in commands)
    return f"{path} looks like {kind.noun}" + (f": {named}" if named else "")


def _arguments(context: click.Context) -> list[str]:
    """The files that the running command was given."""
    given = [context.params.get(one.name or "") for one in context.command.params if isinstance(one, click.Argument)]
    return [str(file) for value in given for file in (value if isinstance(value, tuple) else (value,))]


def _reads_plans(command: click.Command, words: list[str]) -> bool:
    """True if a plan is among the files of a command, whose own message then has the reason."""
    named = any(isinstance(one, click.Argument) and "PLAN" in (one.metavar or "") for one in command.params)
    return named or words in (["compare"], ["state", "reshard"], ["state", "aoa"])


def _reads(command: list[str], words: list[str], options: list[str]) -> bool:
    """True if a command of the table is the running one: the same words, and the options that select its input."""
    selects = {"--from", "--log", "--program"}
    mine = [word for word in command if word in selects or command[command.index(word) - 1] == "--from"]
    return command[: len(words)] == words and mine == options
