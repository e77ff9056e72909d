"""JSON and TOML of others: one error for all that cannot be decoded, and no reader that goes around it."""

import ast
import json
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
ALLOWED = {"foreign_text.py", "interop/json_stream.py"}
"""``json_stream`` gives its decoder to ``decode_json_value``."""


def decoders_in(source):
    """Names of decoders that a module uses or imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names = [(node.value.id, node.attr)]
        elif isinstance(node, ast.ImportFrom):
            names = [(node.module, alias.name) for alias in node.names]
        else:
            continue
        yield from (f"{module}.{name}" for module, name in names if (module, name) in DECODERS)


def test_every_reader_decodes_by_it():
    found = {
        (path.relative_to(PACKAGE).as_posix(), name)
        for path in PACKAGE.rglob("*.py")
        for name in decoders_in(path.read_text(encoding="utf-8"))
    }
    assert {file for file, _ in found} == ALLOWED, found


def test_decoders_are_found():
    source = "import json\nfrom tomllib import loads\nx = [json.loads]\ny = json.dumps\n"
    assert sorted(decoders_in(source)) == ["json.loads", "tomllib.loads"]
