"""Each known cause from values that have it, and from near ones that do not; the bound of rounding; the fast digest."""

import json
from dataclasses import replace

import numpy as np
import pytest

from pipeproof.analysis.align.array_digests import (
    eps_of,
    fast_digest,
    norm_of,
    rounding_bound,
)
from pipeproof.analysis.align.compare_records import align
from pipeproof.analysis.align.likely_cause import common_factor, guess
from pipeproof.analysis.align.loss_pairs import Tolerance
from pipeproof.analysis.align.operations import Surroundings, operation_of
from pipeproof.analysis.align.read_record import Values
from pipeproof.analysis.align.record_format import Recorded
from pipeproof.analysis.align.record_map import Side
from tests.align.test_record_map import write
from tests.cli.commands import invoke
from tests.docs.test_schemas import require_fit

RANDOM = np.random.default_rng(5)
X = RANDOM.normal(size=(4, 4, 8)).astype("f4")
U = RANDOM.normal(size=(4, 4, 8)).astype("f4")
V = RANDOM.normal(size=(4, 4, 8)).astype("f4")


def recorded(layer, array, *, parameter="", direction="forward", side="output", micro_batch=0):
    return Recorded(0, layer, array.shape, "float32", fast_digest(array)[0], norm_of(array), (), direction, side,
                    micro_batch, parameter=parameter)  # fmt: skip


def around(first, *others):
    """Surroundings of earlier tensors (layer, array), the same on both sides, and of the first that differs."""
    sides = [Side(line, lambda array=array: Values(array, {})) for line, array in [*others, first]]
    return Surroundings([(side, side) for side in sides])


def cause(x, y, *others, **where):
    first = recorded("block.next", y, side="input", **where)
    listed = [(recorded(layer, array), array) for layer, array in others]
    return guess(Values(x, {}), Values(y, {}), recorded("block.next", x, side="input"), first,
                 around((first, y), *listed))  # fmt: skip


def rms(x):
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True))


def layer_norm(x):
    return rms(x - x.mean(-1, keepdims=True))


