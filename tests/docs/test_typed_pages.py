"""Commands of pages are typed in a shell, and print the shown output; see ``validation/pages/console_blocks.py``."""

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

START = ("start-fleet.md", "start-megatron.md", "start-pytorch.md", "start-research.md", "start-testing.md")
"""The first page of each kind of user; ``validation/pages/follow_tutorial.py`` follows them, installation and all."""

WITH_OUTPUT = ("fleet-bug.md", *START)
"""Pages that show the output of each command."""

OTHERS = {
    "aoa.md": {},
    "faq.md": {},
    "checking.md": {"programs.txt": "schedules/two_by_two.txt"},
    "importing.md": {},
    "memory.md": {},
    "my-job-hangs.md": {},
    "overlap.md": {},
    "pictures.md": {},
    "play.md": {},
    "schedules-from-files.md": {},
    "simulating.md": {},
    "testing-your-plans.md": {"plan.yaml": "gpt_pp4.yaml"},
}
"""Pages whose commands end with a verdict, with the files that they take for granted: name, and which example."""

EXEMPT = {
    "aligning.md": "minutes of runs, and logs of other programs; tests/align",
    "cut-by-hand.md": "processes of PyTorch; tests/train/test_cut_by_hand_page.py",
    "flex.md": "states, and runs of Paddle that save them; tests/state/flex",
    "gpus.md": "GPUs",
    "measured.md": "measures the machine; tests/exec/test_profile.py",
    "many-hosts.md": "several hosts; tests/exec/test_many_hosts.py",
    "names.md": "states, and files of other tools; tests/state/names",
    "plan.md": "asks for answers; tests/cli/test_init.py",
    "recording.md": "programs of PyTorch and Paddle, and their logs; tests/interop/record",
    "rehearsing.md": "processes for half a minute; tests/exec/test_rehearsal.py",
    "running.md": "processes for half a minute; tests/exec/test_run.py",
    "schedules.md": "files of other tools; tests/schedule and tests/docs/test_schedule_pages.py",
    "solving.md": "searches for minutes; tests/schedule",
    "state.md": "runs that go on from others; tests/state",
    "sweep.md": "a cluster, and worker processes; tests/sweep",
    "tune.md": "searches of minutes; tests/tune and tests/cli/test_tune.py",
    "tutorial.md": "`make tutorial` follows it, installation and all, in a fresh environment; .ci/run calls it",
    "custom-layers.md": "processes that train; tests/train",
    "train.md": "processes of PyTorch; tests/train/test_train_page.py",
}
"""Pages whose commands are not typed by these tests, and why; links of pages and their options are tested for all."""


def console(text):
    return "```console\n" in text


@pytest.fixture
def blocks(validation_script):
    return validation_script("console_blocks")


