"""Names of arguments of Megatron-LM, by version, and of the tools that start it, as data of the importers.

    python validation/importers/make_argument_names.py --checkouts DIRECTORY

reads ``DIRECTORY/OWNER/NAME``, git checkouts of the commits in ``SOURCES`` (Megatron-LM's with its tags), and writes
``pipeproof/interop/importers/names``. Nothing of a tool is run: names are the options of ``add_argument`` and the
fields of classes, as Python's own parser reads them. A name is written with underscores. For Megatron-LM the first and
the last version follow it.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

OUT: Final = Path(__file__).parents[2] / "pipeproof" / "interop" / "importers" / "names"
MEGATRON: Final = "NVIDIA/Megatron-LM"
VERSIONS: Final = (
    "2.0", "2.5", "2.6", "23.04", "23.06", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "0.9.0", "0.10.0", "0.11.0",
    "0.12.0", "0.13.0", "0.14.0", "0.15.0", "0.16.0", "0.17.0", "0.18.0", "0.19.0", "d98e8a6",
)  # fmt: skip
"""Releases by their tags, and the commit that the importer follows."""
_TAGS: Final = ("core_v{}", "core_r{}", "v{}", "{}")
_ARGUMENTS: Final = ("megatron/training/arguments.py", "megatron/arguments.py")
_CLASSES: Final = re.compile(
    r"^megatron/(core|training|post_training|rl)/.*(config|arguments|parallel)\w*\.py$"
    r"|^megatron/(training/config|core/optimizer)/.*\.py$"
)
_PROCESS: Final = re.compile(r"^megatron/(training/)?(arguments|training|initialize|checkpointing|yaml_arguments)\.py$")
"""Files of Megatron-LM that add attributes to its arguments in the process."""

_LLM: Final = r"^mindspeed_llm/(training/arguments|features_manager/|tasks/.*arguments|core/.*arguments)"
_BRIDGE: Final = (
    r"^src/megatron/bridge/(training/(config|mixed_precision|comm_overlap|utils/.*config)\w*"
    r"|models/(transformer_config|gpt_provider|model_provider|mla_provider|gpt/\w+|mamba/\w+))\.py$"
)
SOURCES: Final[Mapping[str, tuple[tuple[str, str, str], ...]]] = {
    "mindspeed": (
        ("Ascend/MindSpeed", "028de58", r"^mindspeed/(arguments\.py$|features_manager/)"),
        ("Ascend/MindSpeed-LLM", "c77308a", _LLM),
        ("moguizhizi/MindSpeed-LLM", "0034694", _LLM),
    ),
    "slime": (("THUDM/slime", "624b824", r"^(slime|slime_plugins)/(.*/)?arguments\.py$"),),
    "pai": (("alibaba/Pai-Megatron-Patch", "a098ca5", r"^megatron_patch/(.*/)?\w*arguments\.py$|^examples/.*\.py$"),),
    "verl": (("volcengine/verl", "b178a3c", r"^verl/(workers/config|trainer/config)/.*\.(py|yaml)$"),),
    "bridge": (("NVIDIA-NeMo/Megatron-Bridge", "067f987", _BRIDGE),),
}
"""By list: repositories, their commits, and the files with names."""
_KEY: Final = re.compile(r"^\s*#?\s*([A-Za-z_][A-Za-z0-9_]*):", re.MULTILINE)


def names_of_code(text: str, *, of_process: bool = False) -> Iterator[tuple[str, str]]:
    """Yield the options of parsers, and the fields of classes, in Python code; with those added to ``args`` later.

    Each comes with its kind: switch, several (values), or none of these.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            options = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            kind = _kind_of_option(node)
            yield from ((option[2:], kind) for option in options if option.startswith("--"))
        elif isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and of_process:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (
                (one.attr, "") for one in targets if isinstance(one, ast.Attribute) and _is_arguments(one.value)
            )
        elif isinstance(node, ast.ClassDef):
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    kind = _kind_of_field(ast.unparse(item.annotation))
                    yield item.target.id, kind
                    if _is_true(item.value):
                        yield f"no_{item.target.id}", kind


