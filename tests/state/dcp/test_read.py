"""PyTorch's distributed checkpoint, written by PyTorch and read here; a damaged or foreign one is a finding."""

import contextlib
import hashlib
import os
import pickle
import re
import sys
import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.diagnostics.finding import PipeproofError
from pipeproof.state.checkpoint import tensor_md5s
from pipeproof.state.open_checkpoint import file_findings, open_checkpoint
from pipeproof.state.read_state import find_state
from tests.cli.commands import invoke, printed

pytestmark = [pytest.mark.needs_torch, pytest.mark.filterwarnings("ignore::UserWarning")]
FLOATS = ("float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
DTYPES = (*FLOATS, "bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))


def md5(tensor):
    content = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.md5(content).hexdigest()


@pytest.fixture
def tensors():
    draw = torch.Generator().manual_seed(1)
    tensors = {dtype: torch.randint(0, 2, (3, 5), generator=draw).to(getattr(torch, dtype)) for dtype in DTYPES}
    weight = torch.nn.Parameter(torch.randn(7, 3, generator=draw))
    return {
        **tensors, "model.w": weight, "scalar": torch.tensor(2.5), "empty": torch.empty(0, 3),
        "part": torch.arange(20.0)[5:11].reshape(2, 3), "transposed": torch.arange(6.0).reshape(2, 3).t(),
    }  # fmt: skip


@pytest.fixture
def saved(tensors, tmp_path):
    states = {"state.w.exp_avg": torch.ones(7, 3), "state.w.step": torch.tensor(1.0), "param_groups.w.lr": 0.1}
    dcp.save({**tensors, "optim": states, "step": 3}, checkpoint_id=tmp_path / "saved", no_dist=True)
    return tmp_path / "saved"


def test_every_type_is_read_with_its_bits(tensors, saved):
    opened = open_checkpoint(saved)
    digests = tensor_md5s(opened)
    assert {name: digests[name] for name in tensors} == {name: md5(tensor) for name, tensor in tensors.items()}
    assert {name: opened.tensors[name].dtype for name in DTYPES} == {name: name for name in DTYPES}
    assert opened.tensors["optim.state.w.exp_avg"].kind == "moment"
    assert opened.tensors["optim.state.w.exp_avg"].weight == "model.w"
    assert opened.others == ("optim.param_groups.w.lr", "step")
    assert file_findings(saved) == ()
    assert "not listed: optim.param_groups.w.lr and 1 more" in printed("state", "show", saved)


def test_a_conversion_has_the_md5_of_every_tensor(saved, tmp_path):
    out = tmp_path / "one.safetensors"
    output = printed("state", "reshard", saved, "-o", out)
    assert "left out, because they are not tensors of model or optimizer: optim.param_groups.w.lr and 1 more" in output
    assert re.search(rf"MD5 of \d+ tensors: (\w+) in {saved}, \1 in {out}: equal", output)
    assert printed("state", "diff", saved, out).startswith("all ")


def test_what_is_not_read_is_named(tmp_path, monkeypatch):
    dcp.save({"x": torch.ones(2, dtype=torch.complex64)}, checkpoint_id=tmp_path / "complex", no_dist=True)
    output = " ".join(printed("state", "show", tmp_path / "complex", status=2).split())
    assert "error[PP936]" in output
    assert "the type complex64, which is not supported" in output
    dcp.save({"x": torch.ones(2)}, checkpoint_id=tmp_path / "saved", no_dist=True)
    monkeypatch.setitem(sys.modules, "torch", None)
    output = " ".join(printed("state", "show", tmp_path / "saved", "--md5", status=2).split())
    assert "error[PP936]: PyTorch is not installed" in output
    assert "help: install PyTorch: " in output
    assert "x " in printed("state", "show", tmp_path / "saved")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_metadata_of_any_protocol(saved, protocol):
    before = tensor_md5s(open_checkpoint(saved))
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    (saved / ".metadata").write_bytes(pickle.dumps(metadata, protocol=protocol))
    assert tensor_md5s(open_checkpoint(saved)) == before


def test_its_weights_become_the_state_of_a_plan(tmp_path):
    """A model under another tool's names in DCP: proved, converted, and equal to the state that it came from."""
    from safetensors.torch import load_file

    from tests.state.runs import plan_of
    from tests.state.tiny import write_state

    subject = plan_of(steps=3)
    state = write_state(subject, tmp_path / "states", 2)
    (tmp_path / "plan.yaml").write_text(
        yaml.safe_dump(subject.plan.spec.model_dump(mode="json", exclude_defaults=True))
    )
    printed("state", "reshard", state, "--names", "huggingface", "-o", tmp_path / "theirs.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(load_file(tmp_path / "theirs.safetensors"), checkpoint_id=tmp_path / "theirs", no_dist=True)
    assert printed("state", "diff", tmp_path / "theirs", tmp_path / "theirs.safetensors").startswith("all ")
    output = printed(
        "state",
        "reshard",
        tmp_path / "theirs",
        "--to",
        tmp_path / "plan.yaml",
        "--names",
        "huggingface",
        "-o",
        tmp_path / "ours",
    )
    assert "only its weights are used" in output
    printed("state", "reshard", state, "--weights-only", "-o", tmp_path / "weights.safetensors")
    assert printed("state", "diff", tmp_path / "ours", tmp_path / "weights.safetensors").startswith("all ")


# --- damage ---


class Evil:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def edit(path, change):
    """Change the metadata by PyTorch's own classes."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def placed(path, **fields):
    def change(metadata):
        index = next(index for index in metadata.storage_data if index.fqn == "float32")
        metadata.storage_data[index] = replace(metadata.storage_data[index], **fields)

    edit(path, change)


def other_shape(metadata):
    metadata.state_dict_metadata["float32"] = replace(metadata.state_dict_metadata["float32"], size=torch.Size((15,)))


def other_type(metadata):
    metadata.state_dict_metadata["float32"] = replace(
        metadata.state_dict_metadata["float32"], properties=metadata.state_dict_metadata["int32"].properties
    )


def files(path):
    (file,) = path.glob("*.distcp")
    return file


def cut(file, by):
    file.write_bytes(file.read_bytes()[:-by])


DAMAGES = {
    "cut short": (lambda path: cut(files(path), 1), "__0_0.distcp is cut short: it has"),
    "missing": (lambda path: files(path).unlink(), "__0_0.distcp is missing; it holds"),
    "foreign": (lambda path: (path / ".metadata").write_bytes(pickle.dumps(Evil())),
                "names posix.mkdir, which no metadata of DCP has; nothing of it was executed"),
    "plain": (lambda path: (path / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": {}})),
              "has dict where DCP's Metadata should be"),
    "half": (lambda path: cut(path / ".metadata", 40), "is damaged, or no metadata of PyTorch's DCP"),
    "another directory": (lambda path: placed(path, relative_path="../x"), "which does not name a file next to it"),
    "another shape": (lambda path: edit(path, other_shape), "the tensor differ in their number of dims"),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "said"), DAMAGES.values(), ids=DAMAGES)
def test_damage_is_a_finding_with_its_place(saved, tmp_path, damage, said, monkeypatch):
    monkeypatch.chdir(tmp_path)
    damage(saved)
    for words in (("show", saved), ("reshard", saved, "-o", tmp_path / "x.safetensors")):
        output = " ".join(printed("state", *words, status=2).split())
        assert "error[PP936]" in output
        assert said in output
    assert not (tmp_path / "executed").exists()
    assert not (tmp_path / "x.safetensors").exists()


def other_element(path, tensor):
    content = bytearray(files(path).read_bytes())
    content[content.index(tensor.detach().numpy().tobytes())] ^= 1
    files(path).write_bytes(content)


CHANGES = {
    "an element": (lambda path, weight: other_element(path, weight), "data/0 has another CRC-32"),
    "another place": (lambda path, _: placed(path, offset=4), "the archive of float32 at byte 4: "),
    "another save": (lambda path, _: edit(path, other_type), "has float32 as float32 [3, 5], and the metadata lists"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)
def test_a_changed_archive_is_found_as_it_is_loaded(tensors, saved, tmp_path, change, message):
    change(saved, tensors["model.w"])
    for words in (("show", saved, "--verify"), ("reshard", saved, "-o", tmp_path / "x.safetensors")):
        result = invoke("state", *words)
        assert result.exit_code
        assert message in " ".join(result.output.split())
    assert not (tmp_path / "x.safetensors").exists()


@pytest.fixture(scope="module")
def contents(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole")
    dcp.save({"x": torch.ones(2)}, checkpoint_id=path, no_dist=True)
    return {name: (path / name).read_bytes() for name in (".metadata", "__0_0.distcp")}


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_changed_byte_gives_tensors_or_a_finding(data, contents, tmp_path_factory):
    path = tmp_path_factory.mktemp("changed")
    name = data.draw(st.sampled_from(sorted(contents)))
    changed = bytearray(contents[name])
    changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    for file, content in {**contents, name: changed}.items():
        (path / file).write_bytes(content)
    with contextlib.suppress(PipeproofError):
        tensor_md5s(open_checkpoint(path))


def test_a_run_cannot_resume_from_it_and_the_message_has_the_command(saved):
    with pytest.raises(PipeproofError) as caught:
        find_state(saved)
    assert f"pipeproof state reshard {saved} --to PLAN --names" in caught.value.findings[0].help
