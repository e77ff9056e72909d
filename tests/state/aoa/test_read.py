"""Reading statements: valid ones, mistakes with locations, and statements that were written."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeproof.state.aoa.read_statements import read_statements
from pipeproof.state.aoa.statements import CAST_TYPES, Cast, Fused, Name, Program, Statement, write_statements
from pipeproof.state.state_codes import AoaError


def refusal(text):
    with pytest.raises(AoaError) as error:
        read_statements(text, "map.aoa")
    assert {finding.code for finding in error.value.findings} <= {"PP180", "PP184"}
    return error.value.findings


def test_all_of_the_language_is_read():
    lines = [
        "a, b.w -> c, axis=0",
        "a -> b_0, b_1, axis=1",
        'a -> b, permute="[2, 0, 1]"',
        'a -> b, permute="[]"',
        "a -> b, dtype='float32'",
        'a -> b, src_dtype="bfloat16", dst_dtype="float32"',
        "a^T, b -> c, axis=0",
        "q, k, v -> qkv, fused_qkv, num_heads=8, num_key_value_groups=2",
        "qkv -> out, num_heads=8, num_key_value_groups=2, axis=0, fused_qkv_old",
        "ffn -> gate, up, fused_ffn",
        "a[0:3] -> b, axis=0",
        "_ -> a",
        "layers.$LAYER_ID.e.$EXPERT_ID.w -> _",
        "l.$LAYER_ID_OFFSET.w -> m.$LAYER_ID_OFFSET.w",
        "l.$LAYER_ID.e.*.w -> l.$LAYER_ID.w, axis=0",
    ]
    program = read_statements("\n# all\n\n" + "  # one\n".join(lines), "map.aoa")
    assert len(program.statements) == len(lines)
    assert program.statements[0] == Statement((Name("a"), Name("b.w")), (Name("c"),), axis=0)
    assert program.statements[3].permutation == ()
    assert program.statements[8].fused == Fused("fused_qkv_old", 8, 2)
    assert program.statements[10].left == (Name("a", numbers=(0, 3)),)
    assert program.statements[2].location.line == 6


@pytest.mark.parametrize(
    ("line", "location", "said"),
    [
        ("a b", "1:3-3", "`->` is missing here, found `b`"),
        ("a -> b c", "1:8-8", "unexpected `c`"),
        ("a -> b,", "1:8-8", "a name is missing here, found the end"),
        ("-> b", "1:1-2", "a name is missing here"),
        ("a -", "1:3-3", "unexpected '-'"),
        ("a.wé -> b", "1:4-4", "unexpected 'é'"),
        ("0.w -> b", "1:1-1", "unexpected '0'"),
        ("a.$LAYERS.w -> b", "1:3-9", "`$LAYERS` is not a placeholder"),
        ("a -> b^T", "1:6-8", "is a view"),
        ("a^Tb -> c", "1:2-2", "unexpected '^'"),
        ("a, b -> c", "1:1-9", "needs `axis`"),
        ("a, b -> c, axis=-1", "1:17-18", "a number from 0 on"),
        ("a, b -> c, axis='0'", "1:17-19", "a number from 0 on"),
        ("a, b -> c, axis=0, axis=1", "1:20-23", "is repeated"),
        ("a, b -> c, axis=0, d", "1:20-20", "comes after attributes"),
        ("a, b -> c, d, axis=0", "1:1-20", "2 names to the left and 2 to the right"),
        ("a, b -> c, axes=0", "1:12-15", "unknown attribute `axes`"),
        ("a -> b, dtype='int8'", "1:15-20", "one of float16, float32 or bfloat16"),
        ("a -> b, dtype='float32', permute='[]'", "1:1-37", "permute and a cast in one statement"),
        ("a -> b, src_dtype='float32'", "1:9-17", "`src_dtype` and `dst_dtype`"),
        ("a -> b, permute='1,0'", "1:17-21", "each dim once"),
        ("a -> b, axis=1", "1:1-14", "`axis` belongs to a merge"),
        ("a -> b, num_heads=4", "1:9-17", "is of fused_qkv"),
        ("a -> b, c, d, fused_qkv, num_heads=4", "1:15-23", "needs `num_key_value_groups`"),
        ("a -> b, c, d, fused_qkv, num_heads=4, num_key_value_groups=3", "1:39-58", "do not divide into 3 groups"),
        ("a -> b, fused_ffn, fused_qkv", "1:20-28", "in one statement"),
        ("a, b, c -> d, fused_ffn", "1:1-23", "3 names to the left"),
        ("_ -> _", "1:1-6", "alone on its side"),
        ("a -> _, axis=0", "1:1-14", "has no attributes"),
        ("a.*.b.* -> c, axis=0", "1:1-7", "two `*`"),
        ("a.$LAYER_ID -> b", "1:16-16", "has no `$LAYER_ID`"),
        ("a.$LAYER_ID.$LAYER_ID -> b.$LAYER_ID", "1:1-21", "`$LAYER_ID` twice"),
        ("a[2:2] -> b, axis=0", "1:1-1", "matches no names"),
        ("axis -> b", "1:1-4", "is an attribute"),
    ],
)
def test_what_cannot_be_meant_is_reported_with_its_place(line, location, said):
    (finding,) = refusal(line)
    at = finding.location
    assert f"{at.line}:{at.column}-{at.end_column}" == location
    assert said in finding.message


def test_the_list_of_yaml_and_json_is_read_with_places():
    lines = ["a -> b", 'b -> c, dtype="float32"']
    statement_text = [
        f"# Paddle's\naoa_statements:\n  - {lines[0]}\n  - '{lines[1]}'\n",
        json.dumps({"aoa_statements": lines}),
        f"aoa_statements: [{lines[0]}, '{lines[1]}']",
    ]
    programs = [read_statements(text, "map.yaml") for text in statement_text]
    assert programs == [read_statements("\n".join(lines), "map.aoa")] * 3
    location = programs[0].statements[0].left[0].location
    assert (location.line, location.column, location.end_column) == (3, 5, 5)
    (finding,) = refusal("aoa_statements:\n  - 'a -> b, fast=1'")
    assert (finding.location.line, finding.location.column) == (2, 14)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("aoa_statements: a -> b", "is a list of strings"),
        ("aoa_statements: [a -> b, 3]", "found integer 3"),
        ("aoa_statements: []\naoa_config_reverse: true", "unknown key `aoa_config_reverse`"),
        ("{aoa: []}", "has no `aoa_statements`, found `aoa`"),
        ("aoa_statements: [", "PP180"),
    ],
)
def test_a_config_of_another_form_is_refused(text, said):
    (finding,) = refusal(text)
    assert said in f"{finding.code}: {finding.message}"


words = st.from_regex(r"[a-z_][a-z0-9_.]{0,8}x", fullmatch=True)
names = st.builds(Name, words, st.booleans(), st.none())
arrays = st.builds(lambda text, start, more: Name(text, numbers=(start, start + more)), words, *[st.integers(1, 9)] * 2)
plain = words.map(Name)
casts = st.builds(Cast, st.sampled_from(CAST_TYPES), st.none() | st.sampled_from(CAST_TYPES))
heads = st.builds(
    lambda kind, groups, more: Fused(kind, groups * more, groups),
    st.sampled_from(["fused_qkv", "fused_qkv_old"]),
    *[st.integers(1, 9)] * 2,
)
axes = st.integers(0, 3)
statements = st.one_of(
    st.builds(lambda a, b, c, axis: Statement((a, b), (c,), axis), names | arrays, names, plain, axes),
    st.builds(lambda a, b, c, axis: Statement((a,), (b, c), axis), names, plain, arrays, axes),
    st.builds(lambda a, p: Statement((a,), (Name("out"),), permutation=tuple(p)), names, st.permutations(range(3))),
    st.builds(lambda a, cast: Statement((a,), (Name("out"),), cast=cast), names, casts),
    st.builds(lambda a, b, c, f: Statement((a, b, c), (Name("out"),), fused=f), names, names, plain, heads),
    st.builds(lambda a, axis: Statement((a,), (Name("g"), Name("u")), axis, fused=Fused("fused_ffn")), names, axes),
    st.builds(lambda a: Statement((a,), (Name("_"),)), plain),
)


@given(st.lists(statements, max_size=5))
def test_what_is_written_is_read_back(drawn):
    program = Program(tuple(drawn))
    assert read_statements(write_statements(program), "map.aoa") == program


@given(st.text(alphabet="ab_.*$^T[]:,=->'\"0123 \n#LAYER_IDxis", max_size=60))
def test_any_text_is_read_or_refused_with_places(text):
    try:
        read_statements(text, "map.aoa")
    except AoaError as error:
        lines = text.split("\n")
        for finding in error.findings:
            assert finding.location is None or finding.location.line <= len(lines)