def _kind_of_option(call: ast.Call) -> str:
    words = {word.arg: ast.unparse(word.value) for word in call.keywords}
    if "store_" in words.get("action", ""):
        return "switch"
    return "several" if words.get("nargs", "") in ("'+'", "'*'") else ""


def _kind_of_field(annotation: str) -> str:
    plain = re.sub(r"\s|None|\||Optional\[|\]", "", annotation)
    return "switch" if plain == "bool" else "several" if plain.lower().startswith("list[") else ""


def _is_arguments(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id == "args"


def _is_true(value: ast.expr | None) -> bool:
    """True for the default True, for which Megatron-LM's parser has ``--no-NAME`` too."""
    if isinstance(value, ast.Call):
        value = next((word.value for word in value.keywords if word.arg == "default"), None)
        yields = [word for word in (value,) if word is not None]
        return bool(yields) and _is_true(yields[0])
    return isinstance(value, ast.Constant) and value.value is True


class Checkout:
    """A git repository at one commit."""

    def __init__(self, folder: Path) -> None:
        self._git = ["git", f"--git-dir={folder / '.git' if (folder / '.git').exists() else folder}"]

    def _output(self, *words: str) -> str:
        made = subprocess.run([*self._git, *words], capture_output=True, text=True, errors="replace", check=False)
        return made.stdout if made.returncode == 0 else ""

    def commit(self, version: str) -> str:
        """The commit of a version; empty without one."""
        for form in _TAGS:
            found = self._output("rev-parse", "-q", "--verify", f"{form.format(version)}^{{commit}}").strip()
            if found:
                return found
        return ""

    def texts(self, commit: str, pattern: re.Pattern[str]) -> Iterator[tuple[str, str]]:
        """Yield the name and the text of each file that a pattern finds."""
        for name in self._output("ls-tree", "-r", "--name-only", commit).splitlines():
            if pattern.search(name):
                yield name, self._output("show", f"{commit}:{name}")


def names_of(checkout: Checkout, commit: str, pattern: re.Pattern[str]) -> dict[str, str]:
    """Return the names in the files of a commit, with their kinds."""
    found: dict[str, str] = {}
    for name, text in checkout.texts(commit, pattern):
        keys = ((key, "") for key in _KEY.findall(text))
        for option, kind in (
            keys if name.endswith(".yaml") else names_of_code(text, of_process=bool(_PROCESS.search(name)))
        ):
            key = option.replace("-", "_").strip("_")
            found[key] = kind or found.get(key, "")
    found.pop("", None)
    return found


def megatron_names(checkout: Checkout) -> dict[str, tuple[str, str, str]]:
    """Return the first and the last version of each name, and its kind in the last one."""
    found: dict[str, tuple[str, str, str]] = {}
    pattern = re.compile(f"^({'|'.join(map(re.escape, _ARGUMENTS))})$|{_CLASSES.pattern}|{_PROCESS.pattern}")
    for version in VERSIONS:
        commit = checkout.commit(version)
        assert commit, f"no tag of version {version}"
        for name, kind in names_of(checkout, commit, pattern).items():
            found[name] = (found.get(name, (version,))[0], version, kind)
    return found


def write(name: str, lines: list[str], sources: str) -> None:
    """Write a list."""
    head = f"# {sources}\n# made by validation/importers/make_argument_names.py\n"
    (OUT / f"{name}.txt").write_text(head + "\n".join(sorted(lines)) + "\n", encoding="utf-8")
    print(f"{name:14} {len(lines)} names")


def main() -> None:
    """Write all lists."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkouts", type=Path, required=True)
    options = parser.parse_args()

    def checkout(repository: str) -> Checkout:
        return Checkout(options.checkouts / repository)

    known = megatron_names(checkout(MEGATRON))
    rows = [f"{name} {' '.join(values)}".rstrip() for name, values in known.items()]
    write("megatron", rows, f"{MEGATRON}, {VERSIONS[0]} to {VERSIONS[-1]}: name, first and last version, kind")
    for name, sources in SOURCES.items():
        found: set[str] = set()
        for repository, commit, pattern in sources:
            found |= names_of(checkout(repository), commit, re.compile(pattern)).keys()
        found -= known.keys()
        write(name, list(found), ", ".join(f"{repository} {commit}" for repository, commit, _ in sources))


if __name__ == "__main__":
    main()
