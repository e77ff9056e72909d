"""Writes the tables of ``results/reshard-matrix.md`` from the results in ``results/reshard-matrix.json``.

``python validation/pages/make_reshard.py`` writes, ``--check`` exits 1 if the page is stale. ``--measure`` measures
everything again with real processes: it needs Paddle and about twenty minutes on two cores. With names of models behind
it, those alone are measured.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from pages import EVIDENCE, fill, main, table
from reshard_job import STATES_FILE
from reshard_plans import MODELS, NUM_STEPS, STEPS_BEFORE, loaded, plan_of, topologies

from pipeproof.cli.main import main as pipeproof
from pipeproof.comm.accumulation_order import sum_orders, tied_sums
from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.exec.compare.reference_process import run_reference
from pipeproof.exec.compare.step_losses import main_loss
from pipeproof.exec.launch.run_plan import StepCollector
from pipeproof.exec.launch.supervisor import Launcher, job_directory
from pipeproof.exec.launch.watchdog import JobState
from pipeproof.exec.rank.job_files import CheckpointOptions, Job, RunOptions, dump_plan
from pipeproof.stages.reference.bound import parallel_bound
from pipeproof.state.checkpoint import md5_of_all, tensor_md5s
from pipeproof.state.open_checkpoint import open_checkpoint
from pipeproof.state.state_index import provenance_file
from pipeproof.verify.certificate import Verdict, certificate_of, graph_digest
from pipeproof.verify.subject import make_subject

RESULTS = EVIDENCE / "reshard-matrix.json"
PATIENCE_S = 120.0


# --- measuring ---


def measure(models: Iterable[str]) -> dict[str, Any]:
    """Return the results of these models."""
    results = {}
    for model in models:
        with tempfile.TemporaryDirectory() as folder:
            results[model] = _of_model(model, Path(folder))
    return results


def _of_model(model: str, root: Path) -> dict[str, Any]:
    """Return ``trained``, the uninterrupted runs, and ``pairs``, the results of each state on each topology."""
    names = topologies(model)
    trained = {name: _trained(model, name, root) for name in names}
    pairs: dict[str, dict[str, Any]] = {}
    for one, other in product(names, names):
        pairs[f"{one} {other}"] = _there_and_back(model, one, other, root)
    _report_progress(f"{model}: {len(pairs)} states resharded, and back")
    for other in names:
        for one, steps in _resumed(model, names, other, root).items():
            pairs[f"{one} {other}"] |= {
                "losses": [step["loss"] for step in steps],
                "bitwise": all(step["bitwise"] for step in steps),
                "distance": max(step["distance"] for step in steps),
            }
        _report_progress(f"{model}: {other} resumed from {len(names)} states")
    return {"trained": trained, "pairs": pairs}


def _trained(model: str, name: str, root: Path) -> dict[str, Any]:
    """Run without interruption and save the state half way."""
    plan, report, states = root / f"{name}.json", root / f"{name}.report.json", root / name
    plan.write_text(json.dumps(plan_of(model, name)))
    _pipeproof("run", plan, "--save", states, "--save-every", STEPS_BEFORE, "--report", report)
    report_data = json.loads(report.read_text())
    subject = make_subject(loaded(model, name))
    md5s = tensor_md5s(open_checkpoint(_saved(root, name)))
    _report_progress(f"{model}: {name} trained")
    return {
        "passed": report_data["passed"],
        "losses": [step["loss"] for step in report_data["steps"]],
        "order": _order(subject.plan),
        "bound": parallel_bound(subject.plan.spec),
        "num_tensors": len(md5s),
        "md5": md5_of_all(md5s),
    }


def _saved(root: Path, name: str) -> Path:
    return root / name / f"step-{STEPS_BEFORE:08d}"


def _order(plan: LoweredPlan) -> str:
    """Hash of the orders in which numbers are added: plans with the same hash have the same bits."""
    axes = {axis: plan.mesh.size(axis) for axis in ("tp", "cp", "ep", "dp")}
    orders = sum_orders(plan)
    text = repr((axes, plan.spec.topology.sequence_parallel, orders.loss, orders.by_parameter(plan), tied_sums(plan)))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _there_and_back(model: str, one: str, other: str, root: Path) -> dict[str, Any]:
    """Reshard the state of one topology for the other and back, and merge both into one file."""
    source, there = _saved(root, one), root / f"{one} {other}"
    back, merged = root / f"{one} {other} back", [root / f"{name}.safetensors" for name in ("one", "other")]
    _pipeproof("state", "reshard", source, "--to", root / f"{other}.json", "-o", there)
    _pipeproof("state", "reshard", there, "--to", root / f"{one}.json", "-o", back)
    for made, file in zip((source, there), merged, strict=True):
        _pipeproof("state", "reshard", made, "-o", file)
    before, after = (tensor_md5s(open_checkpoint(place)) for place in (source, back))
    files = list(source.glob("*.safetensors"))
    result = {
        "equal_tensors": sum(after.get(name) == md5 for name, md5 in before.items()),
        "num_tensors": len(before.keys() | after.keys()),
        "equal_files": sum((back / file.name).read_bytes() == file.read_bytes() for file in files),
        "num_files": len(files),
        "merged_md5s": [hashlib.md5(file.read_bytes(), usedforsecurity=False).hexdigest() for file in merged],
    }
    for file in merged:
        file.unlink()
        provenance_file(file).unlink()
    return result


def _resumed(model: str, names: Sequence[str], other: str, root: Path) -> dict[str, list[dict[str, Any]]]:
    """Steps of the resumed runs by saving topology, with their comparison to the reference from the same state."""
    subject = make_subject(loaded(model, other))
    with job_directory(None) as directory:
        states = [_saved(root, other) if one == other else root / f"{one} {other}" for one in names]
        kept = CheckpointOptions(resume=states[0], first_step=STEPS_BEFORE, reference_from_state=True)
        certificate = certificate_of(subject, graph_digest(subject), Verdict.PROVED)
        job = Job(directory, dump_plan(subject.loaded), certificate, RunOptions(checkpoint=kept))
        job.save()
        (directory / STATES_FILE).write_text(json.dumps([str(state) for state in states]))
        for number in range(len(states)):
            (directory / str(number)).mkdir()
        launcher = Launcher(job, JobState(subject), PATIENCE_S, "reshard_job", has_reference=False)
        launcher.run(lambda: None)
        found = {}
        for number, (one, state) in enumerate(zip(names, states, strict=True)):
            options = replace(job.options, checkpoint=replace(kept, resume=state))
            own = replace(job, directory=directory / str(number), options=options)
            run_reference(own, lambda _: None)
            steps = StepCollector(own, subject).collect(NUM_STEPS)
            found[one] = [
                {
                    "loss": float(main_loss(step.loss)),
                    "bitwise": step.bitwise,
                    "distance": max(gradient.unpartitioned_max_rel_diff for gradient in step.gradients),
                }
                for step in steps
            ]
    return found


def _pipeproof(*arguments: object) -> None:
    result = CliRunner().invoke(pipeproof, [str(one) for one in arguments])
    if result.exit_code:
        raise SystemExit(f"pipeproof {' '.join(map(str, arguments))}: status {result.exit_code}\n{result.output}")


def _report_progress(text: str) -> None:
    sys.stderr.write(f"{text}\n")


# --- the page ---


def _cell(result: Mapping[str, Any], one: str, other: str) -> str:
    """Compare the losses of a resharded state with the uninterrupted run."""
    pair, trained = result["pairs"][f"{one} {other}"], result["trained"][one]
    if not _is_right(pair):
        return "**wrong**"
    if pair["losses"] == trained["losses"][STEPS_BEFORE:]:
        return "="
    return f"{_apart(pair['losses'], trained['losses'][STEPS_BEFORE:]):.0e}"


def _is_right(pair: Mapping[str, Any]) -> bool:
    """True if all tensors, files and steps of a pair are correct."""
    return (
        pair["bitwise"]
        and pair["equal_tensors"] == pair["num_tensors"]
        and pair["equal_files"] == pair["num_files"]
        and len(set(pair["merged_md5s"])) == 1
    )


def _apart(losses: Iterable[float], others: Iterable[float]) -> float:
    return max(abs(one - other) / abs(other) for one, other in zip(losses, others, strict=True))


def matrix_part(result: Mapping[str, Any]) -> str:
    """Table with a row for each topology that saved and a column for each that resumed."""
    return _matrix(result, "saved by", lambda one, other: _cell(result, one, other))


def _matrix(result: Mapping[str, Any], corner: str, cell: Callable[[str, str], str]) -> str:
    names = list(result["trained"])
    return table((corner, *names), [(f"**{one}**", *(cell(one, other) for other in names)) for one in names])


def there_and_back_part(result: Mapping[str, Any]) -> str:
    """The matrix of method 1: tensors with equal MD5 after A, B, A, if A and B resumed with the reference's bits."""

    def cell(one: str, other: str) -> str:
        pair = result["pairs"][f"{one} {other}"]
        resumed = pair["bitwise"] and result["pairs"][f"{one} {one}"]["bitwise"]
        return f"{pair['equal_tensors']} of {pair['num_tensors']}" if resumed else "**wrong**"

    return _matrix(result, "A, B", cell)


