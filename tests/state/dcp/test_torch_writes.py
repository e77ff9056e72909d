"""PyTorch's distributed checkpoint, written by PyTorch and read here, and the other way round."""

import hashlib
import pickle
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from pipeproof.state.checkpoint import tensor_md5s
from pipeproof.state.open_checkpoint import file_findings, open_checkpoint
from tests.cli.commands import printed

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
        "part": torch.arange(20.0)[5:11].reshape(2, 3), "one": torch.ones(1, 4).t(),
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


def test_torch_reads_what_was_converted(tensors, saved, tmp_path):
    output = printed("state", "reshard", saved, "-o", tmp_path / "one.safetensors")
    assert "left out, because they are not tensors of model or optimizer: optim.param_groups.w.lr and 1 more" in output
    printed("state", "reshard", tmp_path / "one.safetensors", "-o", tmp_path / "back", "--save-format", "dcp")
    target = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    target["optim"] = {"state.w.exp_avg": torch.zeros(7, 3)}
    dcp.load(target, checkpoint_id=tmp_path / "back", no_dist=True)
    assert {name: md5(target[name]) for name in tensors} == {name: md5(tensor) for name, tensor in tensors.items()}
    assert torch.equal(target["optim"]["state.w.exp_avg"], torch.ones(7, 3))
    dcp_to_torch_save(tmp_path / "back", tmp_path / "back.pt")
    whole = torch.load(tmp_path / "back.pt", weights_only=True)
    assert md5(whole["bfloat16"]) == md5(tensors["bfloat16"])
    metadata = pickle.loads((tmp_path / "back" / ".metadata").read_bytes())
    theirs = pickle.loads((saved / ".metadata").read_bytes())
    for name in tensors:
        ours = metadata.state_dict_metadata[name]
        assert (ours.size, ours.chunks) == (theirs.state_dict_metadata[name].size,
                                            theirs.state_dict_metadata[name].chunks)  # fmt: skip
        assert ours.properties.dtype == theirs.state_dict_metadata[name].properties.dtype


def test_what_is_not_read_is_named(tmp_path):
    for name, tensor, fault in (
        ("complex", torch.ones(2, dtype=torch.complex64), "the type complex64, which is not supported"),
        ("transposed", torch.ones(2, 3).t(), "[3, 2], is stored with the strides [1, 3]"),
    ):
        dcp.save({"x": tensor}, checkpoint_id=tmp_path / name, no_dist=True)
        output = " ".join(printed("state", "show", tmp_path / name, status=2).split())
        assert "error[PP936]" in output
        assert fault in output


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
