"""Files of others: how they are opened, one error for JSON and TOML that cannot be decoded, and no other reader."""

import ast
import gzip
import json
import os
import tomllib
from pathlib import Path

import pytest

from pipeproof.foreign_text import (
    MAX_DEPTH,
    ForeignTextError,
    IncompleteValueError,
    decode_json,
    decode_json_value,
    decode_toml,
    open_foreign,
    open_foreign_text,
    read_foreign,
    regular_size,
)

PACKAGE = Path(__file__).parents[1] / "pipeproof"


def nested(depth, opening="[", closing="]"):
    return opening * depth + closing * depth


@pytest.mark.parametrize("text", ['{"a": [1, 2.5, null]}', "7", '"x"', nested(MAX_DEPTH), "[" + "[]," * 500 + "[]]"])
def test_what_python_decodes_is_decoded(text):
    assert decode_json(text) == decode_json(text.encode()) == json.loads(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (nested(MAX_DEPTH + 1), "nested more than 64 deep"),
        (nested(MAX_DEPTH // 2 + 1, '{"a": [', "]}"), "nested more than 64 deep"),
        ("[" * 100_000, "nested more than 64 deep"),
        ('{"a": ' * 100_000, "nested more than 64 deep"),
        ("9" * 5000, "4300"),
        ("-" + "9" * 5000, "4300"),
        ("[1, 2", "line 1 column 6"),
        ("", "line 1 column 1"),
    ],
    ids=["lists", "objects", "100,000 lists", "100,000 objects", "digits", "minus and digits", "cut short", "nothing"],
)
@pytest.mark.parametrize("encode", [str, str.encode], ids=["str", "bytes"])
def test_other_texts_have_one_error(text, message, encode):
    with pytest.raises(ForeignTextError, match=message):
        decode_json(encode(text))


def test_bytes_that_are_no_text():
    with pytest.raises(ForeignTextError, match="utf-8"):
        decode_json(b'"\xff\xfe"')


def test_too_little_memory():
    def hook(pairs):
        raise MemoryError

    with pytest.raises(ForeignTextError, match="more memory"):
        decode_json("{}", object_pairs_hook=hook)


def test_a_value_within_a_text():
    decoder = json.JSONDecoder()
    assert decode_json_value(decoder, "xx[1]yy", 2) == ([1], 5)
    with pytest.raises(IncompleteValueError):
        decode_json_value(decoder, "xx[1", 2)
    for text in ("[" * 100_000, nested(MAX_DEPTH + 1), "9" * 5000):
        with pytest.raises(ForeignTextError) as caught:
            decode_json_value(decoder, text, 0)
        assert not isinstance(caught.value, IncompleteValueError)


def test_brackets_within_texts_are_no_levels():
    text = json.dumps("[{" * 1000)
    assert decode_json(text) == decode_json_value(json.JSONDecoder(), text, 0)[0] == "[{" * 1000


def test_toml_has_the_same_limits():
    assert decode_toml("a.b = 1\nc = [2]") == tomllib.loads("a.b = 1\nc = [2]")
    assert decode_toml(".".join("a" * MAX_DEPTH) + " = 1")
    for text in (".".join("a" * (MAX_DEPTH + 1)) + " = 1", "a = " + "[" * 5000, "a = " + "9" * 5000, "a = "):
        with pytest.raises(ForeignTextError):
            decode_toml(text)


DECODERS = {("json", "load"), ("json", "loads"), ("json", "JSONDecoder"), ("tomllib", "load"), ("tomllib", "loads")}
DECODERS |= {("yaml", name) for name in ("load", "safe_load", "load_all", "safe_load_all", "full_load", "unsafe_load")}
DECODERS |= {
    ("gzip", "open"),
    ("gzip", "decompress"),
    ("zlib", "decompress"),
    ("zipfile", "ZipFile"),
    ("pickle", "load"),
}
DECODERS |= {("np", name) for name in ("load", "fromfile", "loadtxt", "genfromtxt", "memmap")}
READS = {"open", "read_text", "read_bytes"}
"""Methods of paths, and ``open`` itself; a mode that begins by writing does not read."""
FILES = {
    "foreign_text.py": "opens and decodes all foreign files",
    "interop/json_stream.py": "gives its decoder to `decode_json_value`",
    "system_calls.py": "opens regular files only, and what is written",
    "state/torch_archive.py": "reads an archive from bytes of a file that `open_to_read` opened",
    "exec/rank/job_files.py": "loads arrays from a file that `open_foreign` opened",
    "analysis/align/read_record.py": "loads arrays from a file that `open_foreign` opened",
    "exec/train/torch/pretrained_load.py": "reads elements from a file that `open_foreign` opened",
    "cost/step_error.py": "a table of the package",
    "exec/store/process_state.py": "/proc",
    "exec/rank/failures.py": "/proc",
    "exec/measure/profile_from_logs.py": "/proc",
    "exec/rank/checkpointing.py": "syncs a directory",
    "state/reshard/execute_reshard.py": "locks a file of its own",
    "cli/console.py": "/dev/null",
    "views/html/timeline_page.py": "files of the package",
    "views/play/play_page.py": "files of the package",
    "interop/importers/names/__init__.py": "files of the package",
}


def is_read(call):
    """True for a call that opens a file, unless its mode begins by writing."""
    function = call.func
    if not (isinstance(function, ast.Name) and function.id == "open") and not (
        isinstance(function, ast.Attribute) and function.attr in READS
    ):
        return False
    modes = [arg.value for arg in (*call.args, *(each.value for each in call.keywords if each.arg == "mode"))
             if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]  # fmt: skip
    return not any(mode[:1] in ("w", "x") or mode in ("r+b", "ab") for mode in modes)


def readers_in(source):
    """Names of decoders and calls of methods that read files, of a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and is_read(node):
            yield ast.unparse(node.func)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names = [(node.value.id, node.attr)]
        elif isinstance(node, ast.ImportFrom):
            names = [(node.module, alias.name) for alias in node.names]
        else:
            continue
        yield from (f"{module}.{name}" for module, name in names if (module, name) in DECODERS)


def test_every_reader_opens_and_decodes_files_by_it():
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        names = sorted(set(readers_in(path.read_text(encoding="utf-8"))))
        if names:
            found[path.relative_to(PACKAGE).as_posix()] = names
    unknown = {file: names for file, names in found.items() if file not in FILES}
    assert not unknown
    assert not FILES.keys() - found.keys()


def test_readers_are_found():
    source = """import json, gzip, pathlib
from tomllib import loads
x = [json.loads]
y = json.dumps
pathlib.Path("a").read_text()
open("a")
open("a", "w"); pathlib.Path("a").open("xb"); pathlib.Path("a").open(mode="r+b")
pathlib.Path("a").open("rb")
gzip.open("a")
"""
    assert sorted(set(readers_in(source))) == [
        "gzip.open", "json.loads", "open", "pathlib.Path('a').open", "pathlib.Path('a').read_text", "tomllib.loads",
    ]  # fmt: skip


@pytest.fixture
def no_file(tmp_path, request):
    path = tmp_path / "x"
    if request.param == "pipe":
        os.mkfifo(path)
    elif request.param == "directory":
        path.mkdir()
    elif request.param == "device":
        path = Path("/dev/zero")
    else:
        path.symlink_to("/dev/zero")
    return path


@pytest.mark.parametrize("no_file", ["pipe", "directory", "device", "link to a device"], indirect=True)
@pytest.mark.parametrize("opened", [open_foreign, read_foreign, open_foreign_text, regular_size])
def test_only_regular_files_are_opened_and_nothing_blocks(no_file, opened):
    with pytest.raises(OSError, match=r"not a regular file|[Dd]irectory"):
        opened(no_file)


def test_size_is_bounded_before_anything_is_read(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"12345")
    assert read_foreign(path, 5) == b"12345"
    assert regular_size(path) == 5
    for opened in (open_foreign, read_foreign):
        with pytest.raises(OSError, match="more than 4 bytes"):
            opened(path, 4)
    with path.open("r+b") as file:
        file.truncate(2**40)
    with pytest.raises(OSError, match="more than 67,108,864 bytes"):
        read_foreign(path)
    with pytest.raises(OSError, match="more than 10 bytes"):
        read_foreign(Path("/proc/self/status"), 10)  # its size is 0


def test_a_text_may_be_compressed(tmp_path):
    path = tmp_path / "x"
    for content in ("äö\n".encode(), gzip.compress("äö\n".encode())):
        path.write_bytes(content)
        with open_foreign_text(path) as stream:
            assert stream.readline() == "äö\n"
