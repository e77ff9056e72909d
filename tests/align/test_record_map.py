"""Records of programs written by hand, of one and of several ranks: partners by maps, layouts and shapes."""

import json

import numpy as np
import pytest

from pipeproof.analysis.align.array_digests import fast_digest, md5_of
from pipeproof.analysis.align.compare_records import align
from pipeproof.analysis.align.draft_map import draft_map
from pipeproof.analysis.align.loss_pairs import Tolerance
from pipeproof.analysis.align.read_record import open_record
from pipeproof.analysis.align.record_format import AlignmentError, Header, Recorded, RecordedStep, Shard
from pipeproof.analysis.align.record_map import MapFile, RecordMap, read_map
from pipeproof.exec.compare.layer_recorder import named_modules
from pipeproof.exec.compare.run_record import RecordWriter
from pipeproof.exec.compare.tensor_layouts import Split, layout_at_boundary, split_layout
from pipeproof.state.state_codes import AoaError
from tests.cli.commands import invoke
from tests.docs.test_schemas import require_fit

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(3, 4, 6)).astype("f4")
W = RANDOM.normal(size=(6, 6)).astype("f4")


def write(directory, tensors, *, rank=0, loss="1.5", values=True, model=None, backend="torch", dtype="float32"):
    """A program's record of one step; ``tensors`` are (name or (name, direction, side), array, layout, options)."""
    header = Header("program", "0", "", backend, dtype, 0, layers=True, values=values, model=model or {})
    writer = RecordWriter(directory, header, rank)
    lines, kept = [], {}
    for time, (name, array, *others) in enumerate(tensors, 1):
        layout, options = (*others, None, {})[:2] if others else (None, {})
        shape, indexes = layout or (array.shape, (tuple((0, n) for n in array.shape),))
        digest, norm = fast_digest(array)
        shards = [Shard(rank, digest, indexes[0])]
        kept[f"{digest[6:]}.{array.dtype.name}"] = array
        if len(indexes) > 1:
            parts = np.split(array, len(indexes), axis=0)
            shards = [Shard(rank, fast_digest(part)[0], index) for part, index in zip(parts, indexes, strict=True)]
            kept |= {f"{shard.md5[6:]}.float32": part for shard, part in zip(shards, parts, strict=True)}
        where = {"parameter": name, "layer": name.rpartition(".")[0]}
        if not name.endswith((".weight", ".bias")):
            layer, direction, side = (
                (*name.split(":"), "forward", "output")[:3] if ":" in name else (name, "forward", "output")
            )
            where = {"layer": layer, "direction": direction, "side": side}
        lines.append(
            Recorded(
                step=0,
                shape=shape,
                dtype="float32",
                md5=digest,
                norm=norm,
                shards=tuple(shards),
                time=time,
                **where,
                **(options or {}),
            )
        )
    md5 = None if loss is None else md5_of(np.asarray(float(loss), "f4"))
    writer.put(RecordedStep(0, loss, md5, tuple(lines)), kept if values else None)
    return directory


def found(a, b, **how):
    return align(a, b, Tolerance(rounding=True), **how)


def test_a_file_of_a_rank_fits_the_schema(tmp_path):
    layout = ((12, 6), (((0, 3), (0, 6)), ((6, 9), (0, 6))))
    write(tmp_path / "a", [("up:forward:input", X), ("up", X), ("up.weight", W, layout, {"in_first": True})],
          model={"num_heads": 2})  # fmt: skip
    for line in (tmp_path / "a" / "record.rank0.jsonl").read_text().splitlines():
        require_fit("record", json.loads(line))


def test_parts_of_ranks_are_joined_by_their_layouts(tmp_path):
    for rank in (0, 1):
        part = W[3 * rank : 3 * rank + 3]
        write(tmp_path / "a", [("up.weight", part, split_layout((3, 6), Split(0, rank, 2)))], rank=rank, loss=None)
    write(tmp_path / "b", [("up.weight", W)], loss=None)
    assert found(tmp_path / "a", tmp_path / "b").equal
    write(tmp_path / "c", [("up.weight", W[::-1])], loss=None)
    difference = found(tmp_path / "a", tmp_path / "c").tensors.first
    assert difference.cause.family == "layout"


