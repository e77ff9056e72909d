"""The plan of a script's own modules, whose layers the stages themselves describe."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import yaml

from pipeproof.atomic_write import write_output
from pipeproof.comm.generated_schedule import plan_schedule
from pipeproof.comm.lower import blaming_plan, own_schedule
from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.diagnostics.finding import Finding, PipeproofError
from pipeproof.diagnostics.source import PlanFileError, read_text
from pipeproof.diagnostics.yaml_tree import parse_text
from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.plan_layers import StageFacts, Tie, layers_content
from pipeproof.exec.train.stage_boundaries import kind_text
from pipeproof.schedule.kinds import SCHEDULE_KINDS, Placement
from pipeproof.schedule.ops import Op, OpKind
from pipeproof.schedule.programs import stages_of
from pipeproof.specs.exact_times import TIME_KEYS
from pipeproof.specs.load_plan import load_plan, plan_from_dict
from pipeproof.specs.pipeline_checks import GENERATED_WITH_PAIRS
from pipeproof.verify.certificate import Certificate

_SCHEDULE_SUFFIXES = {".csv", ".txt", ".json"}


def schedule_section(schedule: str | Path | Sequence[Sequence[str]]) -> dict[str, Any]:
    """The keys of ``schedule`` for a kind, a file of a written schedule, or the operations of each rank.

    Raises:
        PipelineError: it is something else.
    """
    if not isinstance(schedule, Path | str) and (
        not isinstance(schedule, Sequence) or not all(isinstance(program, list | tuple) for program in schedule)
    ):
        raise PipelineError(
            f"`schedule` is {kind_text(schedule)}: give the name of a kind, such as '1f1b', a file, or a list of each "
            "rank's operations"
        )
    if isinstance(schedule, Path) or (isinstance(schedule, str) and Path(schedule).suffix in _SCHEDULE_SUFFIXES):
        return {"kind": "file", "path": str(Path(schedule).resolve())}
    if isinstance(schedule, str):
        return {"kind": schedule}
    return {"kind": "custom", "programs": [list(program) for program in schedule]}


def given_plan(plan: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a plan file or dict, not yet validated; paths in it are made absolute.

    Raises:
        PlanFileError: the file cannot be read, or a section of the plan is not a mapping.
        PipelineError: the model is a GPT, or ``plan`` is neither a file nor a dict.
    """
    data: Any
    if isinstance(plan, str | Path):
        file = Path(plan)
        tree = parse_text(read_text(str(file)), str(file))
        if tree.problems or not _has_sections(tree.data):
            load_plan(file)  # raises with every finding
        data, folder = tree.data, file.parent
    elif isinstance(plan, Mapping):
        if not _has_sections(plan):
            plan_from_dict(plan)  # raises
        data, folder = plan, Path()
    else:
        raise PipelineError(f"plan is a {type(plan).__name__}: give the name of a file, or a dict with its keys")
    content = {key: dict(value) if isinstance(value, Mapping) else value for key, value in data.items()}
    for section, key in (("schedule", "path"), ("cost", "profile")):
        if isinstance(content.get(section), dict) and content[section].get(key):
            content[section][key] = str((folder / content[section][key]).resolve())
    model = content.setdefault("model", {"kind": "layers"})
    if model.get("kind") != "layers":
        raise PipelineError(
            f"the plan's model is a {model.get('kind')}, and Pipeline trains your modules: remove `model`, or write "
            "`model: {kind: layers}`"
        )
    return content


def _has_sections(plan: object) -> bool:
    """True if a plan and its sections are mappings."""
    sections = ("model", "topology", "schedule", "run", "memory", "cost", "loss")
    return isinstance(plan, Mapping) and all(isinstance(plan.get(key, {}), Mapping) for key in sections)


