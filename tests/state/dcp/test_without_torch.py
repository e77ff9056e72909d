"""PyTorch's distributed checkpoint without PyTorch: what is written is read, and damage is named."""

import contextlib
import json
import os
import pickle
import subprocess
import sys
import zipfile
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from pipeproof.diagnostics.finding import PipeproofError
from pipeproof.state.checkpoint import tensor_md5s
from pipeproof.state.dcp.dcp_metadata import DcpChunk, DcpTensor, metadata_of, read_metadata
from pipeproof.state.dcp.torch_archive import archive_end, archive_length, archive_start, locate_tensor
from pipeproof.state.open_checkpoint import file_findings, open_checkpoint
from pipeproof.state.reshard import reshard_targets
from tests.cli.commands import invoke, printed
from tests.state.reshard.plans import keeps_marks

draw = np.random.default_rng(1)
TENSORS = {
    "layers.0.up.weight": draw.standard_normal((5, 3)).astype(np.float32),
    "layers.0.count": np.array(7),
    "layers.0.half": draw.standard_normal(4).astype(np.float16),
    "layers.0.flags": np.array([True, False]),
    "layers.0.ids": np.arange(6, dtype=np.uint16).reshape(1, 2, 3),
    "layers.0.empty": np.zeros((0, 4), np.float32),
    "optimizer.state.layers.0.up.weight.exp_avg": draw.standard_normal((5, 3)).astype(np.float32),
    "optimizer.state.layers.0.up.weight.step": np.array(3.0, np.float32),
}


@pytest.fixture
def file(tmp_path):
    save_file(TENSORS, tmp_path / "one.safetensors")
    return tmp_path / "one.safetensors"


@pytest.fixture
def dcp(file, tmp_path):
    printed("state", "reshard", file, "-o", tmp_path / "dcp", "--save-format", "dcp")
    return tmp_path / "dcp"


def test_there_and_back_with_the_md5_of_every_tensor(file, dcp, tmp_path):
    output = printed("state", "reshard", dcp, "-o", tmp_path / "back.safetensors")
    (line,) = [line for line in output.splitlines() if line.startswith("MD5 of 8 tensors: ")]
    of_all = printed("state", "show", file, "--md5").split()[-1]
    assert line == f"MD5 of 8 tensors: {of_all} in {dcp}, {of_all} in {tmp_path / 'back.safetensors'}: equal"
    assert printed("state", "show", dcp, "--md5") == printed("state", "show", file, "--md5")
    assert printed("state", "diff", dcp, file) == "all 8 tensors have the same type, shape and bits\n"
    back = load_file(tmp_path / "back.safetensors")
    assert {name: (a.dtype, a.shape, a.tobytes()) for name, a in back.items()} == {
        name: (a.dtype, a.shape, a.tobytes()) for name, a in TENSORS.items()
    }
    again = json.loads(
        printed("state", "reshard", dcp, "-o", tmp_path / "again", "--save-format", "dcp", "--format", "json")
    )
    assert again["output"]["md5"] == of_all
    assert (tmp_path / "again" / "__0_0.distcp").read_bytes() == (dcp / "__0_0.distcp").read_bytes()


def test_it_says_what_it_is_and_which_states_a_weight_has(dcp):
    output = printed("state", "show", dcp)
    assert "dcp: a checkpoint of PyTorch's (DCP), 8 tensors in 1 file" in output
    row = next(line for line in output.splitlines() if line.startswith("layers.0.up.weight"))
    assert row.split() == ["layers.0.up.weight", "1", "float32", "5", "x", "3", "exp_avg,", "step"]
    content = json.loads(printed("state", "show", dcp, "--format", "json"))
    assert content["kind"] == "dcp"
    assert content["tensors"]["optimizer.state.layers.0.up.weight.step"]["kind"] == "counter"
    assert "its file has the CRC-32 of its content" in printed("state", "show", dcp, "--verify")


def test_weights_only_leaves_out_optimizer_states(dcp, tmp_path):
    printed("state", "reshard", dcp, "-o", tmp_path / "weights", "--save-format", "dcp", "--weights-only")
    names = set(open_checkpoint(tmp_path / "weights").tensors)
    assert names == {name for name in TENSORS if not name.startswith("optimizer.")}