def test_parts_of_gate_and_up_in_one_weight_are_joined_in_pairs(tmp_path):
    whole = RANDOM.normal(size=(8, 6)).astype("f4")
    for rank in (0, 1):
        part = np.concatenate((whole[2 * rank : 2 * rank + 2], whole[4 + 2 * rank : 6 + 2 * rank]))
        layout = split_layout(part.shape, Split(0, rank, 2, stride=2))
        assert layout[0] == (8, 6)
        write(tmp_path / "a", [("up.weight", part, layout)], rank=rank)
    write(tmp_path / "b", [("up.weight", whole)])
    assert found(tmp_path / "a", tmp_path / "b").equal


def test_borders_of_split_linear_layers():
    split = Split(0, 1, 2)
    assert layout_at_boundary((3, 4, 5), (5, 8), split, "output") == ((3, 4, 10), (((0, 3), (0, 4), (5, 10)),))
    assert layout_at_boundary((3, 4, 8), (5, 8), split, "input") is None
    by_rows = Split(1, 1, 2)
    assert layout_at_boundary((3, 8), (5, 8), by_rows, "input") == ((3, 16), (((0, 3), (8, 16)),))
    assert layout_at_boundary((3, 5), (5, 8), by_rows, "output") is None
    assert layout_at_boundary((3, 8), (5, 8), split, "output", out_dim=1) is None
    assert layout_at_boundary((3, 8), (5, 8), Split(1, 0, 2), "output", out_dim=1)[0] == (3, 16)


def test_parts_without_a_layout_are_joined_where_the_other_side_is_longer(tmp_path):
    for rank in (0, 1):
        write(tmp_path / "a", [("core", X[:, :, 3 * rank : 3 * rank + 3])], rank=rank)
    write(tmp_path / "b", [("core", X)])
    assert found(tmp_path / "a", tmp_path / "b").equal
    assert found(tmp_path / "b", tmp_path / "a").equal
    write(tmp_path / "c", [("core", np.swapaxes(X, 0, 1).copy())])
    assert found(tmp_path / "a", tmp_path / "c").equal


def test_ranks_that_hold_different_values_of_one_tensor_are_not_equal(tmp_path):
    for rank in (0, 1):
        write(tmp_path / "a", [("up.bias", W[0] / 2 + rank - 0.5)], rank=rank)
    write(tmp_path / "b", [("up.bias", W[0])])
    first = found(tmp_path / "a", tmp_path / "b").tensors.first
    assert first.cause.family == "missing reduction"


@pytest.mark.parametrize("change", [
    lambda x: np.swapaxes(x, 0, 1), lambda x: x.reshape(12, 6), lambda x: np.swapaxes(x, 0, 1).reshape(12, 6),
    lambda x: x[:, None],
])  # fmt: skip
def test_shapes_show_exchanged_and_merged_dims(tmp_path, change):
    write(tmp_path / "a", [("up", change(X).copy())])
    write(tmp_path / "b", [("up", X)])
    result = found(tmp_path / "a", tmp_path / "b")
    ambiguous = change(X).shape == (12, 6) and not np.array_equal(change(X), X.reshape(12, 6))
    assert result.equal is not ambiguous  # [12, 6] does not show which dim of [3, 4, 6] was first


def test_equal_dims_need_the_map(tmp_path):
    square = RANDOM.normal(size=(4, 4, 6)).astype("f4")
    write(tmp_path / "a", [("up", np.swapaxes(square, 0, 1).copy())])
    write(tmp_path / "b", [("up", square)])
    assert not found(tmp_path / "a", tmp_path / "b").equal
    assert found(tmp_path / "a", tmp_path / "b", map_file=MapFile(swap_dims=("u*",))).equal


