"""PyTorch's distributed checkpoint: its metadata is read without executing anything, or a finding."""

import contextlib
import os
import pickle
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.state.dcp_metadata import DTYPES, read_metadata, require_files
from pipeproof.state.state_codes import DcpError
from tests.cli.commands import printed

pytestmark = [pytest.mark.needs_torch, pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.fixture
def saved(tmp_path):
    tensors = {dtype: torch.zeros(3, 5, dtype=getattr(torch, dtype)) for dtype in DTYPES}
    state = {**tensors, "scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "optim": {"lr": 0.1}, "step": 3}
    dcp.save(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    return tmp_path / "saved"


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_every_type_and_object_is_listed(saved, protocol):
    content = pickle.loads((saved / ".metadata").read_bytes())
    (saved / ".metadata").write_bytes(pickle.dumps(content, protocol))
    metadata = read_metadata(saved)
    require_files(saved, metadata)
    assert {name: metadata.tensors[name].dtype for name in DTYPES} == {name: name for name in DTYPES}
    assert {metadata.tensors[name].shape for name in DTYPES} == {(3, 5)}
    assert (metadata.tensors["scalar"].shape, metadata.tensors["empty"].shape) == ((), (0, 3))
    assert metadata.objects.keys() == {"optim.lr", "step"}


class Evil:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def edit(path, change):
    """Change the metadata by PyTorch's own classes."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def elsewhere(metadata):
    index = next(index for index in metadata.storage_data if index.fqn == "float32")
    metadata.storage_data[index] = replace(metadata.storage_data[index], relative_path="../x")


def other_shape(metadata):
    metadata.state_dict_metadata["float32"] = replace(metadata.state_dict_metadata["float32"], size=torch.Size((15,)))


def cut(file, by):
    file.write_bytes(file.read_bytes()[:-by])


DAMAGES = {
    "cut short": (lambda path: cut(path / "__0_0.distcp", 1), "__0_0.distcp is cut short: it has"),
    "missing": (lambda path: (path / "__0_0.distcp").unlink(), "__0_0.distcp is missing; it holds"),
    "foreign": (lambda path: (path / ".metadata").write_bytes(pickle.dumps(Evil())),
                "names posix.mkdir, which no metadata of DCP has; nothing of it was executed"),
    "plain": (lambda path: (path / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": {}})),
              "has dict where DCP's Metadata should be"),
    "half": (lambda path: cut(path / ".metadata", 40), "is damaged, or no metadata of PyTorch's DCP"),
    "another directory": (lambda path: edit(path, elsewhere), "which is no name of a file next to it"),
    "another shape": (lambda path: edit(path, other_shape), "the tensor differ in their number of dims"),
    "complex": (lambda path: dcp.save({"z": torch.zeros(2, dtype=torch.complex64)}, checkpoint_id=path, no_dist=True),
                "z has the type complex64, which is not supported"),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "said"), DAMAGES.values(), ids=DAMAGES)
def test_damage_is_a_finding_with_its_place(saved, tmp_path, damage, said, monkeypatch):
    monkeypatch.chdir(tmp_path)
    damage(saved)
    with pytest.raises(DcpError) as caught:
        require_files(saved, read_metadata(saved))
    assert caught.value.findings[0].code == "PP936"
    assert said in str(caught.value)
    assert not (tmp_path / "executed").exists()


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole")
    dcp.save({"x": torch.ones(2), "y": 3}, checkpoint_id=path, no_dist=True)
    return (path / ".metadata").read_bytes()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_changed_byte_gives_tensors_or_a_finding(data, content, tmp_path_factory):
    path = tmp_path_factory.mktemp("changed")
    changed = bytearray(content)
    changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    (path / ".metadata").write_bytes(changed)
    with contextlib.suppress(DcpError):
        read_metadata(path)


def test_the_commands_name_what_reads_it(saved):
    for words in (("show", saved), ("reshard", saved, "-o", saved.parent / "x.safetensors")):
        output = " ".join(printed("state", *words, status=2).split())
        assert "a distributed checkpoint of PyTorch (DCP): `pipeproof.torch.load_dcp` loads it" in output