def rotated(x, angle, *, halves=True):
    size = x.shape[-1]
    first, second = (x[..., : size // 2], x[..., size // 2 :]) if halves else (x[..., 0::2], x[..., 1::2])
    turned = first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)
    return np.concatenate(turned, -1) if halves else np.stack(turned, -1).reshape(x.shape)


BIG = X * RANDOM.uniform(1, 5, size=(4, 4, 1)).astype("f4")
KEPT = [RANDOM.random(X.shape) < 0.8 for _ in range(2)]
B16 = (X.view(np.uint32) & 0xFFFF0000).view("f4")

CAUSES = {
    "a root": (X * np.float32(3**0.5), X, "scale", "the root of 3 of B's"),
    "any factor": (X * np.float32(0.7183), X, "scale", "128 elements of A that are not zero are 0.7183 of B's"),
    "an addend of another scale": (X + 0.5 * U, X + 1.2 * U, "residual", "is -0.7 times the output of u"),
    "a norm of the root mean square": (rms(BIG), BIG, "norm", "rows of A are rows of B after a RMSNorm"),
    "a layer norm on the other side": (BIG, layer_norm(BIG), "norm", "rows of B are rows of A after a LayerNorm"),
    "dropout of other elements": (X * KEPT[0] / 0.8, X * KEPT[1] / 0.8, "dropout", "another random stream"),
    "dropout on one side": ((X * KEPT[0] / 0.8).astype("f4"), X, "dropout", "A is 1.25 of B"),
    "tokens that do not count": (X * (np.arange(4) < 3)[:, None] * 1.3, X, "computation", "a loss's mask"),
    "a cast on one side": (B16, X, "cast", "all numbers of A are bfloat16's"),
    "a cast at another place": (B16, ((X * 1.0001).view(np.uint32) & 0xFFFF0000).view("f4"), "cast", "both sides"),
    "half precision": (X, X.astype("f2").astype("f4"), "cast", "all numbers of B are float16's"),
    "rotary halves": (rotated(U, 0.3), rotated(U, 0.3, halves=False), "rotary", "A rotates halves"),
    "another angle": (rotated(U, 0.3), rotated(U, -0.3), "rotary", "by other angles"),
    "a residual that is missing": (X, X + U, "residual", "the output of u, which A does not add"),
    "a residual in other dims": (X + np.swapaxes(U, 0, 1), X + U, "residual", "A adds the output of u with its first"),
    "a residual in other dims of B": (X + U, X + np.swapaxes(U, 0, 1), "residual", "B adds the output of u with its"),
    "another residual": (X + U, X + V, "norm", "A adds the output of u where B adds the output of norm.v"),
}  # fmt: skip


@pytest.mark.parametrize("name", CAUSES)
def test_a_cause_is_named(name):
    x, y, family, evidence = CAUSES[name]
    found = cause(x.astype("f4"), y.astype("f4"), ("u", U), ("norm.v", V))
    assert (found.family, evidence in found.evidence) == (family, True), found


NEAR = {
    "rows that are scaled on both sides": (BIG, X),
    "zeros with other values": (X * KEPT[0], U * KEPT[1]),
    "coarse numbers far apart": (B16, U),
    "pairs of other lengths": (rotated(U, 0.3) * np.float32(1.01), rotated(U, 0.3, halves=False)),
    "a factor that not all have": (X * np.where(X > 0, 1.5, 1.7), X),
    "no residual of these": (X + U, X + 2.5 * V),
}


@pytest.mark.parametrize("name", NEAR)
def test_near_values_have_no_such_cause(name):
    x, y = (each.astype("f4") for each in NEAR[name])
    assert cause(x, y, ("u", U), ("v", V)).family == "unknown"


def test_values_of_another_record_are_told():
    assert "not the record's values" in cause(X, X).evidence


def test_a_gradient_of_one_micro_batch(tmp_path):
    reads, takes = (RANDOM.normal(size=(2, 3, 5, n)).astype("f4") for n in (6, 4))
    parts = [takes[m].reshape(-1, 4).T @ reads[m].reshape(-1, 6) for m in range(2)]
    lines = [(recorded("up", reads[m], side="input", micro_batch=m), reads[m]) for m in range(2)]
    lines += [(recorded("up", takes[m], direction="backward", side="input", micro_batch=m), takes[m]) for m in range(2)]
    whole = parts[0] + parts[1]
    first = recorded("up", whole, parameter="up.weight")
    surroundings = around((first, whole), *lines)
    for x, y, side in ((parts[1], whole, "A"), (whole, parts[0], "B")):
        found = guess(Values(x, {}), Values(y, {}), first, first, surroundings)
        assert found.family == "missing reduction"
        assert found.evidence.startswith(f"{side} is the addend of micro-batch {1 if side == 'A' else 0} alone, of 2")
    other = RANDOM.normal(size=whole.shape).astype("f4")
    assert guess(Values(other, {}), Values(whole, {}), first, first, surroundings).family == "unknown"
    assert surroundings.cancellation(first, whole) >= 1.0
    sizes = sum(np.abs(t).reshape(-1, 4).T @ np.abs(r).reshape(-1, 6) for t, r in zip(takes, reads, strict=True))
    assert surroundings.cancellation(first, whole * 1e-6) == pytest.approx(
        float(sizes.max() / (abs(whole).max() * 1e-6))
    )


def test_a_sum_that_cancels_rounds_more(tmp_path):
    """As the bias of keys: its gradient is zero but for rounding."""
    takes = RANDOM.normal(size=(50, 4)).astype("f4")
    takes -= takes.mean(0)
    reads = RANDOM.normal(size=(50, 4)).astype("f4")
    noise = takes.sum(0), takes[::-1].astype("f8").sum(0).astype("f4")
    assert not np.array_equal(*noise)

    def lines(gradient):
        return [("k:forward:input", reads), ("k:backward:input", takes), ("k.bias", gradient)]

    a, b = (write(tmp_path / name, lines(gradient)) for name, gradient in zip("ab", noise, strict=True))
    assert align(a, b, Tolerance(rounding=True)).equal
    c = write(tmp_path / "c", lines(takes[1:].sum(0)))
    assert not align(c, b, Tolerance(rounding=True)).equal
    without = write(tmp_path / "d", lines(noise[0])[2:]), write(tmp_path / "e", lines(noise[1])[2:])
    assert not align(*without, Tolerance(rounding=True)).equal


def test_noise_may_grow_and_a_jump_is_a_difference(tmp_path):
    def lines(*errors):
        return [(f"layer{i}", (X * (1 + e * np.sign(U))).astype("f4")) for i, e in enumerate(errors)]

    write(tmp_path / "exact", lines(0, 0, 0))
    for name, errors, equal in (("grows", (4e-6, 1e-4, 3e-3), True), ("jumps", (4e-6, 1e-3, 0), False)):
        write(tmp_path / name, lines(*errors))
        found = align(tmp_path / name, tmp_path / "exact", Tolerance(rounding=True))
        assert found.equal is equal
    assert found.tensors.first.a.layer == "layer1"
    assert found.tensors.first.bound == pytest.approx(rounding_bound("float32", 4e-6), rel=0.1)
    assert [eps_of(name) for name in ("float32", "bfloat16", "int64", "no type")] == [2**-23, 2**-7, 0.0, 0.0]


def test_operations():
    x = recorded("block.up", X, side="input")
    lines = [x, recorded("block.up", X), recorded("block.act", U, side="input"), recorded("block", X),
             recorded("block.up", X, direction="backward", side="input"),
             recorded("block.up", X, direction="backward"),
             recorded("block.up", X, parameter="block.up.weight")]  # fmt: skip
    equal = {line.key: True for line in lines}

    def named(index, different=()):
        return operation_of(lines[index], lines, equal | {lines[i].key: False for i in different})

    assert (named(1).name, named(1).are_inputs_equal) == ("block.up", True)
    assert named(1, [0]).are_inputs_equal is False
    assert named(0).are_inputs_equal is None
    assert named(2).name == "the code of block before it calls block.act"
    assert named(3).name == "block, in its own code, after the modules in it"
    assert named(4).name.startswith("the backward of what follows block.up: the code of block")
    assert named(5).name == "the backward of block.up"
    assert named(6).name.startswith("the gradient of the weights of block.up")


@pytest.mark.parametrize("dtype", ["f4", "f8", "i8", "i4", "f2", "u1"])
def test_each_change_changes_the_fast_digest(dtype):
    x = (RANDOM.normal(size=40_003) * 50).astype(dtype)
    digest, norm = fast_digest(x)
    assert fast_digest(x.copy()) == (digest, norm)
    assert fast_digest(x.reshape(7, -1) if len(x) % 7 == 0 else x[None])[0] == digest
    assert norm == pytest.approx(float(np.linalg.norm(x.astype("f8"))), rel=1e-5)
    for place in (0, 1, 2, 20_001, 40_000, 40_001, 40_002):
        other = x.copy()
        other.view(np.uint8)[place * x.itemsize + x.itemsize - 1] ^= 0x80  # the highest bit: a sign
        assert fast_digest(other)[0] != digest
    assert len({fast_digest(np.roll(x, shift))[0] for shift in range(20)}) == 20
    halves = x[:40_000].reshape(2, -1)  # these are added to each other
    signs = (halves ^ np.array(0x80).astype("u1")) if dtype == "u1" else -halves
    assert len({fast_digest(each)[0] for each in (halves, halves[::-1], signs)}) == 3
    assert len({fast_digest(np.zeros(n, dtype))[0] for n in range(20)}) == 20


def test_signs_of_two_elements_do_not_cancel_in_the_digest():
    x = RANDOM.normal(size=64).astype("f4")
    digests = set()
    for i in range(64):
        for j in range(i):
            other = x.copy()
            other[[i, j]] *= -1
            digests.add(fast_digest(other)[0])
    assert len(digests) == 64 * 63 // 2
    assert fast_digest(x)[0] not in digests


def test_the_norm_of_large_numbers_is_exact():
    large = np.full(100, 1e30, "f4")
    assert fast_digest(large)[1] == pytest.approx(1e31)
    assert np.isnan(fast_digest(np.full(9, np.nan, "f4"))[1])


# --- A factor within the bound of rounding ---

ROWS = RANDOM.normal(size=(16, 64)) * RANDOM.uniform(1, 3, size=(16, 1))


def norm_with(epsilon, *, centered=False):
    rows = ROWS - centered * ROWS.mean(-1, keepdims=True)
    return (rows / np.sqrt(np.square(rows).mean(-1, keepdims=True) + epsilon)).astype("f4")


def factor(a, b, read=None, dtype="float32"):
    return common_factor(a.astype("f4"), b.astype("f4"), read, dtype)


@pytest.mark.parametrize("centered", [False, True])
def test_an_epsilon_of_a_norm_is_measured(centered):
    a, b = norm_with(1e-5, centered=centered), norm_with(1e-6, centered=centered)
    found = factor(a, b, ROWS.astype("f4"))
    assert (found.cause.family, found.deviation < 0) == ("norm", True)
    assert "a norm's epsilon that is about 9e-06 larger in A" in found.cause.evidence
    assert "about 9e-06 smaller in A" in factor(b, a, ROWS.astype("f4")).cause.evidence
    assert factor(a, b).cause.family == "scale"  # without the input


def test_a_constant_is_a_scale():
    found = factor(ROWS * (1 - 4.5e-6), ROWS, ROWS.astype("f4"))
    assert (found.words, found.cause.family) == ("1 - 4.5e-06", "scale")


def test_rounding_has_no_factor():
    noise = 1 + 3e-6 * RANDOM.normal(size=ROWS.shape)
    of_rows = 1 + 3e-6 * RANDOM.normal(size=(16, 1))
    assert factor(ROWS * noise, ROWS) is None
    assert factor(ROWS * of_rows, ROWS) is None  # as a norm's sum of squares, whose error a row has in common
    assert factor(ROWS * (1 - 3e-7), ROWS) is None  # as a function that one library rounds down
    assert factor(ROWS * (1 - 4.5e-6), ROWS, dtype="bfloat16") is None
    assert factor(np.repeat(ROWS[:1], 16, 0) * (1 - 4.5e-6), np.repeat(ROWS[:1], 16, 0)) is None  # one row, 16 times
    assert factor(ROWS[:7] * (1 - 4.5e-6), ROWS[:7]) is None
    assert factor(ROWS[0] * (1 - 4.5e-6), ROWS[0]) is None
    assert factor(ROWS * np.nan, ROWS) is None


def test_a_systematic_difference_is_not_called_rounding(tmp_path):
    def lines(result, read=ROWS):
        return [("norm:forward:input", read.astype("f4")), ("norm", result)]

    a = write(tmp_path / "a", lines(norm_with(1e-5)))
    b = write(tmp_path / "b", lines(norm_with(1e-6)))
    found = align(a, b, Tolerance(rounding=True))
    assert not found.equal
    assert (found.tensors.num_differing, found.tensors.systematic[0].layer) == (0, "norm")
    printed = invoke("state", "align", a, b, "--rounding")
    assert printed.exit_code == 1
    assert "within the bound of rounding, but systematic: a common factor of 1 - " in printed.stdout
    require_fit("align", json.loads(invoke("state", "align", a, b, "--rounding", "--format", "json").stdout))
    assert align(a, b, Tolerance()).tensors.first.cause.family == "norm"  # bit for bit, not the order of a sum
    other_input = write(tmp_path / "c", lines(norm_with(1e-6), np.nextafter(ROWS.astype("f4"), 9)))
    assert align(a, other_input, Tolerance(rounding=True)).equal  # an input with the same rounded values may cause it
    inner = [("norm.inner:forward:input", ROWS.astype("f4"))]
    outer = [write(tmp_path / name, inner + lines(norm_with(e))) for name, e in (("d", 1e-5), ("e", 1e-6))]
    assert align(*outer, Tolerance(rounding=True)).equal  # several operations


# --- 16 bits ---


def test_16_bits_have_a_bound_of_their_own(tmp_path):
    assert rounding_bound("bfloat16") == 4 * 2**-7
    assert rounding_bound("float32") == 64 * 2**-23

    def coarse(x):
        return ((x.astype("f4").view(np.uint32) + 0x8000) & 0xFFFF0000).view("f4")

    for factor_of_a, family in ((2, "scale"), (1 / 3, "scale")):
        y = coarse(X)
        line = replace(recorded("up", y), dtype="bfloat16")
        assert guess(Values(coarse(y * np.float32(factor_of_a)), {}), Values(y, {}), line, line).family == family
    near = coarse(X * (1 + 2**-8 * np.sign(U)))
    line = replace(recorded("up", X), dtype="bfloat16")
    assert guess(Values(near, {}), Values(coarse(X), {}), line, line).family == "accumulation order"


def test_losses_of_16_bit_programs_are_compared(tmp_path):
    sides = [write(tmp_path / loss, [("up", X)], loss=loss, dtype="bfloat16") for loss in ("1.5", "1.6")]
    assert not align(*sides, Tolerance(rounding=True)).equal
    assert align(sides[0], sides[0], Tolerance(rounding=True)).equal


def test_a_gradient_is_of_all_readers_of_a_tensor():
    reads = [recorded(name, X, side="input") for name in ("block", "block.q", "block.k", "other")]
    others = [recorded("up", U, side="input")]
    takes = [recorded(name, U, direction="backward", side="input") for name in ("block.q", "block.k")]
    first = recorded("block.k", V, direction="backward")
    lines = [*reads, *others, *takes, first]
    equal = {line.key: True for line in lines}
    operation = operation_of(first, lines, equal)
    assert (operation.name, operation.are_inputs_equal) == ("the backward of block.k or block.q or other", True)
    assert operation_of(first, lines, equal | {takes[0].key: False}).are_inputs_equal is False
