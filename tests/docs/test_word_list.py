"""The private vocabulary of the past stays out of the package, its messages and its pages."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def word_list(validation_script):
    return validation_script("word_list")


def test_no_word_of_the_list_is_left(word_list):
    hits = [
        str(hit)
        for path in word_list.searched_files()
        for hit in word_list.find((ROOT / path).read_text(encoding="utf-8"), path)
    ]
    assert not hits, "\n".join(hits)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("help: the mend is known", ["mend"]),
        ("recommend an amendment", []),
        ("a shape in which b stands for the rows", []),
        ("it stands beside the other", ["stands", "beside"]),
        ("own_layers of the uncut model", ["own_layers", "uncut"]),
        ("The run Tells", ["Tells"]),
    ],
)
def test_words_are_found_whole_and_in_any_case(word_list, text, words):
    assert [hit.word for hit in word_list.find(text, Path("page.md"))] == words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A key that is no row.", ["is no row"]),
        ("There is no row, and there are no keys.", []),
        ("It is no longer so.", []),
        ("The queues whose order contains that\n    # of each.", ["that # of"]),
        ('"Ranks are " "alike"', ["alike"]),
        ("`so that` and gradients_alike", []),
        ("Names what it takes.", ["what it"]),
    ],
)
def test_sentences_that_have_to_be_read_twice_are_found(word_list, text, words):
    assert [hit.word for hit in word_list.find(text, Path("tests/test_page.py"))] == words


def test_a_docstring_begins_with_a_noun_phrase_or_an_imperative(word_list):
    code = '"""Rules."""\n\n\ndef f():\n    """Whether it fits."""\n\n\nNUMBER = 1\n"""What counts."""\n'
    assert sorted((hit.line, hit.word) for hit in word_list.find(code, Path("module.py"))) == [
        (5, "Whether"),
        (9, "What"),
    ]