def test_matrices_that_are_in_first_are_transposed_also_square_ones(tmp_path):
    write(tmp_path / "a", [("up.weight", W.T.copy(), None, {"in_first": True})], backend="paddle")
    write(tmp_path / "b", [("up.weight", W)])
    assert found(tmp_path / "a", tmp_path / "b").equal
    write(tmp_path / "c", [("up.weight", W, None, {"in_first": True})])
    assert not found(tmp_path / "c", tmp_path / "b").equal


def test_a_map_renames_splits_scales_and_leaves_out(tmp_path):
    fused = np.concatenate((X, 2 * X), 2), np.concatenate((W, W + 1))
    a = write(tmp_path / "a", [("net.0.fused", fused[0]), ("net.0.fused.weight", fused[1]), ("own", X)], loss="3.0")
    b = write(tmp_path / "b", [("layers.0.one", X), ("layers.0.two", 2 * X), ("layers.0.one.weight", W / 2),
                               ("layers.0.two.weight", (W + 1) / 2), ("other.weight", W)])  # fmt: skip
    file = tmp_path / "map.yaml"
    file.write_text(
        "statements:\n"
        "- net.$LAYER_ID.fused.weight -> layers.$LAYER_ID.one.weight, layers.$LAYER_ID.two.weight, axis=0\n"
        "scale: {main: 1/2, '*.weight': 1/2}\n"
        "alone: [other.weight]\n"
    )
    result = found(a, b, map_file=read_map(file))
    assert result.equal, result
    assert (result.tensors.num_compared, result.tensors.num_on_purpose) == (4, 2)
    assert not found(a, b, map_file=read_map(file).model_copy(update={"scale": {}})).equal
    assert found(a, b, map_file=read_map(file).model_copy(update={"alone": ()})).tensors.only_b == 1


def test_digests_alone_rename_but_cannot_split(tmp_path):
    a = write(tmp_path / "a", [("net.weight", np.concatenate((W, W)))], values=False)
    b = write(tmp_path / "b", [("one.weight", W), ("two.weight", W)], values=False)
    rename = MapFile(statements=("net.weight -> one.weight",), alone=("two.weight",))
    assert not found(a, b, map_file=rename).equal  # another shape
    first = found(a, b, map_file=MapFile(statements=("net.weight -> one.weight, two.weight, axis=0",))).tensors.first
    assert first.cause.evidence.startswith("by norms alone")


def test_a_wrong_map_is_refused_with_its_keys(tmp_path):
    file = tmp_path / "map.yaml"
    for text, place in (("names: a\n", "names"), ("- a\n", "mapping"), ("scale: {x: half}\n", "scale.x")):
        file.write_text(text)
        with pytest.raises(AoaError, match=place):
            read_map(file)
    write(tmp_path / "a", [("up", X)])
    file.write_text("statements: [a -> ]\n")
    result = invoke("state", "align", tmp_path / "a", tmp_path / "a", "--map", file)
    assert result.exit_code == 2
    assert "PP180" in result.stderr


WRONG_NAMES = {
    "swap_dims: [nothing.*]": ("swap_dims", 1, "nothing.*"),
    "scale: {nothing: 2}": ("scale", 1, "nothing"),
    "alone: [up, nothing]": ("alone", 1, "nothing"),
    "statements:\n- nothing -> up": ("PP181", 2, "nothing"),
    "statements:\n- up -> nothing": ("PP181", 2, "no module or parameter of B"),
    "statements:\n- up.wait -> up.weight": ("did you mean `up.weight`", 2, "up.wait"),
    "scale: {up: 2, 'u*': 3}": ("PP180", 1, "`up` and `u*` match `up`"),
    "statements:\n- up => up": ("PP180", 2, "unexpected '>'"),
    "statements:\n- up.weight -> up.a, up.b, up.c, up.d, axis=0\n- up.a, up.b, up.c, up.d -> up.weight, axis=0":
        ("does not divide by 4", 2, "`up.weight` is 6 along axis 0"),
}  # fmt: skip