@pytest.fixture
def session(blocks, tmp_path):
    """A shell in an empty directory with ``pipeproof`` and ``python`` of this environment."""
    work, state = tmp_path / "work", tmp_path / "state"
    programs = work / ".venv" / "bin"
    state.mkdir()
    programs.mkdir(parents=True)
    for name, arguments in (("pipeproof", " -m pipeproof"), ("python", "")):
        (programs / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)}{arguments} "$@"\n')
        (programs / name).chmod(0o755)
    variables = {"PATH": f"{programs}:/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    return blocks.Session(work, state, variables)


@pytest.fixture
def work(session, tmp_path):
    return tmp_path / "work"


@pytest.mark.slow(but=["start-research.md"])
@pytest.mark.parametrize("name", WITH_OUTPUT)
def test_commands_print_what_the_page_shows(name, blocks, session, work):
    shutil.copytree(ROOT / "examples", work / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    steps = [step for step in blocks.steps_of((DOCS / name).read_text(encoding="utf-8")) if not installs(step)]
    assert sum(isinstance(step, blocks.Command) for step in steps) >= 5
    for step in steps:
        session.follow(step)


def installs(step):
    """True if a step makes the environment, which the session has."""
    return getattr(step, "text", "").startswith(("python3 -m venv", ".venv/bin/pip", "export PATH="))


@pytest.mark.slow
def test_the_answer_of_the_page_of_tune_ends_in_launch_arguments(blocks, session):
    """The worked question of 256 devices: a search of half a minute, the script that it writes, and its check."""
    text = (DOCS / "tune.md").read_text(encoding="utf-8")
    (section,) = re.findall(r"^### [^\n]*, to the launch arguments$.*?(?=^### )", text, re.DOTALL | re.MULTILINE)
    steps = list(blocks.steps_of(section))
    assert len(steps) == 3
    for step in steps:
        session.follow(step)


@pytest.mark.slow(but=["schedules-from-files.md", "aoa.md"])
@pytest.mark.parametrize("name", OTHERS)
def test_commands_end_with_a_verdict(name, blocks, session, work):
    shutil.copytree(ROOT / "examples", work / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    for file, example in OTHERS[name].items():
        shutil.copy(ROOT / "examples" / example, work / file)
    steps = list(blocks.steps_of((DOCS / name).read_text("utf-8")))
    assert any(isinstance(step, blocks.Command) for step in steps)
    for step in steps:
        session.follow(step)


def test_every_page_is_typed_or_exempt():
    pages = {page.name for page in DOCS.glob("*.md") if console(page.read_text(encoding="utf-8"))}
    typed = {*OTHERS, *WITH_OUTPUT}
    assert not typed & EXEMPT.keys()
    assert pages - typed - EXEMPT.keys() == set(), "type its commands, or say in EXEMPT why not"
    assert (typed | EXEMPT.keys()) - pages == set(), "it shows no command any more"


@pytest.mark.parametrize("page", sorted((DOCS / "zh").glob("*.md")), ids=lambda page: page.name)
def test_translations_have_the_blocks_of_the_original(page, blocks):
    """The tests of the original then hold for the translation."""

    def all_blocks(path):
        return [match[0] for match in blocks.BLOCK.finditer(path.read_text(encoding="utf-8"))]

    assert all_blocks(page) == all_blocks(DOCS / page.name)
    assert len(all_blocks(page)) >= 10


@pytest.mark.parametrize("page", sorted((DOCS / "zh").glob("*.md")), ids=lambda page: page.name)
def test_translations_have_the_sections_of_the_original(page, blocks):
    """Section by section: the level of its heading, its blocks, the pages that it links to."""

    def sections(path):
        text = path.read_text(encoding="utf-8")
        typed = [match[0] for match in blocks.BLOCK.finditer(text)]
        for number, block in enumerate(typed):
            text = text.replace(block, f"<block {number}>", 1)
        parts = re.split(r"^(#+) .*$", text, flags=re.MULTILINE)[1:]
        return [
            (level, re.findall(r"<block \d+>", body), {Path(link).name for link in re.findall(r"\]\(([^)#]+)", body)})
            for level, body in zip(parts[::2], parts[1::2], strict=True)
        ]

    translated, original = sections(page), sections(DOCS / page.name)
    assert len(translated) == len(original) >= 8
    assert translated[0][:2] == original[0][:2]  # each links to the other there
    assert translated[1:] == original[1:]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("$ echo one\ntwo\n", r"line 2: `echo one` prints something else\n(.*\n)*-two\n\+one"),
        ("$ true\nmore\n", r"line 2: .*\n(.*\n)*-more"),
        ("$ echo one; echo two\none\n", r"line 2: .*\n(.*\n)*\+two"),
        ("$ echo one\n$ echo two\ntwo\n", r"line 2: .*\n(.*\n)*\+one"),
        ("$ sh -c 'exit 2'\n", r"line 2: .* ended with status 2"),
        ("$ echo 'Traceback (most recent call last):'\n", r"line 2: .* ended with status 0\nTraceback"),
    ],
)
def test_a_command_that_does_otherwise_is_told(output, message, blocks, session):
    (step, *_) = blocks.steps_of(f"```console\n{output}```\n")
    with pytest.raises(blocks.Mismatch) as told:
        session.follow(step)
    assert re.search(message, str(told.value))