def test_several_files(file, tmp_path, monkeypatch):
    monkeypatch.setattr(reshard_targets.as_dcp, "__defaults__", (16,))
    printed("state", "reshard", file, "-o", tmp_path / "many", "--save-format", "dcp", "--jobs", 3)
    assert len(list((tmp_path / "many").glob("__0_*.distcp"))) == 4
    assert printed("state", "diff", tmp_path / "many", file).startswith("all 8 tensors have the same")


def test_an_interrupted_conversion_resumes(file, tmp_path, monkeypatch):
    from pipeproof.state.reshard.execute_reshard import WorkDirectory

    with monkeypatch.context() as patched:
        patched.setattr(WorkDirectory, "publish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert invoke("state", "reshard", file, "-o", tmp_path / "x", "--save-format", "dcp").exit_code
    assert not (tmp_path / "x").exists()
    assert "1 of them from an earlier call" in printed(
        "state", "reshard", file, "-o", tmp_path / "x", "--save-format", "dcp"
    )
    again = ("state", "reshard", file, "-o", tmp_path / "x", "--save-format", "dcp")
    if keeps_marks(tmp_path):
        assert "already exists and is complete" in printed(*again)
    else:
        assert "PP923" in printed(*again, status=2)


def test_torch_is_not_imported(dcp, tmp_path):
    program = (
        "import sys\nfrom click.testing import CliRunner\nfrom pipeproof.cli.main import main\n"
        "for words in (['show', sys.argv[1], '--md5'], ['reshard', sys.argv[1], '-o', sys.argv[2]]):\n"
        "    assert CliRunner().invoke(main, ['state', *words]).exit_code == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program, dcp, tmp_path / "x.safetensors"], check=True)


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["-o", "x.safetensors", "--save-format", "dcp"], "OUT may not end with .safetensors"),
        (["--check", "--save-format", "dcp"], "give -o OUT, and no plan"),
        (["-o", "x", "--save-format", "flex"], "give --to PLAN"),
    ],
)
def test_options_that_do_not_go_together(file, words, fault):
    assert fault in printed("state", "reshard", file, *words, status=2)


def test_archives_of_more_than_4_gib(tmp_path):
    shape = (2**32 + 5,)
    start, end = archive_start("uint8", shape), archive_end("uint8", shape, 77)
    path = tmp_path / "__0_0.distcp"
    with path.open("wb") as stream:  # sparse
        stream.write(start)
        stream.seek(shape[0], os.SEEK_CUR)
        stream.write(end)
    length = archive_length("uint8", shape)
    assert path.stat().st_size == length
    with path.open("rb") as stream:
        array, crc = locate_tensor(stream, path, "x", "uint8", DcpChunk((0,), shape, path.name, 0, length))
    assert (array.start, array.num_bytes, crc) == (len(start), shape[0], 77)


def test_an_archive_is_a_zip_archive(tmp_path):
    content = TENSORS["layers.0.up.weight"].tobytes()
    archive = archive_start("float32", (5, 3)) + content + archive_end("float32", (5, 3), zlib.crc32(content))
    (tmp_path / "x.zip").write_bytes(archive)
    with zipfile.ZipFile(tmp_path / "x.zip") as opened:
        assert opened.testzip() is None
        assert opened.read("archive/data/0") == content


# --- damage ---


class Evil:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def truncated(path):
    shard = path / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])


def missing(path):
    (path / "__0_0.distcp").unlink()


def foreign(path):
    (path / ".metadata").write_bytes(pickle.dumps(Evil()))


def foreign_inside(path):
    content = (path / ".metadata").read_bytes()
    (path / ".metadata").write_bytes(content.replace(b"StorageMeta\n", b"StorageMetb\n"))


