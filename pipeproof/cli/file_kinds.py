"""Recognition of a file by its content: a command that refuses a file names the commands that read it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click

from pipeproof.foreign_text import NOT_READ, OF_OTHER_TRAINERS, decode_json, open_foreign, read_foreign

_HEAD_BYTES = 2**16
_MOST_JSON_BYTES = 2**24
_TOP_KEY = re.compile(r"^([A-Za-z_][\w-]*)\s*:", re.MULTILINE)
_SHELL = re.compile(r"\A#!.*sh\b|--tensor-model-parallel-size|--pipeline-model-parallel-size|\btorchrun\b")
_PROTOTXT = re.compile(r"^\s*(hybrid_configs|pipeline_configs)\s*:?\s*\{", re.MULTILINE)
_TOML_SECTION = re.compile(r"^\[(parallelism|training|experimental)\]\s*$", re.MULTILINE)
_TRAINING_KEYS = re.compile(r"^(tensor|pipeline|sharding|expert)(_model)?_parallel_(size|degree)$")
_DEGREES = re.compile(r"^(tensor|pipeline|sharding)_parallel_degree$")
_ERNIEKIT = frozenset({"compute_type", "fine_tuning"})
_ARGUMENTS = re.compile(r"-{24} arguments -{24}|^MODEL_ARGS:\s*$", re.MULTILINE)
_CONFIGURES = re.compile(
    r"^def \w+_(config|recipe)\(|\bConfigContainer\b|\bmodel_registry\(|\bTrainer\.Config\b", re.MULTILINE
)
_VERL = re.compile(r"\b(actor_rollout_ref\.actor\.megatron|engine)\.\w*parallel_size=")
_LOG_OF_RANK = re.compile(r'\A\{"event": "start", ')
_LINE_OF_RECORD = re.compile(r'\A\{"kind": ?"record",')
_STATEMENT = re.compile(r"^[\w$.*, '()\[\]-]+ -> [^\n]*\w", re.MULTILINE)
_DUMP_NAME = re.compile(r"\w*(trace|dump)\w*_\d+(\.json|\.pickle)?")
_STATE_OF_STEP = re.compile(r"step-\d{8,}")
_PICKLE, _GZIP, _PNG = b"\x80", b"\x1f\x8b", b"\x89PNG"


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
    """Words of commands; ``FILE`` stands for the file, ``DIRECTORY`` for its directory."""
    fits: Callable[[Given], bool]
    importer: str | None = None
    """Value of ``--from`` in commands that read plans; None for other files."""


def _imported(noun: str, importer: str, fits: Callable[[Given], bool]) -> FileKind:
    commands = ("check FILE", "import plan FILE -o plan.yaml")
    return FileKind(noun, commands, fits, importer)


_RESULT = frozenset(
    {"findings", "send_completes", "num_sequence_splits", "only_a", "num_points", "num_gpus", "unpaired_losses",
     "num_parts", "not_measured", "faults"}
)  # fmt: skip
"""Keys of the JSON that commands write for other programs; ``log_matches_graph`` is in reports of runs."""


PLAN = FileKind("a plan", ("check FILE", "simulate FILE"), lambda g: "pipeproof" in g.keys)
LOGS = FileKind("a directory of logs of a recorded program", ("check FILE",),
                lambda g: any(re.fullmatch(r"rank_?\d+\.jsonl", name) for name in g.names))  # fmt: skip
UNREAD = FileKind(
    NOT_READ, (), lambda g: bool(OF_OTHER_TRAINERS.search(g.text)) or {"system", "model", "data"} <= g.keys
)
PROGRAM = FileKind("a program in our text form", ("check FILE", "schedule convert FILE --as csv"),
                   lambda g: _is_schedule(g, "text"), "schedule")  # fmt: skip

KINDS: tuple[FileKind, ...] = (
    FileKind("a record of a training", ("state align FILE OTHER",),
             lambda g: any(re.fullmatch(r"record(\.rank\d+)?\.jsonl", name) for name in g.names)),
    LOGS,
    FileKind("a directory of Flight Recorder dumps", ("job hang FILE",),
             lambda g: any(map(_DUMP_NAME.fullmatch, g.names))),
    FileKind("a directory of rings", ("job hang FILE",), lambda g: g.has(".ring")),
    FileKind("a ring of a watched rank", ("job hang DIRECTORY",), lambda g: g.path.suffix == ".ring"),
    FileKind("states of a run", ("state show FILE", "state reshard FILE --to PLAN -o OUT"),
             lambda g: any(map(_STATE_OF_STEP.fullmatch, g.names))),
    FileKind("a checkpoint", ("state show FILE", "state reshard FILE --to PLAN -o OUT"),
             lambda g: g.path.suffix == ".safetensors" or g.has(".safetensors", ".distcp", "index.json", ".metadata")),
    FileKind("the index of a checkpoint", ("state show FILE", "state reshard FILE --to PLAN -o OUT"),
             lambda g: "pipeproof_state" in g.keys or {"metadata", "weight_map"} <= g.keys),
    FileKind("a directory of traces", ("import profile FILE --plan PLAN",),
             lambda g: g.has(".pt.trace.json", ".pt.trace.json.gz")),
    FileKind("a compressed trace", ("import profile FILE --plan PLAN",), lambda g: g.head.startswith(_GZIP)),
    FileKind("a pickle, such as a Flight Recorder dump", ("job hang DIRECTORY",),
             lambda g: g.head.startswith(_PICKLE)),
    FileKind("a trace", ("compare FILE OTHER", "import profile FILE --plan PLAN"),
             lambda g: "traceEvents" in g.keys or '"traceEvents"' in g.text),
    FileKind("a Flight Recorder dump", ("job hang DIRECTORY",), lambda g: {"entries", "pg_config"} <= g.keys),
    FileKind("a log of one rank of a recorded program", ("check DIRECTORY",),
             lambda g: bool(_LOG_OF_RANK.search(g.text))),
    FileKind("the file of a record", ("state align DIRECTORY OTHER",),
             lambda g: bool(_LINE_OF_RECORD.search(g.text))),
    FileKind("the times of a rehearsal, which a plan names as `cost: {profile: FILE}`", (),
             lambda g: {"rehearsal", "edges"} <= g.keys),
    FileKind("a result of `--format json` or `rehearse --report`, for other programs", (),
             lambda g: bool(g.keys & _RESULT) and "log_matches_graph" not in g.keys),
    FileKind("a measured profile, which a plan names as `cost: {profile: FILE}`", (),
             lambda g: "profile" in g.keys and "stages" in g.keys and "model" not in g.keys),
    FileKind("a report of a run", ("compare PLAN FILE",), lambda g: {"log_matches_graph", "timeline"} <= g.keys),
    FileKind("a file of AOA statements", ("state aoa FILE --source PLACE",),
             lambda g: "aoa_statements" in g.keys or g.path.suffix == ".aoa"
             or (not g.keys and bool(_STATEMENT.match(g.text)))),
    PLAN,
    FileKind("a configuration of a model", ("check --from megatron SCRIPT --model-config FILE",),
             lambda g: bool(g.keys & {"model_type", "architectures"}) and "num_hidden_layers" in g.keys),
    UNREAD,
    _imported("the configuration of a training of Megatron-Bridge", "megatron-bridge",
              lambda g: "_target_: megatron.bridge.training.config.ConfigContainer" in g.text),
    _imported("a configuration of ERNIEKit", "ernie",
              lambda g: any(map(_DEGREES.match, g.keys)) and bool(g.keys & _ERNIEKIT) and "ERNIE" in g.text),
    _imported("training arguments of PaddleFormers or PaddleNLP", "paddleformers",
              lambda g: any(map(_TRAINING_KEYS.match, g.keys))),
    _imported("a Fleet DistributedStrategy", "fleet",
              lambda g: bool(_PROTOTXT.search(g.text)) or bool(g.keys & {"hybrid_configs", "pipeline_configs"})),
    _imported("a job configuration of torchtitan", "torchtitan",
              lambda g: bool(_TOML_SECTION.search(g.text))),
    FileKind("a file with the arguments of Megatron-LM",
             ("check FILE", "import plan FILE -o plan.yaml", "import profile FILE --plan PLAN"),
             lambda g: bool(_ARGUMENTS.search(g.text)), "megatron"),
    FileKind("Python code, which is not interpreted: call `pipeproof.interop.from_arguments` in its process", (),
             lambda g: g.path.suffix == ".py" and bool(_CONFIGURES.search(g.text))),
    _imported("a script that starts verl", "verl",
              lambda g: bool(_VERL.search(g.text))),
    _imported("a shell script", "megatron",
              lambda g: bool(_SHELL.search(g.text))),
    FileKind("a page for a browser", (), lambda g: g.text.lstrip()[:9].lower() == "<!doctype"),
    FileKind("a picture", (), lambda g: g.text.lstrip().startswith("<svg") or g.head.startswith(_PNG)),
    PROGRAM,
    FileKind("a schedule in PyTorch's CSV", ("schedule convert FILE --as text", "check FILE"),
             lambda g: _is_schedule(g, "csv"), "schedule"),
    FileKind("a schedule in the strings of Fleet", ("schedule convert FILE --as text",),
             lambda g: _is_schedule(g, "fleet"), "schedule"),
)  # fmt: skip
"""Kinds, the more specific ones first."""


def _is_schedule(content: Given, form: str) -> bool:
    from pipeproof.schedule.formats.csv_file import looks_like_csv
    from pipeproof.schedule.formats.fleet_text import looks_like_fleet
    from pipeproof.schedule.formats.text_form import looks_like_program

    tests = {"csv": looks_like_csv, "fleet": looks_like_fleet, "text": looks_like_program}
    return tests[form](content.text)


def kind_of(path: Path) -> FileKind | None:
    """Return the kind of a file or directory; None for one that is not recognised or cannot be read."""
    try:
        if path.is_dir():
            content = Given(path, names=frozenset(entry.name for entry in path.iterdir()))
        else:
            with open_foreign(path) as stream:
                head = stream.read(_HEAD_BYTES)
            content = Given(path, head, keys=frozenset(_keys(path, head)))
    except OSError:
        return None
    return next((kind for kind in KINDS if kind.fits(content)), None)


def _keys(path: Path, head: bytes) -> Iterator[str]:
    text = head.decode("utf-8", errors="replace")
    if not text.lstrip().startswith("{"):
        yield from _TOP_KEY.findall(text)
    else:
        try:
            data = decode_json(read_foreign(path, _MOST_JSON_BYTES))
        except (OSError, ValueError):
            return
        yield from data


def note_of_kind(path: Path) -> str | None:
    """Return a sentence that names the kind of a refused file and the commands that read it.

    None if this command reads that kind (its own message has the reason), or if the kind is not recognised.
    """
    context = click.get_current_context(silent=True)
    kind = kind_of(path)
    if context is None or kind is None:
        return None
    words = context.command_path.split()[1:]
    asked = context.params.get("kind")
    takes_others = any(one.name == "kind" for one in context.command.params)
    is_plan = kind is PLAN or (takes_others and kind.importer is not None)
    if is_plan and asked in (None, kind.importer) and _reads_plans(context, words):
        return None
    if asked in (None, kind.importer) and any(_takes(command.split(), words) for command in kind.commands):
        return None
    return _sentence(path, kind, kind.commands)


def _takes(command: list[str], words: list[str]) -> bool:
    """True if a command of the table is the running one, with the file as its argument."""
    position = command.index("FILE") if "FILE" in command else 0
    return command[: len(words)] == words and position > 0 and not command[position - 1].startswith("--")


def note_of_word(path: Path, group: Sequence[str]) -> str | None:
    """Return such a sentence for a file given where a group expects a command; the group's own commands come first.

    None if the kind is not recognised.
    """
    kind = kind_of(path)
    if kind is None:
        return None
    return _sentence(path, kind, sorted(kind.commands, key=lambda command: command.split()[: len(group)] != [*group]))


def _sentence(path: Path, kind: FileKind, commands: Iterable[str]) -> str:
    places = {"FILE": str(path), "DIRECTORY": str(path.parent)}
    filled = (" ".join(places.get(word, word) for word in command.split(" ")) for command in commands)
    named = " or ".join(f"`pipeproof {command}`" for command in filled)
    return f"{path} looks like {kind.noun}" + (f": {named}" if named else "")


def _reads_plans(context: click.Context, words: list[str]) -> bool:
    """True if the command reads a plan; its own message then has the reason."""
    if words == ["state", "aoa"]:  # FILE has statements, or is a plan (with --names)
        return context.params.get("names") is not None
    arguments = (one for one in context.command.params if isinstance(one, click.Argument))
    return words in (["check"], ["compare"], ["state", "reshard"]) or any(
        "PLAN" in (a.metavar or "") for a in arguments
    )
