"""Runs the wrong and right examples of the rule documents: from a text to the findings that it brings."""

import re
import shlex

from click.testing import CliRunner

from pipeproof.cli import main as cli
from pipeproof.comm.lower import blaming_plan, lower_loaded
from pipeproof.diagnostics.finding import BadPlanError, ExampleKind
from pipeproof.diagnostics.yaml_tree import parse_text
from pipeproof.interop import Flags, check_imported, import_files
from pipeproof.sim.outcome import NO_ROOM, NOT_FAST, UNFINISHED, SimulationError
from pipeproof.sim.simulate import simulate
from pipeproof.specs.load_plan import load_plan
from pipeproof.specs.plan import PLAN_FILE_CODES
from pipeproof.verify.check_plan import check, check_subject
from pipeproof.verify.subject import program_subject
from tests.plans import plan_file, subject
from tests.profiles import profile_files
from tests.specs.plans import EXAMPLE

FILE_CODES = frozenset(doc.code for doc in PLAN_FILE_CODES)


def csv_of(*programs):
    """Programs, one a rank, each for micro-batches 0 to 3, as PyTorch writes them."""
    return "".join(
        ",".join(cell.format(m) for m in range(4) for cell in program.split()) + "\n" for program in programs
    )


SCHEDULES = {
    "schedules/zb.csv": csv_of("0F{0} 0I{0} 0W{0}", "1F{0} 1I{0} 1W{0}"),
    "with_sends.csv": csv_of("0F{0} 0SEND_F{0} 0RECV_B{0} 0B{0}", "1RECV_F{0} 1F{0} 1B{0} 1SEND_B{0}"),
}
"""Files that examples name: two ranks in PyTorch's formats, compute only and with communication."""


def can_run(doc):
    """True if its examples are input of ``check`` or ``convert``, or run without processes in another way."""
    is_check = doc.wrong.startswith(("pipeproof check ", "pipeproof schedule convert "))
    return is_check if doc.example_kind is ExampleKind.COMMAND else doc.example_kind is not ExampleKind.OUTCOME


def findings_of(doc, text, folder):
    """The findings in one example of ``doc``; ``folder`` is empty and may be written to."""
    match doc.example_kind:
        case ExampleKind.PLAN if doc.code in FILE_CODES:
            return refused_or(lambda: of_file(text, folder))
        case ExampleKind.PLAN if doc is NOT_FAST:
            return refused_or(lambda: simulated_plan(load_plan(overlaid(text, folder)), engine="fast"))
        case ExampleKind.PLAN if doc is NO_ROOM:
            return refused_or(lambda: simulated_plan(load_plan(overlaid(text, folder))))
        case ExampleKind.PLAN:
            return refused_or(lambda: check(load_plan(overlaid(text, folder))).findings)
        case ExampleKind.PROGRAM if doc is UNFINISHED:
            return simulated(text)
        case ExampleKind.PROGRAM:
            return refused_or(lambda: check_subject(program_subject(text)).findings)
        case ExampleKind.PYTHON:
            names = {}
            exec(compile(text, doc.code, "exec"), names)
            return check_subject(names["subject"]).findings
        case ExampleKind.JOB:
            return refused_or(lambda: of_job(text, folder))
        case ExampleKind.COMMAND:
            return of_command(text, folder)
    raise AssertionError(f"{doc.code}: an example of kind {doc.example_kind} cannot be run")


def of_job(text, folder):
    """The findings about settings of another tool, as ``check --from`` shows them."""
    file = folder / "job"
    file.write_text(text, encoding="utf-8")
    kind = "fleet" if "_configs {" in text else "megatron" if "pretrain_gpt" in text else "paddleformers"
    return check_imported(import_files(kind, [file], Flags())).findings


def refused_or(judge):
    """The findings of a judgement, or of the refusal to judge at all."""
    try:
        return judge()
    except BadPlanError as error:
        return error.findings


def simulated(text):
    """Findings of simulating a program of two ranks, with the costs of the base plan."""
    try:
        simulate(subject().plan.with_graph(program_subject(text).graph))
    except SimulationError as error:
        return error.findings
    return ()


def simulated_plan(loaded, **options):
    """Nothing, if the plan can be simulated."""
    with blaming_plan(loaded):
        simulate(lower_loaded(loaded), **options)
    return ()


def overlaid(text, folder):
    """A plan file: the base plan of the tests with the keys of a fragment over its own, and schedules next to it."""
    tree = parse_text(text, "example")
    assert tree.complete, tree.problems
    assert not tree.problems, tree.problems
    for name, content in {**SCHEDULES, **profile_files()}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    return plan_file(folder / "plan.json", **tree.data)


def of_file(fragment, folder):
    """Findings of a plan file in which the sections of ``fragment`` stand as they are written."""
    replaced = set(re.findall(r"^(\w+):", fragment, re.MULTILINE))
    sections = re.split(r"^(?=\w)", EXAMPLE, flags=re.MULTILINE)
    kept = [section for section in sections if section.split(":")[0] not in replaced]
    path = folder / "plan.yaml"
    path.write_text("".join([*kept, fragment, "\n"]))
    load_plan(path)
    return ()


def of_command(line, folder):
    """The findings that ``pipeproof ...`` reports, with ``plans/gpt.yaml`` and ``zero_bubble.csv`` in the folder."""
    name, *arguments = shlex.split(line, comments=True)
    assert name == "pipeproof"
    plans = folder / "plans"
    plans.mkdir(exist_ok=True)
    (plans / "gpt.yaml").write_text(EXAMPLE)
    (folder / "zero_bubble.csv").write_text(SCHEDULES["schedules/zb.csv"])
    paths = [str(folder / word) if word.startswith(("plans/", "zero_bubble")) else word for word in arguments]
    result = CliRunner().invoke(cli.main, paths)
    assert result.exit_code in (0, 1, 2), result.output
    return tuple(Reported(*found) for found in re.findall(r"^(\w+)\[(PP\d{3})\]", result.output, re.MULTILINE))


class Reported:
    """A finding as far as a line of text tells it."""

    def __init__(self, severity, code):
        self.severity, self.code = severity, code
