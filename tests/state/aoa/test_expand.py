"""Patterns and names: the tensors that they match, by number, and every invalid name."""

import pytest

from pipeproof.state.aoa.expand import expand
from pipeproof.state.aoa.statements import statement_text
from pipeproof.state.state_codes import AoaError
from tests.state.aoa.arrays import program

EXPERTS = {f"layers.{layer}.experts.{expert}.up" for layer in (1, 10) for expert in range(12)}


def expanded(lines, source, target=None):
    return [statement_text(one) for one in expand(program(*lines), set(source), target and set(target)).statements]


def refusal(lines, source, target=None):
    with pytest.raises(AoaError) as error:
        expand(program(*lines), set(source), target and set(target))
    return [(finding.code, finding.message, finding.help) for finding in error.value.findings]


def test_ids_go_by_number_and_only_where_both_are_there():
    source = {"l.2.e.10.w", "l.2.e.9.w", "l.10.e.0.w", "l.x.e.1.w", "l.3.e.01.w", "L.3.e.1.w"}
    assert expanded(["l.$LAYER_ID.e.$EXPERT_ID.w -> m.$EXPERT_ID.$LAYER_ID"], source) == [
        "l.2.e.9.w -> m.9.2",
        "l.2.e.10.w -> m.10.2",
        "l.10.e.0.w -> m.0.10",
    ]


def test_an_offset_is_one_less_to_the_right():
    lines = ["a.$LAYER_ID_OFFSET.w, b.$LAYER_ID_OFFSET.w -> c.$LAYER_ID_OFFSET.w, axis=0"]
    assert expanded(lines, {"a.10.w", "b.10.w", "a.2.w", "b.2.w"})[1] == "a.10.w, b.10.w -> c.9.w, axis=0"
    ((code, message, _),) = refusal(lines, {"a.0.w", "b.0.w"})
    assert code == "PP181"
    assert "no previous layer" in message


def test_a_star_is_all_numbers_in_their_order_on_either_side():
    (one, other) = expanded(["layers.$LAYER_ID.experts.*.up -> stack.$LAYER_ID, axis=0"], EXPERTS)
    names = one.split(" -> ")[0].split(", ")
    assert names == [f"layers.1.experts.{expert}.up" for expert in range(12)]
    back = ["stack.$LAYER_ID -> layers.$LAYER_ID.experts.*.up, axis=0"]
    assert expanded(back, {"stack.1", "stack.10"}, EXPERTS)[1].split(" -> ")[1].startswith("layers.10.experts.0.up, l")
    ((code, _, fix),) = refusal(back, {"stack.1"})
    assert (code, fix) == ("PP181", "give the target: `--to`")
    assert other.endswith("-> stack.10, axis=0")


def test_the_other_names_must_be_there_for_the_same_numbers():
    lines = ["up.$LAYER_ID, gate.$LAYER_ID -> ffn.$LAYER_ID, fused_ffn"]
    ((_, message, _),) = refusal(lines, {"up.0", "up.1", "gate.0"})
    assert message == "`up.$LAYER_ID` exists for $LAYER_ID=1, and `gate.$LAYER_ID` does not"
    ((_, message, _),) = refusal(lines, {"up.0", "gate.10", "gate.0"})
    assert message == "`gate.$LAYER_ID` exists for $LAYER_ID=10, and `up.$LAYER_ID` does not"


def test_what_fits_nothing_is_reported_once_for_a_statement():
    ((code, message, _),) = refusal(["layers.$LAYER_ID.experts.$EXPERT_ID.down -> d.$LAYER_ID.$EXPERT_ID"], EXPERTS)
    assert (code, message) == ("PP181", "`layers.$LAYER_ID.experts.$EXPERT_ID.down` matches no tensor of the source")


def test_many_to_many_is_refused_once_names_are_known():
    ((code, message, _),) = refusal(["a.* -> b.*, axis=0"], {"a.0", "a.1"}, {"b.0", "b.1"})
    assert (code, message) == ("PP180", "2 names to the left and 2 to the right")


def test_a_name_may_be_assigned_again_from_itself_alone():
    assert expanded(["a -> b", "b^T -> b", "b, c -> b, axis=0"], {"a", "c"})[2] == "b, c -> b, axis=0"
    assert refusal(["a -> b", "c -> b"], {"a", "c"})[0][0] == "PP184"


def test_names_can_be_exchanged_through_a_third():
    made = expand(program("a -> t", "b -> a", "t -> b"), {"a", "b"}, {"a", "b"})
    assert made.result_names == ("a", "b")


def test_what_is_removed_is_neither_read_nor_made():
    assert refusal(["a -> _", "a -> b"], {"a"})[0][:2] == ("PP184", "`a` was removed before")
    assert refusal(["a -> b", "a -> _"], {"a"})[0][0] == "PP184"
    assert "removed by a statement" in refusal(["a -> _"], {"a"}, {"a"})[0][1]
    made = expand(program("a, b -> c, axis=0", "c -> d, e, axis=0", "e -> _"), {"a", "b"}, {"d"})
    assert made.result_names == ("d",)
    assert expand(program("a -> _", "b -> a"), {"a", "b"}, {"a"}).removed == {"a"}


def test_every_tensor_of_the_target_is_made_and_alike_ones_are_reported_together():
    target = {f"m.{layer}.w" for layer in range(40)} | {"head"}
    found = refusal(["a -> head"], {"a", "n.0.w"}, target)
    assert [code for code, *_ in found] == ["PP181"]
    assert found[0][1].startswith("nothing makes the target's `m.0.w` (and 39 more that differ by numbers)")


def test_added_tensors_are_of_the_target_and_ids_are_its():
    assert expanded(["_ -> bias.$LAYER_ID"], {"a"}, {"bias.0", "bias.10", "a"}) == ["_ -> bias.0", "_ -> bias.10"]
    assert refusal(["_ -> bias"], {"a"})[0][2] == "give the target: `--to`"


def test_work_grows_with_the_number_of_names():
    source = {f"l.{layer}.e.{expert}.{w}" for layer in range(16) for expert in range(64) for w in ("up", "gate")}
    lines = [f"l.{layer}.e.*.up -> up.{layer}, axis=0" for layer in range(16)]
    lines.append("l.$LAYER_ID.e.$EXPERT_ID.gate -> g.$LAYER_ID.$EXPERT_ID")
    assert len(expanded(lines, source)) == 16 + 16 * 64