@pytest.mark.parametrize("text", WRONG_NAMES)
def test_a_map_that_does_not_fit_is_refused_with_its_line(tmp_path, text):
    record, file = write(tmp_path / "a", [("up", X), ("up.weight", W)]), tmp_path / "map.yaml"
    file.write_text(text)
    what, line, name = WRONG_NAMES[text]
    result = invoke("state", "align", record, record, "--map", file)
    assert result.exit_code == 2
    assert all(part in result.stderr for part in (what, f"map.yaml:{line}:", name)), result.stderr


def test_a_map_whose_names_exist_is_used(tmp_path):
    record, file = write(tmp_path / "a", [("up", X), ("up.weight", W)]), tmp_path / "map.yaml"
    file.write_text(
        "alone: [up.w*]\nscale: {main: 1, up: 1}\nstatements:\n"
        "- up.weight -> half, rest, axis=0\n- half, rest -> up.weight, axis=0\n"
    )
    assert invoke("state", "align", record, record, "--map", file).exit_code == 0


def test_an_unknown_convention_is_refused(tmp_path):
    record = write(tmp_path / "a", [("up", X)])
    result = invoke("state", "align", record, record, "--names-a", "meagtron", "--names-b", "huggingface")
    assert result.exit_code == 2
    assert "there is no naming convention `meagtron`" in result.stderr


def test_further_inputs_are_compared_only_if_both_sides_have_them_all(tmp_path):
    """One implementation passes a mask, the other does not: later arguments have other numbers."""

    def record(name, *further):
        inputs = [("block:forward:input", each, None, {"piece": n}) for n, each in enumerate((X, *further))]
        return write(tmp_path / name, inputs)

    cosines, sines = X + 1, X + 2
    with_mask = record("mask", W, cosines, sines)
    result = found(with_mask, record("none", cosines, sines))
    assert (result.equal, result.tensors.num_compared, result.tensors.num_on_purpose) == (True, 1, 5)
    assert not found(with_mask, record("other", W, cosines, cosines)).equal


def test_a_draft_pairs_by_shape_and_order(tmp_path):
    a = write(tmp_path / "a", [(f"h.{n}.fc", X) for n in range(2)] + [(f"h.{n}.fc.weight", W) for n in range(2)]
              + [("extra.weight", W[0])])  # fmt: skip
    b = write(
        tmp_path / "b", [(f"layers.{n}.up", X) for n in range(2)] + [(f"layers.{n}.up.weight", W) for n in range(2)]
    )
    draft = draft_map(open_record(a), open_record(b), RecordMap(open_record(a), open_record(b)))
    assert draft.splitlines() == [
        "# only A has extra.weight [6]",
        "statements:",
        "- h.$LAYER_ID.fc -> layers.$LAYER_ID.up",
        "- h.$LAYER_ID.fc.weight -> layers.$LAYER_ID.up.weight",
    ]
    file = tmp_path / "map.yaml"
    file.write_text(draft + "alone: [extra.weight]\n")
    with pytest.raises(AlignmentError, match="--draft"):
        found(a, b)
    assert found(a, b, map_file=read_map(file)).equal
    printed = invoke("state", "align", a, b, "--draft")
    assert (printed.exit_code, printed.stdout) == (0, draft)