def plain(path):
    (path / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": {}}))


def cut(path):
    (path / ".metadata").write_bytes((path / ".metadata").read_bytes()[:-40])


def other_directory(path, file="../x"):
    tensors = {"x": DcpTensor("float32", (2,), (DcpChunk((0,), (2,), file, 0, 10),))}
    (path / ".metadata").write_bytes(metadata_of(tensors))


def no_file_has_this_name(path):
    other_directory(path, "\0_0_0.distcp")


def other_shape(path):
    held = read_metadata(path).tensors["layers.0.count"].chunks[0]
    chunk = DcpChunk((0,), (1,), held.file, held.start, held.length)
    (path / ".metadata").write_bytes(metadata_of({"layers.0.count": DcpTensor("int64", (1,), (chunk,))}))


def other_place(path):
    held = read_metadata(path).tensors["layers.0.up.weight"]
    chunk = held.chunks[0]
    moved = DcpChunk(chunk.offsets, chunk.extents, chunk.file, chunk.start + 4, chunk.length)
    (path / ".metadata").write_bytes(metadata_of({"x": DcpTensor(held.dtype, held.shape, (moved,))}))


def one_dim(path):
    held = read_metadata(path).tensors["layers.0.up.weight"]
    (path / ".metadata").write_bytes(metadata_of({"x": DcpTensor(held.dtype, (15,), held.chunks)}))


DAMAGES = {
    truncated: "__0_0.distcp is cut short: it has",
    missing: "__0_0.distcp is missing; it holds layers.0.count",
    foreign: "names posix.mkdir, which no metadata of DCP has; nothing of it was executed",
    foreign_inside: "names torch.distributed.checkpoint.metadata.StorageMetb, which no metadata",
    plain: "has dict where DCP's Metadata should be",
    cut: "is damaged, or no metadata of PyTorch's DCP",
    other_directory: "x is in '../x', which is no name of a file next to it",
    no_file_has_this_name: r"x is in '\x00_0_0.distcp', which is no name of a file next to it",
    other_shape: "has layers.0.count as int64 [], and the metadata lists int64 [1]",
    other_place: "the archive of x at byte",
    one_dim: "a chunk of x and the tensor differ in their number of dims",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_is_a_finding_with_its_place(dcp, tmp_path, damage, monkeypatch):
    monkeypatch.chdir(tmp_path)
    damage(dcp)
    for words in (("show", dcp), ("show", dcp, "--md5"), ("reshard", dcp, "-o", tmp_path / "x.safetensors")):
        output = " ".join(printed("state", *words, status=2).split())
        assert "error[PP936]" in output
        assert DAMAGES[damage] in output
    assert not (tmp_path / "executed").exists()
    assert not (tmp_path / "x.safetensors").exists()


def test_a_changed_element_is_found_by_its_crc(dcp, tmp_path):
    stored = open_checkpoint(dcp).shards["layers.0.up.weight"][0]
    content = bytearray(stored.file.read_bytes())
    content[stored.start] ^= 1
    stored.file.write_bytes(content)
    assert "the elements of layers.0.up.weight have another CRC-32" in " ".join(
        printed("state", "show", dcp, "--verify", status=1).split()
    )
    assert "another CRC-32" in " ".join(
        printed("state", "reshard", dcp, "-o", tmp_path / "x.safetensors", status=2).split()
    )
    assert not (tmp_path / "x.safetensors").exists()


def test_a_region_that_no_chunk_has_is_found_by_the_proof(dcp, tmp_path):
    held = read_metadata(dcp).tensors["layers.0.up.weight"]
    (dcp / ".metadata").write_bytes(metadata_of({"x": DcpTensor("float32", (6, 3), held.chunks)}))
    assert "PP210" in printed("state", "reshard", dcp, "-o", tmp_path / "x.safetensors", status=1)
    assert len(file_findings(dcp)) == 1


def test_a_run_cannot_resume_from_it_and_the_message_has_the_command(dcp):
    from pipeproof.state.read_state import find_state

    with pytest.raises(PipeproofError) as caught:
        find_state(dcp)
    assert f"pipeproof state reshard {dcp} --to PLAN --names" in caught.value.findings[0].help


@settings(max_examples=80)
@given(data=st.data())
def test_a_changed_byte_gives_tensors_or_a_finding(data, tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz")
    archive = archive_start("float32", (2,)) + bytes(8) + archive_end("float32", (2,), zlib.crc32(bytes(8)))
    chunk = DcpChunk((0,), (2,), "__0_0.distcp", 0, len(archive))
    contents = {".metadata": metadata_of({"x": DcpTensor("float32", (2,), (chunk,))}), "__0_0.distcp": archive}
    name = data.draw(st.sampled_from(sorted(contents)))
    changed = bytearray(contents[name])
    changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    for file, content in {**contents, name: changed}.items():
        (path / file).write_bytes(content)
    with contextlib.suppress(PipeproofError):
        tensor_md5s(open_checkpoint(path))
