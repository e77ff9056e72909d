"""The pytest plugin as a user's project has it: pytest in a process of its own finds it by its entry point."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "your_own_tests"

SOUND = (EXAMPLE / "plans" / "pretrain.yaml").read_text(encoding="utf-8")
LOSSY = SOUND.replace("transport: full", "transport: partial")


@pytest.fixture(scope="module")
def run_pytest(tmp_path_factory):
    """Run pytest in a directory, with this checkout as installed: what an installation has next to the package."""
    installed = tmp_path_factory.mktemp("site")
    meta = installed / "pipeproof-0.dist-info"
    meta.mkdir()
    (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: pipeproof\nVersion: 0\n")
    points = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in named.items()) for group, named in points.items()]
    (meta / "entry_points.txt").write_text("".join(lines))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment = {**kept, "PYTHONPATH": os.pathsep.join([str(ROOT), str(installed)]), "PYTHONDONTWRITEBYTECODE": "1"}

    def run(directory, *arguments):
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--no-header", "-rN", *arguments]
        return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=120)

    return run


@pytest.fixture
def project(tmp_path):
    """A project with two plans and a test."""
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\ntestpaths = ["tests"]\n')
    for name, text in (("sound.yaml", SOUND), ("lossy.yaml", LOSSY)):
        path = tmp_path / "plans" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_one.py").write_text("def test_one():\n    pass\n")
    return tmp_path


@pytest.mark.slow
def test_the_example_project_passes(run_pytest, tmp_path):
    copy = shutil.copytree(EXAMPLE, tmp_path / "project", ignore=shutil.ignore_patterns("__pycache__", ".hypothesis"))
    done = run_pytest(copy, "-v", "-n0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "plans/pretrain.yaml::plan PASSED" in done.stdout
    assert "12 passed" in done.stdout


@pytest.mark.needs("hypothesis")
def test_a_refused_plan_fails_with_its_diagnostics_alone(run_pytest, project):
    done = run_pytest(project, "--pipeproof-plans=plans/*.yaml")
    assert done.returncode == 1
    assert "1 failed, 2 passed" in done.stdout
    assert "plan lossy.yaml" in done.stdout
    assert "error[PP201]: boundary 0->1, forward: `partial` delivers" in done.stdout
    assert "--> plans/lossy.yaml:6:1" in done.stdout
    assert "Traceback" not in done.stdout
    assert "plugin.py" not in done.stdout


@pytest.mark.slow
def test_plans_are_distributed_and_named_once(run_pytest, project):
    done = run_pytest(project, "-n2", "--pipeproof-plans=plans/s*.yaml", "--pipeproof-plans=plans/sound.yaml", "plans")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


@pytest.mark.slow
def test_strict_plans(run_pytest, project):
    done = run_pytest(project, "--pipeproof-plans", str(project / "plans" / "sound.yaml"), "--pipeproof-strict")
    assert done.returncode == 0  # 1F1B has a note, and notes never fail
    assert "2 passed" in done.stdout


def test_no_plans_are_collected_unless_asked_for_and_nothing_is_loaded(run_pytest, project):
    (project / "conftest.py").write_text("import sys\nsys.modules['hypothesis'] = None\n")
    (project / "tests" / "test_one.py").write_text(
        "import sys\n\n\ndef test_one():\n"
        "    ours = {name for name in sys.modules if name.startswith('pipeproof')}\n"
        "    assert ours == {'pipeproof', 'pipeproof.version', 'pipeproof.testing', 'pipeproof.testing.plugin'}\n"
        "    assert not {'numpy', 'pydantic', 'rich.console'} & set(sys.modules)\n"
    )
    done = run_pytest(project, "-p", "no:hypothesispytest", ".")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_a_glob_that_matches_nothing_is_refused(run_pytest, project):
    done = run_pytest(project, "--pipeproof-plans=plan/*.yaml")
    assert done.returncode == 4
    assert "--pipeproof-plans: no file matches 'plan/*.yaml' in " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.needs("hypothesis")
def test_fixtures(run_pytest, project):
    (project / "tests" / "test_one.py").write_text(
        "import pytest\n\n\n"
        "@pytest.mark.pipeproof_plan('../plans/sound.yaml')\n"
        "def test_marked(pipeproof_plan, plan_check):\n"
        "    assert plan_check(pipeproof_plan).errors == ()\n\n\n"
        "def test_unmarked(pipeproof_plan):\n    pass\n\n\n"
        "@pytest.mark.pipeproof_plan('nowhere.yaml')\n"
        "def test_missing(pipeproof_plan):\n    pass\n\n\n"
        "@pytest.mark.pipeproof_plan({'pipeproof': 1, 'modle': {}})\n"
        "def test_wrong(pipeproof_plan):\n    pass\n"
    )
    done = run_pytest(project, "--strict-markers")
    assert done.returncode == 1
    assert "1 passed, 3 errors" in done.stdout
    assert 'write @pytest.mark.pipeproof_plan("PATH") above the test' in done.stdout
    assert "nowhere.yaml" in done.stdout
    assert "modle" in done.stdout
    assert "plugin.py" not in done.stdout