def merged_part(result: Mapping[str, Any]) -> str:
    """The matrix of method 2: the first digits of the MD5 of the merged file of A, and of B's if it is another one."""

    def cell(one: str, other: str) -> str:
        return ", ".join(dict.fromkeys(md5[:6] for md5 in result["pairs"][f"{one} {other}"]["merged_md5s"]))

    return _matrix(result, "A, B", cell)


def summary_part(results: Mapping[str, Any]) -> str:
    """Summary of all pairs, one sentence group for each model."""
    lines = []
    for model, result in results.items():
        pairs, trained = result["pairs"], result["trained"]
        right = sum(map(_is_right, pairs.values()))
        equal = {pair for pair in pairs if _cell(result, *pair.split()) == "="}
        ordered = {
            f"{one} {other}" for one, other in product(trained, trained)
            if trained[one]["order"] == trained[other]["order"]
        }  # fmt: skip
        shares = [pair["distance"] / trained[name.split()[1]]["bound"] for name, pair in pairs.items()]
        first = next(iter(trained.values()))
        sentences = (
            f"- **{model}**: {len(pairs)} pairs of {len(trained)} topologies, {first['num_tensors']} tensors.",
            f"In {right} of {len(pairs)} pairs every tensor keeps its MD5 and every file its bytes, there and back,",
            "both merged files have the same MD5, and all steps on the other topology are bitwise equal to the",
            "reference.",
            f"Losses are bitwise equal to the uninterrupted run in {len(equal)} pairs,",
            f"including {len(ordered & equal)} of the {len(ordered)} pairs that add in the same order.",
            f"The largest gradient distance from the unpartitioned model is {max(shares):.2f} of its bound.",
        )
        lines.append(" ".join(sentences))
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        known = json.loads(RESULTS.read_text(encoding="utf-8")) | measure(sys.argv[2:] or MODELS)
        RESULTS.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        sys.exit(0)
    measured = json.loads(RESULTS.read_text(encoding="utf-8"))
    page = EVIDENCE / "reshard-matrix.md"
    shards = {"summary": summary_part(measured)} | {model: matrix_part(measured[model]) for model in MODELS}
    shards |= {"method-1": there_and_back_part(measured["flex"]), "method-2": merged_part(measured["flex"])}
    sys.exit(main("validation/pages/make_reshard.py", {page: fill(page, shards)}))
