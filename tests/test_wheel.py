"""The wheel: built as the build backend does, installed into an environment of its own, used far from the checkout."""

import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import pipeproof
from pipeproof.diagnostics.install_command import install_extra

pytest.importorskip("hatchling", reason="builds the wheel with hatchling, of the extra dev")

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


def built(hook, source, directory):
    """Call a hook of the build backend in a process of its own; the path of its result."""
    code = f"import hatchling.build as b, sys; print(b.{hook}(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(directory)],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=150,
        check=True,
    )
    return directory / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return built("build_wheel", ROOT, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    return built("build_sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The directory of commands of an environment that has the wheel; its dependencies are this environment's."""
    home = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], timeout=150, check=True)
    commands = home / "bin"
    pip = [sys.executable, "-m", "pip", "--python", str(commands / "python"), "install", "--quiet", "--no-deps"]
    pip += ["--no-index", "--no-compile", "--disable-pip-version-check"]
    subprocess.run([*pip, str(wheel)], timeout=150, check=True, cwd=home, env=clean())
    (packages,) = home.glob("lib/python*/site-packages")
    # a line of a .pth file is a directory to import from; .pth files in there (of an editable pipeproof) are not read
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return commands


def clean():
    """The environment without variables that would let Python find the checkout."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def use(installed, directory, command, *arguments):
    return subprocess.run(
        [str(installed / command), *map(str, arguments)],
        cwd=directory, capture_output=True, text=True, timeout=150, check=False, env=clean(),
    )  # fmt: skip


def files_of_package():
    return {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "pipeproof").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_it_has_the_whole_package_and_nothing_else(wheel):
    """A file that .gitignore happens to name would be left out, and nobody would notice in the checkout."""
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if ".dist-info/" not in name} == files_of_package()
    assert "pipeproof/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_its_metadata(wheel):
    content = zipfile.ZipFile(wheel)
    (name,) = (name for name in content.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = content.read(name).decode()
    assert f"Version: {pipeproof.__version__}\n" in metadata
    assert "License-Expression: Apache-2.0\n" in metadata
    for extra in ("cpu", "torch", "solve"):
        assert f"Provides-Extra: {extra}\n" in metadata


def test_it_is_what_is_used_and_not_the_checkout(installed, tmp_path):
    done = use(installed, tmp_path, "python", "-c", "import pipeproof; print(pipeproof.__file__)")
    assert Path(done.stdout.strip()).is_relative_to(installed.parent)


@pytest.mark.slow(only=["python -m pipeproof"])
@pytest.mark.parametrize("start", [("pipeproof",), ("python", "-m", "pipeproof")], ids=" ".join)
def test_its_command_works_elsewhere(installed, tmp_path, start):
    (tmp_path / "plan.yaml").write_bytes((EXAMPLES / "gpt_pp4.yaml").read_bytes())
    (tmp_path / "wrong.yaml").write_bytes((EXAMPLES / "gpt_pp2_tp2_sp_partial.yaml").read_bytes())
    right = use(installed, tmp_path, *start, "check", "plan.yaml")
    assert (right.returncode, right.stderr) == (0, "")
    assert "proved: " in right.stdout
    wrong = use(installed, tmp_path, *start, "check", "plan.yaml", "wrong.yaml", "--format", "sarif")
    assert (wrong.returncode, wrong.stderr) == (1, "")
    assert '"ruleId": "PP201"' in wrong.stdout
    assert use(installed, tmp_path, *start, "--version").stdout == f"pipeproof, version {pipeproof.__version__}\n"


def test_what_it_carries_beside_code_is_there(installed, tmp_path):
    """Pages of codes, the schema, and the parts of the pages for a browser."""
    (tmp_path / "plan.yaml").write_bytes((EXAMPLES / "gpt_pp4.yaml").read_bytes())
    assert "PP201 (error)" in use(installed, tmp_path, "pipeproof", "--explain", "PP201").stdout
    assert '"title": "pipeproof plan"' in use(installed, tmp_path, "pipeproof", "--schema").stdout
    drawn = use(installed, tmp_path, "pipeproof", "simulate", "plan.yaml", "-o", "page.html")
    assert (drawn.returncode, drawn.stderr) == (0, "")
    assert "<html" in (tmp_path / "page.html").read_text()
    assert use(installed, tmp_path, "pipeproof", "play").returncode == 0
    assert "<html" in (tmp_path / "play.html").read_text()


def test_the_sdist_has_what_it_needs_to_become_the_same_wheel(sdist, wheel, tmp_path):
    with tarfile.open(sdist) as content:
        content.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4 is the first that has it
        content.extractall(tmp_path)
    (source,) = (path for path in tmp_path.iterdir() if path.is_dir())
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "examples/gpt_pp4.yaml", "docs/checking.md"):
        assert (source / name).is_file()
    assert not (source / "tests").exists()
    again = built("build_wheel", source, tmp_path)
    assert sorted(zipfile.ZipFile(again).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def dependencies(lines, found):
    """The distributions of this environment that requirements, and theirs in turn, need without an extra, by name."""
    for requirement in map(Requirement, lines):
        name = canonicalize_name(requirement.name)
        if (requirement.marker is None or requirement.marker.evaluate({"extra": ""})) and name not in found:
            found[name] = importlib.metadata.distribution(name)
            dependencies(found[name].requires or (), found)
    return found


def test_dependencies_are_few_and_listed_on_the_installation_page(validation_script):
    measure_sizes = validation_script("measure_sizes")
    needed = dependencies(PROJECT["dependencies"], {})
    assert needed.keys() == measure_sizes.NEEDED_FOR.keys()
    page = (ROOT / "docs" / "installation.md").read_text()
    assert set(re.findall(r"^\| ([a-z-]+) [\d.]+ \|", page, re.MULTILINE)) == needed.keys()
    large = set(measure_sizes.LARGE)
    size = sum(measure_sizes.bytes_of(each) for name, each in needed.items() if name not in large)
    assert 0 < size < measure_sizes.LIMIT_MB * 1e6


def test_every_extra_that_is_recommended_exists_and_is_explained():
    extras = set(PROJECT["optional-dependencies"])
    files = [*(ROOT / "pipeproof").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    named = {
        name for file in files for name in re.findall(r"pip install '(?:pipeproof|\.)\[(\w+)\]'", file.read_text())
    }
    assert {"cpu", "solve"} <= named <= extras
    table = re.search(r"\| extra .*?\n\n", (ROOT / "docs" / "installation.md").read_text(), re.DOTALL).group().strip()
    assert {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])} == extras


def test_an_extra_is_recommended_with_the_pip_of_this_python(tmp_path, monkeypatch):
    python = tmp_path / ".venv" / "bin" / "python"
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr("shutil.which", lambda name: str(python.with_name(name)))
    assert install_extra("solve") == "pip install 'pipeproof[solve]'"
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")  # not of the environment
    assert install_extra("solve") == f"{python} -m pip install 'pipeproof[solve]'"
    monkeypatch.chdir(tmp_path)
    assert install_extra("solve") == ".venv/bin/python -m pip install 'pipeproof[solve]'"

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.distribution", missing)
    assert install_extra("solve") == f".venv/bin/python -m pip install -e '{ROOT}[solve]'"


@pytest.mark.needs("ortools")
def test_pip_keeps_what_is_installed_and_adds_only_an_extra(installed, tmp_path):
    """So the recommended command is right for the wheel, and for a checkout, whose installation has metadata, too."""
    pip = [sys.executable, "-m", "pip", "--python", str(installed / "python"), "install", "--no-index", "--dry-run"]
    done = subprocess.run(
        [*pip, "--disable-pip-version-check", "pipeproof[solve]"],
        cwd=tmp_path, capture_output=True, text=True, timeout=150, check=False, env=clean(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Would install" not in done.stdout
    assert "(from pipeproof[solve])" in done.stdout
