"""The mover against numpy on whole arrays, and its files against files of the safetensors library."""

from __future__ import annotations

import hashlib
import tempfile
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeproof.state.byte_ranges import CAST_DTYPES, ByteArray, cast, write_file
from pipeproof.state.checkpoint import Checkpoint, HeldShard
from pipeproof.state.regions import NO_DIM, Region, whole_region
from pipeproof.state.reshard import copy_regions as moving
from pipeproof.state.reshard.copy_regions import TargetFiles, write_target
from pipeproof.state.safetensors_header import read_header
from pipeproof.state.state_codes import StateError
from pipeproof.state.state_index import Shard, ShardFile, TensorEntry
from pipeproof.state.tensor_map import RegionCopy, StateMap, TensorMap, identity_map
from tests.state.tiny import as_bytes, cut

DTYPES = {"float32": np.float32, "float64": np.float64, "float16": np.float16, "int64": np.int64}


@st.composite
def cuts(draw, name, shape):
    """A tensor cut along every dim at drawn places, and some shards once more into flat ranges."""
    regions = [Region((), ())]
    for size in shape:
        at = sorted(draw(st.sets(st.integers(1, size - 1), max_size=2))) if size > 1 else []
        ends = [*zip([0, *at], [*at, size], strict=True)]
        regions = [Region((*region.offsets, a), (*region.extents, b - a)) for region in regions for a, b in ends]
    shards = []
    for region in regions:
        numel = prod(region.extents)
        at = sorted(draw(st.sets(st.integers(1, numel - 1), max_size=2))) if numel > 1 and draw(st.booleans()) else []
        flats = [*zip([0, *at], [*at, numel], strict=True)] if at else [None]
        shards += [Shard(tensor=name, offsets=region.offsets, extents=region.extents, flat=flat) for flat in flats]
    return shards


@st.composite
def dealt(draw, arrays, num_files):
    """All tensors cut, and the shards dealt out to files, of each tensor at most one to a file."""
    files = {f"rank{rank}.safetensors": [] for rank in range(num_files)}
    for name, array in arrays.items():
        for number, shard in enumerate(draw(cuts(name, array.shape))):
            file = f"rank{number}.safetensors"
            files.setdefault(file, []).append(shard)
    return {name: tuple(draw(st.permutations(shards))) for name, shards in files.items()}


@st.composite
def checkpoints(draw):
    """Named arrays of distinct values, and two ways to cut them."""
    arrays = {}
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 7), max_size=3)))
        dtype = draw(st.sampled_from([*DTYPES.values()]))
        arrays[f"layer.{number}"] = (np.arange(prod(shape)) + 100 * number).astype(dtype).reshape(shape)
    return arrays, draw(dealt(arrays, 1)), draw(dealt(arrays, 2))


def entries_of(arrays):
    return {
        name: TensorEntry(kind="weight", dtype=array.dtype.name, shape=array.shape) for name, array in arrays.items()
    }


def written(root, arrays, files):
    """A checkpoint on disk, as the library writes its files."""
    stored, entries, noted = {}, entries_of(arrays), {}
    for rank, (name, shards) in enumerate(files.items()):
        content = {
            one.tensor: ByteArray(arrays[one.tensor].dtype.name, one.shape, as_bytes(cut(one, arrays)))
            for one in shards
        }
        size, sha256 = write_file(root / name, content)
        noted[root / name] = ShardFile(name=name, rank=rank, size_bytes=size, sha256=sha256, shards=shards)
        header = read_header(root / name)
        for one in shards:
            shard = HeldShard(one, rank, root / name, header.arrays[one.tensor].start)
            stored.setdefault(one.tensor, []).append(shard)
    return Checkpoint(root, "state", entries, {name: tuple(of_one) for name, of_one in stored.items()}, noted, None)


def target_of(arrays, files):
    return TargetFiles(files, entries_of(arrays), {name: rank for rank, name in enumerate(files)})


def shifted(source, state_map, target, directory, jobs=2):
    directory.mkdir()
    told = []
    files = write_target(source, state_map, target, directory, lambda done, total: told.append((done, total)), jobs)
    assert not told or told[-1] == (target.size_bytes, target.size_bytes)
    return files