def test_conventions_split_fused_weights_and_rename_blocks(tmp_path):
    hidden, heads, kv, ffn, vocab = 8, 4, 2, 12, 20
    size = hidden // heads
    random = np.random.default_rng(1)
    q, k, v = (random.normal(size=(n * size, hidden)).astype("f4") for n in (heads, kv, kv))
    grouped = [part.reshape(kv, -1, hidden) for part in (q, k, v)]
    fused = np.concatenate(grouped, 1).reshape(-1, hidden)
    gate, up = (random.normal(size=(ffn, hidden)).astype("f4") for _ in range(2))
    others = {name: random.normal(size=shape).astype("f4") for name, shape in
              {"embed": (vocab, hidden), "head": (vocab, hidden), "out": (hidden, hidden), "down": (hidden, ffn),
               "norm": (hidden,), "norm1": (hidden,), "norm2": (hidden,)}.items()}  # fmt: skip
    x = random.normal(size=(3, 4, hidden)).astype("f4")
    block, layer = "decoder.layers.0", "model.layers.0"
    a = write(tmp_path / "a", [
        ("embedding.word_embeddings.weight", others["embed"]), (block, np.swapaxes(x, 0, 1).copy()),
        (f"{block}.mlp.activation", x), (f"{block}.input_layernorm.weight", others["norm1"]),
        (f"{block}.self_attention.linear_qkv", np.swapaxes(x @ fused.T, 0, 1).copy()),
        (f"{block}.self_attention.linear_qkv.weight", fused),
        (f"{block}.self_attention.linear_proj.weight", others["out"]),
        (f"{block}.pre_mlp_layernorm.weight", others["norm2"]),
        (f"{block}.mlp.linear_fc1.weight", np.concatenate((gate, up))),
        (f"{block}.mlp.linear_fc2.weight", others["down"]),
        ("decoder.final_layernorm.weight", others["norm"]), ("output_layer.weight", others["head"]),
    ], model={"num_heads": heads, "num_kv_heads": kv})  # fmt: skip
    theirs = [
        ("model.embed_tokens.weight", others["embed"]), (layer, x),
        (f"{layer}.input_layernorm.weight", others["norm1"]),
        *((f"{layer}.self_attn.{n}_proj", x @ w.T) for n, w in (("q", q), ("k", k), ("v", v))),
        *((f"{layer}.self_attn.{n}_proj.weight", w) for n, w in (("q", q), ("k", k), ("v", v))),
        (f"{layer}.self_attn.o_proj.weight", others["out"]),
        (f"{layer}.post_attention_layernorm.weight", others["norm2"]),
        (f"{layer}.mlp.gate_proj.weight", gate), (f"{layer}.mlp.up_proj.weight", up),
        (f"{layer}.mlp.down_proj.weight", others["down"]), ("model.norm.weight", others["norm"]),
        ("lm_head.weight", others["head"]),
    ]  # fmt: skip
    b = write(tmp_path / "b", theirs)
    result = found(a, b, names=("megatron", "huggingface"))
    assert result.equal, result.tensors
    assert (result.tensors.num_compared, result.tensors.num_on_purpose) == (len(theirs), 1)
    assert found(b, a, names=("huggingface", "megatron")).equal
    swapped = [(name.replace("gate_proj", "up_proj") if "gate" in name else name.replace("up_proj", "gate_proj"), *rest)
               for name, *rest in theirs]  # fmt: skip
    assert not found(a, write(tmp_path / "c", swapped), names=("megatron", "huggingface")).equal
    with pytest.raises(AlignmentError, match="num_heads"):
        found(b, b, names=("huggingface", "megatron"))


class Module:
    def __init__(self, **children):
        self.children = children


class LayerList(Module):
    """A list of layers, by its name."""


def names_of(roots):
    return [name for name, _ in named_modules(roots, lambda module: module.children.items()).values()]


def test_names_are_those_of_the_model():
    block = Module(up=Module())
    block.layer_number = 3
    assert names_of(Module(layers=Module(**{"0": block}))) == ["whole", "layers", "layers.2", "layers.2.up"]
    assert names_of(Module(module=Module(up=Module()))) == ["whole", "up"]  # a wrapper
    assert names_of(Module(_layers=Module(up=Module()))) == ["whole", "up"]  # Paddle's DataParallel
    assert names_of(Module(_layers=LayerList(**{"0": Module()}))) == ["whole", "_layers", "_layers.0"]
    stages = {4: Module(**{"2": Module()}), 5: Module(**{"3": Module()})}
    assert names_of(stages) == ["2", "3"]
    with pytest.raises(ValueError, match="2 modules have the name 'up'"):
        names_of([Module(up=Module()), Module(up=Module())])
    part = Module(decoder=Module())
    part.pre_process, part.post_process = True, False
    assert names_of(part) == ["decoder"]


def test_a_record_of_a_rank_is_not_overwritten(tmp_path):
    write(tmp_path / "a", [("up", X)])
    with pytest.raises(FileExistsError):
        write(tmp_path / "a", [("up", X)])
    write(tmp_path / "a", [("up", X)], rank=1)