@dataclass(frozen=True, slots=True)
class Request:
    """Arguments of a script's Pipeline, equal on every rank."""

    plan: dict[str, Any] | None
    schedule: dict[str, Any]
    num_micro_batches: int | None
    backend: str
    device: str
    dtype: str
    num_ranks: int
    num_replicas: int
    overlap: bool = False
    modules: Sequence[Mapping[str, Any]] = ()

    def skeleton(self, num_stages: int, given_stages: Sequence[Sequence[int]] = ()) -> dict[str, Any]:
        """The plan without its layers. ``given_stages`` has the stages of each rank, for uneven numbers of them.

        Raises:
            PipelineError: the number of micro-batches is not given, or the plan contradicts the script.
        """
        content = dict(self.plan or {})
        content.setdefault("pipeproof", 1)
        content.setdefault("model", {"kind": "layers"})
        topology = content.setdefault("topology", {})
        topology.setdefault("pp", self.num_ranks)
        if self.num_replicas > 1:
            topology.setdefault("dp", self.num_replicas)
        self._agree("topology.pp", topology["pp"], self.num_ranks, "the pipeline's group has that many ranks")
        self._agree("topology.dp", topology.get("dp", 1), self.num_replicas, "the modules are replicated that often")
        schedule = content.setdefault("schedule", dict(self.schedule))
        if self.num_micro_batches is not None:
            schedule.setdefault("num_micro_batches", self.num_micro_batches)
            declared = schedule["num_micro_batches"]
            self._agree("schedule.num_micro_batches", declared, self.num_micro_batches, "the script asks for that many")
        if "num_micro_batches" not in schedule:
            raise PipelineError("give Pipeline a plan, or num_micro_batches")
        if self.modules:
            planned = content.setdefault("modules", [*self.modules])
            self._agree("modules", planned, self.modules, "the argument has others")
        if not content.get("modules"):
            self._place(schedule, num_stages, given_stages)
        if self.overlap and schedule.get("kind") in GENERATED_WITH_PAIRS:
            schedule.setdefault("overlap", "pairs")
            if schedule["kind"] == "interleaved":
                schedule.setdefault("variant", "megatron")
        run = content.setdefault("run", {})
        run |= {"backend": self.backend, "device": self.device}
        run.setdefault("dtype", self.dtype)
        content.setdefault("loss", {"normalization": "mean_of_micro_batches"})
        return content

    def _place(self, schedule: dict[str, Any], num_stages: int, given_stages: Sequence[Sequence[int]]) -> None:
        """Complete the keys of a schedule that place the stages."""
        if not {"placement", "num_chunks"} & schedule.keys():
            require_num_stages(str(schedule.get("kind")), num_stages, self.num_ranks)
        if "placement" not in schedule and num_stages % self.num_ranks:
            schedule["placement"] = [
                list(stages)
                for stages in given_stages or (range(r, num_stages, self.num_ranks) for r in range(self.num_ranks))
            ]
        elif "placement" not in schedule and num_stages > self.num_ranks:
            schedule.setdefault("num_chunks", -(-num_stages // self.num_ranks))

    def _agree(self, key: str, planned: Any, actual: Any, why: str) -> None:
        if planned != actual:
            raise PipelineError(f"the plan has {key} {planned}, and here it is {actual}: {why}")


Modules = Mapping[str, Mapping[str, Any]]
"""The modules of a script by name, each with the keys of a plan's ``modules``."""


def module_entries(modules: Modules) -> list[dict[str, Any]]:
    """The plan's ``modules``.

    Raises:
        PipelineError: a module is not a mapping.
    """
    for name, keys in modules.items():
        if not isinstance(keys, Mapping) or "stages" not in keys:
            raise PipelineError(
                f"modules has {name!r}: {kind_text(keys)}: give its keys, such as {{'stages': [0, 0], 'dp': 2}}"
            )
    return [{"name": name, **keys, "stages": [*keys["stages"]]} for name, keys in modules.items()]


def frozen_stages(content: Mapping[str, Any]) -> set[int]:
    """The stages of frozen modules, by the keys of a plan."""
    ends = (module["stages"] for module in content.get("modules", ()) if module.get("frozen"))
    return {stage for first, last in ends for stage in range(first, last + 1)}


def complete_plan(
    skeleton: Mapping[str, Any],
    stages: Sequence[StageFacts],
    tied: Sequence[Tie],
    num_rows: int,
    seq_lengths: Sequence[int] | None = None,
) -> dict[str, Any]:
    """The plan with its layers and their memory.

    ``num_rows`` is the size of a micro-batch; ``seq_lengths`` has the length of each micro-batch if they differ. Each
    entry of ``tied`` is one weight by stage: the first stage owns it.

    Raises:
        PipelineError: the plan has other lengths.
    """
    content = dict(skeleton)
    content["schedule"] = {**content["schedule"], "micro_batch_size": num_rows}
    if seq_lengths is not None:
        planned = content["schedule"].setdefault("seq_lengths", list(seq_lengths))
        if list(planned) != list(seq_lengths):
            raise PipelineError(f"the plan has schedule.seq_lengths {list(planned)}, and the example {seq_lengths}")
    if not content["model"].get("layers"):
        content["model"] = {"kind": "layers", "layers": layers_content(stages, tied)}
        if any(len(facts.layers) > 1 for facts in stages):
            content.setdefault("stages", [[layer.name for layer in facts.layers] for facts in stages])
    content.setdefault("memory", {"gradient_dtype": content["run"]["dtype"]})
    return content


def placement_of(skeleton: Mapping[str, Any], num_stages: int) -> list[list[int]]:
    """The stages of each pipeline rank by a plan whose layers are still unknown.

    Raises:
        PlanFileError: the schedule does not exist for these sizes, or cannot be read.
    """
    facts = [StageFacts.whole(n, "", [], [{"shape": ["b"]}] if n < num_stages - 1 else []) for n in range(num_stages)]
    schedule = {key: value for key, value in skeleton["schedule"].items() if key != "seq_lengths"}
    unknown = {**skeleton, "model": {"kind": "layers"}, "schedule": schedule, "stages": None, "edges": []}
    loaded = plan_from_dict(complete_plan(unknown, facts, (), 1))
    with blaming_plan(loaded):
        foreign = own_schedule(loaded)
        programs = plan_schedule(loaded.spec).programs if foreign is None else foreign.schedule.programs
    return [list(stages) for stages in stages_of(programs)]


def stages_of_rank(
    schedule: str | Path, num_ranks: int, num_stages: int, rank: int, *, modules: Modules | None = None
) -> list[int]:
    """The stages that a schedule puts on one of ``num_ranks`` pipeline ranks, for scripts that build only these stages.

    ``modules`` are as for ``Pipeline``.

    Raises:
        PipelineError: the schedule has another number of stages.
        PlanFileError: the schedule does not exist for these sizes.
    """
    entries = module_entries(modules or {})
    num = 2 * num_stages * prod(int(module.get("dp", 1)) for module in entries)
    request = Request(None, schedule_section(schedule), num, "torch", "cpu", "float32", num_ranks, 1, modules=entries)
    skeleton = request.skeleton(num_stages)
    return in_script_words(lambda: placement_of(skeleton, num_stages), has_plan=False)[rank]


def sized_plan(
    content: Mapping[str, Any],
    programs: Sequence[Sequence[Op]],
    outputs: Sequence[Sequence[dict[str, Any]]],
    edges: Mapping[str, Mapping[str, Any]],
    num_rows: int,
    num_micro_batches: int,
    seq_lengths: Sequence[int] | None,
    *,
    by_kind: bool,
) -> dict[str, Any]:
    """A plan for steps of other sizes: ``outputs`` has the ``out`` of each layer, ``edges`` the edges by name.

    Fewer micro-batches run as in ``programs`` without the missing ones; more micro-batches, or any number with
    ``by_kind``, run by the plan's own kind.

    Raises:
        PipelineError: the plan has other layers, or the output of a layer was not seen.
    """
    layers = content["model"]["layers"]
    if len(layers) != len(outputs) or not all(outputs[:-1]):
        raise PipelineError(
            f"steps of other sizes need the output of each layer, and only {sum(map(bool, outputs[:-1])) + 1} "
            f"of the plan's {len(layers)} layers were seen: leave out `model` of the plan"
        )
    sized = [
        {key: value for key, value in layer.items() if key not in ("out", "activation_bytes", *TIME_KEYS)}
        | ({"out": list(out)} if out else {})
        for layer, out in zip(layers, outputs, strict=True)
    ]
    result = {key: value for key, value in content.items() if key != "cost"}
    result["model"] = {**content["model"], "layers": sized}
    if edges:
        result["edges"] = [{**edge, **edges[edge["name"]]} for edge in content["edges"]]
    planned: int = content["schedule"]["num_micro_batches"]
    schedule: dict[str, Any] = {key: value for key, value in content["schedule"].items() if key != "seq_lengths"}
    if num_micro_batches < planned and not by_kind:
        kept = [[op for op in program if (op.micro_batch or 0) < num_micro_batches] for program in programs]
        schedule = _custom_schedule(schedule, kept)
    schedule |= {"num_micro_batches": num_micro_batches, "micro_batch_size": num_rows}
    if seq_lengths is not None:
        schedule["seq_lengths"] = list(seq_lengths)
    result["schedule"] = schedule
    return result


def forward_plan(content: Mapping[str, Any], programs: Sequence[Sequence[Op]]) -> dict[str, Any]:
    """The plan of a step without backwards: the forwards of ``programs``, in order."""
    forwards = [[op for op in program if op.kind is OpKind.FORWARD] for program in programs]
    others = {key: value for key, value in content.items() if key != "cost"}
    return {
        **others,
        "schedule": _custom_schedule(content["schedule"], forwards, is_placed=bool(content.get("modules"))),
    }


def _custom_schedule(
    schedule: Mapping[str, Any], programs: Sequence[Sequence[Op]], *, is_placed: bool = False
) -> dict[str, Any]:
    """The section of a schedule with other programs for the same stages, which are listed if ``is_placed``."""
    kept = ("num_micro_batches", "micro_batch_size", "seq_lengths", "num_chunks", "placement")
    sizes = {key: schedule[key] for key in kept if key in schedule}
    own = [sorted({op.stage for op in program}) for program in programs]
    if is_placed or sum(map(len, own)) > len(
        {stage for stages in own for stage in stages}
    ):  # copies, which programs do not imply
        sizes.pop("num_chunks", None)
        sizes["placement"] = own
    return {"kind": "custom", "programs": [[str(op) for op in program] for program in programs], **sizes}


@dataclass(frozen=True, slots=True)
class TrainedPlan:
    """The plan that a pipeline trains by: its keys, the plan as loaded and lowered, and its certificate."""

    content: dict[str, Any]
    lowered: LoweredPlan
    certificate: Certificate
    findings: tuple[Finding, ...] = ()
    """The errors of a plan that is not proved; only a pipeline with ``unsafe`` has such a plan."""

    def save(self, path: str | Path) -> None:
        """Write the plan as YAML, for `pipeproof check`, `simulate` and `tune`."""
        write_output(Path(path), yaml.safe_dump(self.content, sort_keys=False, default_flow_style=None, width=120))


_Result = TypeVar("_Result")

_WORDS = (
    (r"`schedule\.programs` is missing, which `kind: custom` needs", "`schedule` is 'custom', which is not a schedule"),
    (r"add `programs: .*`", "pass the operations of each rank: schedule=[['0F0', '0B0'], ['1F0', '1B0']]"),
    (r"`schedule\.path` is missing, which `kind: file` needs", "`schedule` is 'file', which is not a schedule"),
    (r"add `path: .*`", "pass the name of the file: schedule='zb.csv'"),
    (
        r"set schedule\.num_chunks to \d+|list the stages of each rank as schedule\.placement",
        "cut the model into as many stages as the schedule has",
    ),
    (
        r"schedule\.placement puts stage (\d+) on rank (\d+), which does not compute it",
        r"rank \2 has stage \1, which its operations do not compute",
    ),
    (r"set schedule\.num_sequence_splits to \d+", "take a schedule of whole sequences"),
    (r"schedule\.num_sequence_splits", "the number of sequence splits"),
    (r"and the plan (\d+) stage", r"and there are \1 stage"),
    (r"set topology\.pp to (\d+)", r"start \1 ranks"),
    (r"topology\.pp is (\d+)", r"the group of the pipeline has \1"),
    (r"schedule\.(kind|path|programs)", "schedule"),
    (r"schedule\.micro_batch_size", "the number of rows of the example"),
    (r"schedule\.(num_micro_batches|overlap)", r"\1"),
    (r"optimal, custom or file", "optimal, a file, or the operations of each rank"),
    (r"kind (interleaved|seq1f1b)", r"schedule='\1'"),
)
"""Texts of findings, and their replacements for scripts."""


def in_script_words(work: Callable[[], _Result], *, has_plan: bool) -> _Result:
    """Return the result of ``work``. Its findings name the script's arguments, unless the script has a plan.

    Raises:
        PlanFileError: ``work`` raised findings.
    """
    try:
        return work()
    except PipeproofError as error:
        if has_plan:
            raise
        raise PlanFileError(*(_translated(finding) for finding in error.findings)) from None


def _translated(finding: Finding) -> Finding:
    return replace(finding, message=_text(finding.message), help=None if finding.help is None else _text(finding.help))


def _text(text: str) -> str:
    for words, arguments in _WORDS:
        text = re.sub(words, arguments, text)
    return text


def num_stages_of(
    plan: Mapping[str, Any] | None, schedule: Mapping[str, Any], num_ranks: int, num_chunks: int | None
) -> int:
    """The number of stages in a plan: as named, or ``num_chunks`` per rank, or the fewest that its schedule needs.

    Raises:
        PipelineError: the schedule is in a file, which this function does not read.
    """
    content = dict(plan or {})
    section = content.get("schedule", schedule)
    if isinstance(content.get("stages"), list | tuple):
        return len(content["stages"])
    if isinstance(section.get("placement"), list | tuple):
        return len({number for own in section["placement"] for number in own})
    if section.get("programs"):
        numbers = [re.match(r"\d+", str(op)) for program in section["programs"] for op in program]
        return 1 + max((int(op_match.group()) for op_match in numbers if op_match), default=0)
    chunks = section.get("num_chunks") or num_chunks
    if chunks:
        return num_ranks * int(chunks)
    if section.get("kind") == "file":
        raise PipelineError("give num_virtual_pipeline_stages: the stages of each rank by the file of the schedule")
    kind = SCHEDULE_KINDS.get(str(section.get("kind")))
    return num_ranks * (1 if kind is None else kind.min_chunks)


def require_num_stages(schedule: str, num_stages: int, num_ranks: int) -> None:
    """Refuse a number of stages that a kind of schedule does not have on that many ranks.

    Raises:
        PipelineError: names the numbers that it has.
    """
    kind = SCHEDULE_KINDS.get(schedule)
    if kind is None:
        return
    fewest, most = kind.min_chunks * num_ranks, None if kind.max_chunks is None else kind.max_chunks * num_ranks
    is_any = kind.placement is Placement.ANY
    if fewest <= num_stages <= (most or num_stages) and (is_any or not num_stages % num_ranks):
        return
    each = "one stage" if kind.min_chunks == 1 else f"{kind.min_chunks} stages"
    wanted = f"{fewest} stage{'s' * (fewest > 1)}"
    if most is None:
        each += " or more"
        nearest = max(fewest, num_stages - num_stages % num_ranks)
        wanted = wanted if is_any else f"{nearest} or {nearest + num_ranks} stages"
    other = "" if is_any or num_stages < num_ranks else ", or use looped_bfs, which has any number of stages"
    raise PipelineError(
        f"{schedule} has {each} on each rank, and there {'is' if num_stages == 1 else 'are'} {num_stages} on "
        f"{num_ranks} rank{'s' * (num_ranks > 1)}: cut the model into {wanted}{other}"
    )