@given(checkpoints(), st.sampled_from([1, 3]), st.sampled_from([64, 256, moving._BLOCKS_BYTES]))
def test_files_are_byte_for_byte_what_the_library_writes(drawn, jobs, block):
    arrays, one, other = drawn
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(moving, "_BLOCKS_BYTES", block * jobs)
        root = Path(folder)
        for name in ("a", "b"):
            (root / name).mkdir()
        source, expected = written(root / "a", arrays, one), written(root / "b", arrays, other)
        files = shifted(source, identity_map(source.tensors), target_of(arrays, other), root / "made", jobs)
        for file in files:
            assert (root / "made" / file.name).read_bytes() == (root / "b" / file.name).read_bytes()
        assert {root / "b" / file.name: file for file in files} == expected.files


@st.composite
def tilings(draw, shape):
    """Regions that tile a shape, by cutting it in two again and again."""
    regions = [whole_region(shape)]
    for _ in range(draw(st.integers(0, 4))):
        number = draw(st.integers(0, len(regions) - 1))
        region = regions[number]
        dim = draw(st.integers(0, len(shape) - 1))
        if region.extents[dim] > 1:
            at = draw(st.integers(1, region.extents[dim] - 1))
            lower = Region(region.offsets, (*region.extents[:dim], at, *region.extents[dim + 1 :]))
            rest = (*region.extents[:dim], region.extents[dim] - at, *region.extents[dim + 1 :])
            by = tuple(at if other == dim else 0 for other in range(len(shape)))
            regions[number : number + 1] = [lower, Region(region.shifted(by).offsets, rest)]
    return regions


@given(st.data())
def test_region_copies_are_turned_cast_and_put_where_the_map_says(data):
    source_shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    array = np.arange(prod(source_shape), dtype=np.float64).reshape(source_shape) + 0.25
    expected, copies = np.zeros(shape, np.float32), []
    for region in data.draw(tilings(shape)):
        permutation = data.draw(st.permutations(range(len(shape))))
        permutation = tuple(dim if dim < len(source_shape) else NO_DIM for dim in permutation)
        extents = [1] * len(source_shape)
        for i, dim in enumerate(permutation):
            if dim != NO_DIM:
                extents[dim] = region.extents[i]
        fits = all(extent <= size for extent, size in zip(extents, source_shape, strict=True))
        lone = all(dim != NO_DIM or region.extents[i] == 1 for i, dim in enumerate(permutation))
        if not fits or not lone or data.draw(st.integers(0, 4)) == 0:
            copies.append(RegionCopy(region, None, region))
            continue
        offsets = [data.draw(st.integers(0, size - e)) for size, e in zip(source_shape, extents, strict=True)]
        source_region = Region(tuple(offsets), tuple(extents))
        copies.append(RegionCopy(region, "source", source_region, permutation, ("float32",)))
        seen = array[tuple(map(slice, source_region.offsets, source_region.stops))]
        order = [dim for dim in permutation if dim != NO_DIM]
        kept = seen.reshape([extents[dim] for dim in sorted(order)])
        turned = kept.transpose([sorted(order).index(dim) for dim in order]).reshape(region.extents)
        expected[tuple(map(slice, region.offsets, region.stops))] = turned
    files = data.draw(dealt({"target": expected}, 1))
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(moving, "_BLOCKS_BYTES", data.draw(st.sampled_from([32, 2**20])))
        root = Path(folder)
        source_files = data.draw(dealt({"source": array}, 1))
        source = written(root, {"source": array}, source_files)
        state_map = StateMap({"target": TensorMap("float32", shape, tuple(copies))})
        shifted(source, state_map, target_of({"target": expected}, files), root / "made", jobs=1)
        for name, shards in files.items():
            content = (root / "made" / name).read_bytes()
            for key, stored in read_header(root / "made" / name).arrays.items():
                (shard,) = (one for one in shards if one.tensor == key)
                part = content[stored.start : stored.start + stored.num_bytes]
                assert part == cut(shard, {"target": expected}).tobytes()


