"""Commands in the pages exist, their links lead somewhere, and their code runs."""

import re
import shlex
from pathlib import Path

import click
import pytest

from pipeproof.cli.main import main
from pipeproof.exec.store.launcher_table import LAUNCHERS
from pipeproof.specs.load_plan import load_plan

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    + [*(ROOT / "docs").rglob("*.md"), *(ROOT / "validation" / "results").glob("*.md")]
)
TEXT = {page: page.read_text(encoding="utf-8") for page in PAGES}


def name_of(page):
    return str(page.relative_to(ROOT))


def anchors(page):
    """The anchors that GitHub gives the headings of a page, and the anchors of the rows of a list."""
    text = page.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    named = {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
    return named | set(re.findall(r'<a id="(\w+)">', text))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    broken = []
    for target in re.findall(r"\]\((?!https://)([^)\s]+)\)", TEXT[page]):
        file, _, anchor = target.partition("#")
        there = (page.parent / file).resolve() if file else page
        exists = there.exists() and there.is_relative_to(ROOT)
        if not exists or (anchor and anchor not in anchors(there)):
            broken.append(target)
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_are_named_exist(page):
    """A path in code quotes is of the repository, of the package or the page's own; a directory ends with a slash."""
    spans = re.findall(r"`([^`\s]+)`", TEXT[page])
    paths = [span for span in spans if re.fullmatch(r"[\w.]+(/[\w.]+)*(/|\.(py|md|yaml|json|toml))", span)]
    own = re.findall(r'^```\w+ title="(.+)"$', TEXT[page], re.MULTILINE)
    missing = [path for path in paths if path not in own and not any((base / path).exists() for base in PLACES)]
    assert not missing


PLACES = (ROOT, ROOT / "pipeproof", ROOT / "validation" / "results")


def commands(page):
    """Command lines of console blocks and of code quotes, without comments, prompts, redirections and output."""
    lines = [
        line.removeprefix("$ ")
        for block in re.findall(r"```console\n(.*?)```", TEXT[page], re.DOTALL)
        for line in block.splitlines()
        if line.startswith("$ ")
    ]
    lines += [
        span for span in re.findall(r"`([^`\n]+)`", TEXT[page]) if re.match(r"(\S*/)?(pipeproof|python|make) ", span)
    ]
    for line in lines:
        words = shlex.split(line, comments=True)
        if words:
            words = words[: words.index(">")] if ">" in words else words
            yield words[0].removeprefix(".venv/bin/"), words[1:]


TYPED = (
    "tutorial.md",
    "fleet-bug.md",
    "train.md",
    "cut-by-hand.md",
    *(page.name for page in (ROOT / "docs").glob("start-*.md")),
)
"""Pages whose commands are typed in a shell: tests/docs/test_typed_pages.py, tests/train/test_*_page.py."""

ALL_COMMANDS = sorted(
    {(name, *arguments) for page in PAGES if page.name not in TYPED for name, arguments in commands(page)}
)


@pytest.mark.parametrize("command", [pytest.param(c, id=" ".join(c)) for c in ALL_COMMANDS if c[0] == "pipeproof"])
def test_pipeproof_commands_can_be_typed(command):
    _, name, *arguments = command
    # with its parent, as on the command line: a command keeps what its first context told it of options
    parent = main.make_context("pipeproof", [name, *arguments][: 1 + name.startswith("--")], resilient_parsing=True)
    if name.startswith("--"):  # an option of pipeproof itself, as --explain CODE
        return
    found = main.commands[name]
    while isinstance(found, click.Group) and arguments:
        parent = found.make_context(name, arguments[:1], parent=parent, resilient_parsing=True)
        name, *arguments = arguments
        found = found.commands[name]
    if arguments and arguments != ["--help"]:  # else it is a name in a sentence, or help, which ends the program
        found.make_context(name, list(arguments), parent=parent)
    for argument in arguments:
        others = ("examples/aoa/", "examples/importing/", "examples/recording/")  # statements, files of others, logs
        if argument.startswith("examples/") and not argument.startswith(others):
            load_plan(ROOT / argument)


@pytest.mark.parametrize("command", [c for c in ALL_COMMANDS if c[0] == "make"], ids=" ".join)
def test_make_targets_exist(command):
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(rf"^{command[1]}:", makefile, re.MULTILINE)


@pytest.mark.parametrize("command", [c for c in ALL_COMMANDS if c[0] == "python"], ids=" ".join)
def test_python_commands_name_what_exists(command):
    _, *arguments = command
    if arguments[:2] == ["-m", "pytest"]:
        paths = [argument for argument in arguments[2:] if "/" in argument or argument == "tests"]
        assert paths or "-m" in arguments[2:]
    elif arguments[0] == "-m":
        paths = [arguments[1].replace(".", "/")]
    elif arguments[0] == "-c":
        paths = []
        compile(arguments[1], "-c", "exec")
    else:
        paths = arguments[:1]
        assert paths[0].endswith(".py")
    assert all((ROOT / path).exists() for path in paths)


@pytest.mark.parametrize("command", [c for c in ALL_COMMANDS if c[0] == "torchrun"], ids=" ".join)
def test_torchrun_starts_what_exists(command):
    """After the numbers of hosts and processes and the rendezvous: the package, or a script."""
    options, words = {}, list(command[1:])
    while words[0] != "-m" and words[0].startswith("--"):
        option, value, *words = words
        options[option] = value
    assert options.keys() <= {"--nnodes", "--nproc-per-node", "--rdzv-endpoint", "--rdzv-backend"}
    assert options["--nproc-per-node"].isdigit()
    assert words[0] == "-m" or (ROOT / words[0]).exists()


@pytest.mark.parametrize("command", [c for c in ALL_COMMANDS if c[0] in {"mpirun", "srun"}], ids=" ".join)
def test_other_launchers_start_ranks_as_messages_suggest(command):
    (row,) = (row for row in LAUNCHERS if row.command.startswith(f"{command[0]} "))
    start = command.index("pipeproof")
    words = list(command[:start])
    if "--nodes" in words:
        assert words[words.index("--nodes") + 1].isdigit()
        del words[words.index("--nodes") : words.index("--nodes") + 2]
    pattern = (
        re.escape(row.command.format(ranks="RANKS")).replace("RANKS", r"\d+").replace("HOST_OF_RANK_0", r"[\w.-]+")
    )
    assert re.fullmatch(pattern, " ".join(words))
    assert command[start + 1] in main.commands


PYTHON = "\n".join(re.findall(r"```python\n(.*?)```", TEXT[ROOT / "docs" / "testing-your-plans.md"], re.DOTALL))


@pytest.mark.parametrize("name", re.findall(r"^def (test_\w+)", PYTHON, re.MULTILINE))
@pytest.mark.needs("hypothesis")
def test_the_code_of_the_testing_page_runs(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    namespace = {}
    exec(compile(PYTHON, "testing-your-plans.md", "exec"), namespace)
    namespace[name]()


def test_the_code_of_the_checking_page_runs():
    (code,) = re.findall(r"```python\n(.*?)```", TEXT[ROOT / "docs" / "checking.md"], re.DOTALL)
    exec(compile(code, "checking.md", "exec"), {})


def test_the_plan_of_the_plan_page_loads(tmp_path):
    (block,) = [
        b for b in re.findall(r"```yaml\n(.*?)```", TEXT[ROOT / "docs" / "plan.md"], re.DOTALL) if "model:" in b
    ]
    plan = tmp_path / "plan.yaml"
    plan.write_text(block)
    assert load_plan(plan).spec.stages == (("embed", "layer.0", "layer.1"), ("layer.2", "layer.3", "norm", "head"))
