"""Text to data with places: YAML 1.2 core scalars, JSON, aliases, and texts that want to hurt."""

import json
import math
import string

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeproof.diagnostics.finding import Location
from pipeproof.diagnostics.yaml_tree import MAX_DEPTH, MAX_NODES, parse_text


def data_of(text):
    tree = parse_text(text, "plan.yaml")
    assert tree.complete
    assert not tree.problems
    return tree.data


def only_problem(text):
    tree = parse_text(text, "plan.yaml")
    (problem,) = tree.problems
    return problem


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("yes", "yes"),
        ("no", "no"),
        ("on", "on"),
        ("Off", "Off"),
        ("true", True),
        ("False", False),
        ("~", None),
        ("null", None),
        ("010", 10),
        ("0o10", 8),
        ("0x1F", 31),
        ("-7", -7),
        ("+7", 7),
        ("1_000", "1_000"),
        ("12:30:45", "12:30:45"),
        ("2001-01-01", "2001-01-01"),
        ("1e-3", 0.001),
        ("1.", 1.0),
        (".5", 0.5),
        ("-.inf", -math.inf),
        ("1f1b", "1f1b"),
        ("1/3", "1/3"),
        ("'1'", "1"),
        ('"true"', "true"),
    ],
)
def test_scalars(text, value):
    result = data_of(f"key: {text}")["key"]
    assert result == value
    assert type(result) is type(value)


def test_nan():
    assert math.isnan(data_of("key: .nan")["key"])


# No floats: JSON and YAML write the same ones, which the table above covers. Keys of moderate length: YAML takes up to
# 1024 characters of one line for a key, escapes included.
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(min_size=1, max_size=80), inner, max_size=4),
    max_leaves=10,
)


@given(json_values, st.sampled_from([None, 2, "\t"]))
@example('\U0001f600 \\ / " \n \x7f \u2028', None)
@example({"\ufeff": ["\x00"]}, "\t")
def test_json_is_read_as_json_reads_it(value, indent):
    assert data_of(json.dumps({"key": value}, indent=indent)) == {"key": value}


def test_json_with_letters_and_slashes_as_they_are():
    text = r'{"é": "世\/\u0041界", "s": "\ud83d\ude00"}'
    assert data_of(text) == json.loads(text) == {"é": "世/A界", "s": "\U0001f600"}


def test_tabs_between_json_tokens():
    assert data_of('{\n\t"a":\t1,\n\t"b": [\t2\t]\n}') == {"a": 1, "b": [2]}


def test_half_a_surrogate_pair():
    assert "half of a character" in only_problem(r'{"a": "\ud83d"}').message


@given(st.text(alphabet=string.printable + "&*!{}[]:?-#|>%@`\x00\x85\u2028\ufeff\ud800é", max_size=60))
@example('"\\UFFFFFFFF"')
@example("%YAML 1." + "9" * 5000 + "\n---\na")
@example("&a *a")
@example("!<%FF> a")
@example("? ? ? a")
@example("{? a, b, *x : c}")
def test_any_text_gives_a_tree_or_problems_inside_it(text):
    tree = parse_text(text, "f")
    assert tree.complete == (not any(problem.code == "PP101" for problem in tree.problems))
    for problem in tree.problems:
        assert 1 <= problem.location.line <= len(tree.source.lines)
        assert 1 <= problem.location.column <= len(tree.source.lines[problem.location.line - 1]) + 1


def test_aliases_stand_for_their_value():
    tree = parse_text("a: &x [1, {b: &y 2}]\nc: *x\nd: *y\n", "f")
    assert tree.data == {"a": [1, {"b": 2}], "c": [1, {"b": 2}], "d": 2}
    # Below an alias nothing has a place of its own: the alias is the place.
    assert tree.source.locate(("c", 1, "b")) == Location("f", 2, 4, 5)


def test_alias_bomb_is_refused_at_the_alias():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    problem = only_problem("\n".join(lines))
    assert problem.code == "PP101"
    assert str(MAX_NODES) in problem.message
    assert problem.location.line == 5  # line n + 1 expands to more than 10**(n + 1) values


def test_an_alias_counts_what_it_stands_for():
    thousand = f"a: &a [{', '.join(['x'] * 999)}]\n"
    num_aliases = MAX_NODES // 1000 - 2

    def with_aliases(number):
        return parse_text(thousand + f"b: [{', '.join(['*a'] * number)}]\n", "f")

    assert with_aliases(num_aliases).complete
    assert not with_aliases(num_aliases + 1).complete


@pytest.mark.parametrize("opening", ["[", "{a: ", "- "])
def test_deep_nesting_is_refused(opening):
    assert "levels of nesting" in only_problem(opening * 100_000).message
    assert only_problem(opening * (MAX_DEPTH + 5)).location.column == len(opening) * (MAX_DEPTH + 1) + 1


def test_endless_number():
    problem = only_problem("a: " + "9" * 5000)
    assert problem.code == "PP106"
    assert "5000 digits" in problem.message


def test_duplicate_keys_keep_the_first_and_its_place():
    tree = parse_text("a: {b: 1}\na: {b: 2, c: 3}\nd: 4\n", "f")
    assert tree.data == {"a": {"b": 1}, "d": 4}
    assert [(p.code, p.location.line, p.location.column) for p in tree.problems] == [("PP103", 2, 1)]
    assert "line 1 has it" in tree.problems[0].message
    assert tree.source.locate(("a", "b")).line == 1
    assert tree.source.locate(("a", "c")).line == 1


def test_duplicates_deep_inside_and_equal_after_unquoting():
    tree = parse_text('a:\n  - x: 1\n    "x": 2\n', "f")
    assert [(p.code, p.location.line, p.location.column) for p in tree.problems] == [("PP103", 3, 5)]


def test_spans():
    text = "top:\n  list: [10, 'two', {k: v}]\n  empty:\n  block: |\n    one\n  long: {a: 1,\n    b: 2}\n"
    source = parse_text(text, "f").source

    def place(*path, key=False):
        found = source.locate(path, key=key)
        return found.line, found.column, found.end_column

    assert place("top", key=True) == (1, 1, 3)
    assert place("top", "list") == (2, 9, 27)
    assert place("top", "list", 0) == (2, 10, 11)
    assert place("top", "list", 1) == (2, 14, 18)
    assert place("top", "list", 2) == (2, 21, 26)
    assert place("top", "list", 2, "k", key=True) == (2, 22, 22)
    assert place("top", "empty") == (3, 3, 7)  # nothing to point at but the key
    assert place("top", "block") == (4, 10, None)
    assert place("top", "long") == (6, 9, 9)  # the brace: its end is on another line
    assert place("top", "long", "b") == (7, 8, 8)
    assert place("top", "missing", "deeper") == place("top")
    assert place("top", "missing", key=True) == place("top", key=True)
    assert place("elsewhere") == place()
    assert place() == (1, 1, None)


def test_lines_are_counted_as_editors_do():
    tree = parse_text("a: 1\r\nb: 2\rc: 3\nd: x\n", "f")
    assert tree.source.lines == ("a: 1", "b: 2", "c: 3", "d: x", "")
    assert tree.source.locate(("d",)) == Location("f", 4, 4, 4)


def test_columns_count_characters():
    tree = parse_text("{ключ: 世界, b: 1}", "f")
    assert tree.source.locate(("b",)) == Location("f", 1, 15, 15)


def test_empty_texts():
    assert data_of("") is None
    assert data_of("# a comment\n") is None
    assert data_of("---\n") is None
