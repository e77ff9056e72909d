"""The layout string of Megatron-LM: its grammar, its meaning, and the positions of mistakes."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeproof.interop.importers.megatron.stage_flags import LETTERS, LayoutError, check_layout, parse_layout


def letters(text):
    return ["".join(unit.letter for unit in stage) for stage in parse_layout(text)]


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        # from docs/user-guide/features/pipeline_parallel_layout.md and the parser of Megatron-LM
        ("Ettt|(tt|)*29,m|L", ["Ettt", *["tt"] * 29, "m", "L"]),
        ("Et*3|(tt|)*29,m|L", ["Ettt", *["tt"] * 29, "m", "L"]),
        ("E|(t|)*3,m|m||L", ["E", "t", "t", "t", "m", "m", "", "L"]),
        ("E(t|tt)*2L", ["Et", "ttt", "ttL"]),
        ("(|t)*2,L", ["", "t", "tL"]),
        ("Et|*2t,,L", ["Et", "", "tL"]),
        ("E(t*2|)*2L", ["Ett", "tt", "L"]),
    ],
)
def test_layouts_are_unrolled(text, stages):
    assert letters(text) == stages


def by_replacement(text):
    """The meaning of a layout by the two replacements that Megatron-LM describes: parentheses first, then letters."""
    text = text.replace(",", "")
    text = re.sub(r"\(([^)]+)\)\*(\d+)", lambda match: match[1] * int(match[2]), text)
    text = re.sub(r"(.)\*(\d+)", lambda match: match[1] * int(match[2]), text)
    return text.split("|")


UNIT = st.tuples(st.sampled_from([*LETTERS, "|"]), st.sampled_from(["", "", "*2", "*3", "*11"])).map("".join)
BODY = st.lists(st.one_of(UNIT, st.just(",")), min_size=1, max_size=5).map("".join).filter(lambda text: text.strip(","))
GROUP = st.tuples(BODY, st.integers(1, 12)).map(lambda parts: f"({parts[0]})*{parts[1]}")


@given(st.lists(st.one_of(UNIT, GROUP, st.just(",")), max_size=6).map("".join))
def test_layouts_mean_what_the_replacements_make(text):
    assert letters(text) == by_replacement(text)


@pytest.mark.parametrize(
    ("text", "at", "last", "message"),
    [
        ("Et|xL", 3, 3, "`x` is none of"),
        ("Et|(tt|*2L", 3, 3, "opens here is not closed"),
        ("Et|)tL", 3, 3, "`)` is none of"),
        ("E((t)*2)*2L", 2, 2, "nested parentheses"),
        ("E(tt)L", 1, 4, "without a following `*n`"),
        ("E()*2L", 1, 2, "are empty"),
        ("Et*|L", 2, 2, "a number must follow"),
        ("Et*2*3L", 4, 4, "a second `*`"),
        ("*2EtL", 0, 0, "`*` is none of"),
        ("Et*1000000L", 3, 9, "a number of more than"),
        ("E(t*90000|)*9L", 13, 13, "more than 100000"),
    ],
)
def test_what_is_no_layout_is_refused_at_its_characters(text, at, last, message):
    with pytest.raises(LayoutError) as caught:
        parse_layout(text)
    assert message in str(caught.value)
    if "more than 100000" not in message:
        assert (caught.value.at, caught.value.last) == (at, last)


def test_a_letter_in_the_wrong_case_is_asked_about():
    with pytest.raises(LayoutError) as caught:
        parse_layout("Et|Tl")
    assert caught.value.help == "did you mean `t`?"


@pytest.mark.parametrize(
    ("text", "wanted", "message", "at"),
    [
        ("tEt|tL", {}, "the layout begins with `t`", 0),
        ("Et|tLt", {}, "the layout ends with `t`", 5),
        ("Et|tE|L", {}, "`E` appears 2 times", 4),
        ("Et|tt", {}, "`L` appears 0 times", 4),
        ("Et|ttL", {}, "has 3 `t`, and --num-layers is 2", 0),
        ("Et|tmL", {}, "has 1 `m`, and --mtp-num-layers is 0", 0),
        ("Et|t|L", {}, "3 stages, which do not divide", 0),
        ("Em|tt|L|", {"num_mtp": 1}, "follows a module", 3),
        ("Etm|t|m|L", {"num_mtp": 2}, "follows a module", 4),
        ("Et|mt|L|", {"num_mtp": 1}, "follows a module", 4),
        ("Ett|m|m|L", {"num_mtp": 2}, "all modules `m` must be in one stage", 4),
        ("Ett|m||L", {"num_mtp": 1}, "in the last chunk", 4),
        ("E|tt||L", {}, "stage 2 has no layer", 4),
    ],
)  # fmt: skip
def test_what_megatron_asks_of_a_layout(text, wanted, message, at):
    with pytest.raises(LayoutError) as caught:
        check_layout(parse_layout(text), num_layers=2, num_mtp=wanted.get("num_mtp", 0), pp=2, length=len(text))
    assert message in str(caught.value)
    assert caught.value.at == at


@pytest.mark.parametrize(
    ("text", "num_mtp"), [("Et|tL", 0), ("E|t|t|L", 0), ("E|tt|m|L", 1), ("Et|tmL", 1), ("E|t|t|mmL", 2)]
)
def test_right_layouts_pass(text, num_mtp):
    check_layout(parse_layout(text), num_layers=2, num_mtp=num_mtp, pp=2, length=len(text))