def test_a_source_file_that_was_changed_ends_the_move_and_is_named(tmp_path):
    arrays = {"a": np.arange(6.0), "b": np.arange(4.0)}
    files = {f"rank{rank}.safetensors": (whole_shard(name, arrays),) for rank, name in enumerate(arrays)}
    source = written(tmp_path, arrays, files)
    content = bytearray((tmp_path / "rank1.safetensors").read_bytes())
    content[-1] ^= 1
    (tmp_path / "rank1.safetensors").write_bytes(content)
    (tmp_path / "made").mkdir()
    target = target_of(arrays, files)
    with pytest.raises(StateError, match=r"rank1\.safetensors was changed: its SHA-256"):
        write_target(source, identity_map(source.tensors), target, tmp_path / "made", lambda *_: None, 1)


def whole_shard(name, arrays):
    offsets, extents = whole_region(arrays[name].shape)
    return Shard(tensor=name, offsets=offsets, extents=extents)


def test_a_tensor_larger_than_many_blocks_keeps_its_digest(tmp_path, monkeypatch):
    monkeypatch.setattr(moving, "_BLOCKS_BYTES", 2**12)
    monkeypatch.setattr(moving, "_WRITE_BACK_BYTES", 2**13)
    arrays = {"a": np.random.default_rng(1).standard_normal((300, 70))}
    files = {"rank0.safetensors": (whole_shard("a", arrays),)}
    source = written(tmp_path, arrays, files)
    turned = {"a": np.ascontiguousarray(arrays["a"].T)}
    copy = RegionCopy(whole_region((70, 300)), "a", whole_region((300, 70)), (1, 0))
    state_map = StateMap({"a": TensorMap("float64", (70, 300), (copy,))})
    target = target_of(turned, {"rank0.safetensors": (whole_shard("a", turned),)})
    (file,) = shifted(source, state_map, target, tmp_path / "made")
    content = (tmp_path / "made" / file.name).read_bytes()
    assert hashlib.sha256(content).hexdigest() == file.sha256
    assert content.endswith(turned["a"].tobytes())


BITS = {"float16": 16, "bfloat16": 16, "float32": 32, "float64": 64}


def is_nan(bits, dtype):
    return np.isnan(cast(bits, dtype, "float64").view(np.float64))


def test_a_float32_halfway_between_two_bfloat16_goes_to_the_even_one():
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F80FFFF, 0x7F7FFFFF, 0xFF800000], np.uint32)
    assert [*map(hex, cast(bits, "float32", "bfloat16"))] == [
        "0x3f80",
        "0x3f82",
        "0x3f81",
        "0x3f81",
        "0x7f80",
        "0xff80",
    ]


def test_nan_stays_nan_whatever_is_cut_off():
    bits = np.array([0x7F800001, 0xFFFFFFFF, 0x7FC00000], np.uint32)
    for dtype in CAST_DTYPES[:2]:
        assert is_nan(cast(bits, "float32", dtype), dtype).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("wide", ["float32", "float64"])
def test_sixteen_bits_come_back_from_wider_types(dtype, wide):
    bits = np.arange(2**16, dtype=np.uint16)
    back = cast(cast(bits, dtype, wide), wide, dtype)
    assert ((back == bits) | is_nan(bits, dtype)).all()
    assert (is_nan(back, dtype) == is_nan(bits, dtype)).all()


@pytest.mark.needs_torch
@given(st.sampled_from(CAST_DTYPES), st.sampled_from(CAST_DTYPES), st.integers(0, 2**32))
def test_casts_are_those_of_torch(dtype, to, seed):
    torch = pytest.importorskip("torch")
    bits = np.random.default_rng(seed).integers(0, 2 ** BITS[dtype] - 1, 512, np.uint64, endpoint=True)
    bits = bits.astype(f"<u{BITS[dtype] // 8}")
    signed = bits.view(f"<i{BITS[dtype] // 8}").copy()
    theirs = torch.from_numpy(signed).view(getattr(torch, dtype)).to(getattr(torch, to))
    expected = theirs.view(getattr(torch, f"int{BITS[to]}")).numpy().view(f"<u{BITS[to] // 8}")
    made = cast(bits, dtype, to)
    assert ((made == expected) | (is_nan(made, to) & is_nan(expected, to))).all()
