"""A state in PyTorch's distributed checkpoint: saved on two ranks, loaded on one and on three, to the bit."""

import io
import json
import os
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

from pipeproof.diagnostics.finding import PipeproofError
from pipeproof.exec.train.torch import dcp_files
from pipeproof.exec.train.torch.dcp_state import load_dcp, save_dcp
from pipeproof.state.checkpoint import md5_of_all, tensor_md5s
from pipeproof.state.open_checkpoint import file_findings, open_checkpoint
from tests.train.dcp_ranks import digests_of, optimizer_of, stages_of

pytestmark = pytest.mark.needs_torch
PATIENCE_S = 400


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The directory in which three ranks saved, and the report of each of them."""
    directory = tmp_path_factory.mktemp("dcp")
    command = [sys.executable, "-m", "tests.train.dcp_ranks", str(directory)]
    started = [
        subprocess.Popen(
            [*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True,
        )
        for rank in range(3)
    ]  # fmt: skip
    try:
        printed = [process.communicate(timeout=PATIENCE_S)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert all(process.returncode == 0 for process in started), "\n".join(printed)
    return directory, [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(3)]


def merged(said, key):
    """Digests of the tensors on all ranks together; the copies of a tied weight are equal."""
    whole = {}
    for of_rank in said:
        for name, digest in of_rank.get(key, {}).items():
            assert whole.setdefault(name, digest) == digest, name
    return whole


def test_every_tensor_and_hyperparameter_has_its_bits_on_another_topology(trained):
    _, said = trained
    at_save = merged(said, "at save")
    names = [name for name in at_save if not name.startswith(("optimizer.", "lr "))]
    assert len(names) == 4 * 8 + 3  # 5 parameters and 3 buffers of a layer; embedding, two of the norm
    assert sum(name.startswith("optimizer.state.") for name in at_save) == 3 * (4 * 5 + 3)
    for key in ("same topology", "on one", "on three", "sharded"):
        assert merged(said, key) == at_save, key


def test_two_further_steps_give_the_same_bits(trained):
    _, said = trained
    expected = merged(said, "after two more steps")
    assert expected != merged(said, "at save")
    assert merged(said, "on one, after") == expected
    assert merged(said, "on three, after") == expected


def test_rng_states_are_restored_on_the_same_topology_alone(trained):
    _, said = trained
    assert [of_rank["rng restored"] for of_rank in said[:2]] == [True, True]
    assert [of_rank["drawn again"] for of_rank in said[:2]] == [of_rank["drawn"] for of_rank in said[:2]]
    assert said[0]["loaded on one"] == {
        "step": 3, "data_position": 96, "sampler": {"order": [3, 1], "empty": {}}, "scale": [1.0, 1.0],
        "rng_restored": False,
    }  # fmt: skip


def test_the_command_line_sees_the_same_tensors(trained):
    directory, said = trained
    of_all = set()
    for name in ("two", "one", "three", "sharded"):
        digests = tensor_md5s(open_checkpoint(directory / name))
        of_all.add(md5_of_all(digests))
        assert digests == {key: md5 for key, md5 in merged(said, "at save").items() if not key.startswith("lr ")}
        assert file_findings(directory / name) == ()
    assert len(of_all) == 1
    assert said[0]["is sharded"] == "DTensor"
    held = open_checkpoint(directory / "sharded").shards["layers.0.up.weight"]
    assert [shard.rank for shard in held] == [0, 1]


def test_all_ranks_report_the_error_of_one_and_change_nothing(trained):
    _, said = trained
    for of_rank in said:
        assert of_rank["refused"].startswith("DcpMismatchError PP937: layers.1.up.weight of stage 2 is float32 [13, 8]")
        assert of_rank["unchanged"]
        text = "PP937: stages 0 and 2 both have layers.0."
        assert text in of_rank["undeclared"]
        assert "PP937: stages 0 and 1 both have 0.weight" in of_rank["not declared local"]
        assert "on rank 0 and layers.0.norm.running_mean of stage 0 on rank 2 are one tensor" in of_rank["buffers"]


# --- in this process ---


def sequential():
    torch.manual_seed(1)
    return {0: nn.Sequential(nn.Linear(3, 4), nn.Tanh()), 1: nn.Sequential(nn.Linear(4, 2))}


def code_of(work):
    with pytest.raises(PipeproofError) as caught:
        work()
    return caught.value.findings[0].code, str(caught.value)


def test_names_that_are_local_to_stages_load_with_the_same_cut_alone(tmp_path):
    stages = sequential()
    with pytest.warns(UserWarning, match="only the same cut can load"):
        save_dcp(tmp_path / "x", stages)
    assert set(open_checkpoint(tmp_path / "x").tensors) == {
        f"stage.{stage}.0.{name}" for stage in (0, 1) for name in ("weight", "bias")
    }
    other = {number: nn.Sequential(nn.Linear(*size)) for number, size in enumerate([(3, 4), (4, 2)])}
    load_dcp(tmp_path / "x", other)
    assert torch.equal(other[1][0].weight, stages[1][0].weight)
    whole = {0: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))}
    code, text = code_of(lambda: load_dcp(tmp_path / "x", whole))
    assert code == "PP937"
    assert "no tensor stage.0.2.weight" in text


@pytest.fixture
def saved(tmp_path):
    stages = stages_of([[0], [1]], [0, 1])
    optimizer = optimizer_of(stages)
    stages[1](stages[0](torch.arange(5))).sum().backward()
    optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_dcp(tmp_path / "state", stages, optimizer, extra={"step": 1})
    return tmp_path / "state"


def fresh(**changes):
    stages = stages_of([[0], [1]], [0, 1], seed=7)
    return stages, optimizer_of(stages, **changes)


def test_what_does_not_fit_is_refused_by_name(saved):
    stages, _ = fresh()
    stages[1].double()
    code, text = code_of(lambda: load_dcp(saved, stages))
    assert (code, "is float64 [11, 8], and" in text) == ("PP937", True), text
    stages, _ = fresh()
    _, text = code_of(lambda: load_dcp(saved, {0: stages[0]}))
    assert "has the tensor layers.1.down.weight (and 9 more), which no stage of any rank has" in text
    stages[1].more = nn.Linear(2, 2)
    assert "has no tensor more.weight" in code_of(lambda: load_dcp(saved, stages))[1]
    stages, _ = fresh()
    one_group = torch.optim.AdamW(list({id(p): p for s in stages.values() for p in s.parameters()}.values()))
    assert (
        "are in one group of the optimizer, and were saved with the weight_decay"
        in code_of(lambda: load_dcp(saved, stages, one_group))[1]
    )
    stray = torch.optim.SGD([nn.Parameter(torch.ones(3))])
    assert "a parameter [3] that no stage of this rank has" in code_of(lambda: load_dcp(saved, stages, stray))[1]


def test_a_state_without_optimizer_and_an_optimizer_without_steps(tmp_path, saved):
    stages, optimizer = fresh()
    save_dcp(tmp_path / "weights", stages)
    _, text = code_of(lambda: load_dcp(tmp_path / "weights", stages, optimizer))
    assert "has no optimizer state for embed.weight" in text
    save_dcp(tmp_path / "begin", stages, optimizer)
    other, later = fresh(lr=3.0)
    load_dcp(saved, other, later)
    assert later.state
    load_dcp(tmp_path / "begin", other, later)
    assert not later.state
    assert [group["lr"] for group in later.param_groups] == [0.01, 0.01]
    assert digests_of(other, later) == digests_of(stages, optimizer)


@pytest.mark.parametrize("make", ["sgd", "momentum", "adam", "tensor_lr", "adafactor"])
def test_other_optimizers(tmp_path, make):
    makers = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
        "tensor_lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.25)),
        "adafactor": lambda p: torch.optim.Adafactor(p),
    }
    ends = []
    for resumed in (False, True):
        stages = {0: nn.Linear(3, 4), 1: nn.Sequential(nn.Linear(4, 2))}
        for stage in stages.values():
            for parameter in stage.parameters():
                nn.init.constant_(parameter, 0.5 + resumed)
        optimizer = makers[make]([p for stage in stages.values() for p in stage.parameters()])
        if resumed:
            load_dcp(tmp_path / "x", stages, optimizer)
        for step in range(2 if resumed else 4):
            stages[1](stages[0](torch.full((2, 3), 1.0 + step % 2))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if not resumed and step == 1:
                save_dcp(tmp_path / "x", stages, optimizer)
        ends.append([p.detach().numpy().tobytes() for stage in stages.values() for p in stage.parameters()])
    assert ends[0] == ends[1]


def test_nothing_that_needs_a_pickle_to_be_executed_is_saved(tmp_path):
    stages, _ = fresh()
    code, text = code_of(lambda: save_dcp(tmp_path / "x", stages, extra={"sampler": object()}))
    assert (code, "sampler is a object" in text) == ("PP937", True)
    assert not (tmp_path / "x").exists()


class Evil:
    def __reduce__(self):
        return os.mkdir, (str(Evil.directory),)


def test_a_foreign_pickle_is_refused_and_not_executed(tmp_path, saved):
    Evil.directory = tmp_path / "executed"
    stages, optimizer = fresh()
    before = digests_of(stages, optimizer)
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    metadata.planner_data = Evil()
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    code, text = code_of(lambda: load_dcp(saved, stages, optimizer))
    assert (code, "names posix.mkdir, which no metadata of DCP has" in text) == ("PP936", True)
    import torch.distributed.checkpoint as dcp

    dcp.save({"pipeproof": {"info": Evil()}}, checkpoint_id=tmp_path / "evil", no_dist=True)
    code, text = code_of(lambda: load_dcp(tmp_path / "evil", stages))
    assert (code, "pipeproof.info cannot be read" in text) == ("PP936", True)
    assert not Evil.directory.exists()
    assert digests_of(stages, optimizer) == before


def test_damaged_files_are_refused_before_anything_changes(saved):
    stages, optimizer = fresh()
    before = digests_of(stages, optimizer)
    (file,) = saved.glob("*.distcp")
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    code, text = code_of(lambda: load_dcp(saved, stages, optimizer))
    assert (code, f"{file} is cut short: it has {len(content) - 1} bytes" in text) == ("PP936", True)
    file.unlink()
    assert f"{file} is missing; it holds" in code_of(lambda: load_dcp(saved, stages, optimizer))[1]
    assert digests_of(stages, optimizer) == before
    (saved / ".metadata").unlink()
    assert "is not a distributed checkpoint" in code_of(lambda: load_dcp(saved, stages, optimizer))[1]


def test_changed_elements_are_refused_before_anything_changes(saved):
    stages, optimizer = fresh()
    before = digests_of(stages, optimizer)
    held = open_checkpoint(saved).shards["optimizer.state.norm.weight.exp_avg"][0]
    content = bytearray(held.file.read_bytes())
    archive = content[held.start : held.start + held.archive.length]
    values = torch.load(io.BytesIO(archive), weights_only=True)
    content[content.index(values.numpy().tobytes(), held.start)] ^= 1
    held.file.write_bytes(content)
    code, text = code_of(lambda: load_dcp(saved, stages, optimizer))
    assert (
        code,
        "the archive of optimizer.state.norm.weight.exp_avg at byte" in text and "another CRC-32" in text,
    ) == ("PP936", True)
    assert digests_of(stages, optimizer) == before
    load_dcp(saved, stages, optimizer, verify=False)  # as PyTorch loads it


def test_pytorch_loads_it_and_it_loads_what_pytorch_saved(saved, tmp_path):
    """As in PyTorch's tutorial and in torchtitan: weights at the top, and the flattened state of the optimizer."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict as sd

    options = sd.StateDictOptions(flatten_optimizer_state_dict=True)
    saved_by, expected = stages_of([[0], [1]], [0, 1]), tensor_md5s(open_checkpoint(saved))
    model = nn.Module()
    model.embed, model.layers = (
        saved_by[0].embed,
        nn.ModuleDict({"0": saved_by[0].layers["0"], "1": saved_by[1].layers["1"]}),
    )
    model.norm = saved_by[1].norm
    optimizer = optimizer_of({0: model}, lr=3.0)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    content = sd.get_model_state_dict(model)
    content["optimizer"] = sd.get_optimizer_state_dict(model, optimizer, options=options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(content, checkpoint_id=saved, no_dist=True)
        sd.set_optimizer_state_dict(model, optimizer, content["optimizer"], options=options)
        assert {k: v for k, v in digests_of({0: model}, optimizer).items() if not k.startswith("lr ")} == expected
        assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.01]
        theirs = {**sd.get_model_state_dict(model)}
        theirs["optimizer"] = sd.get_optimizer_state_dict(model, optimizer, options=options)
        theirs["head.weight"] = theirs["embed.weight"]  # as a `state_dict` has a tied weight, under both names
        dcp.save(theirs, checkpoint_id=tmp_path / "theirs", no_dist=True)
    stages, resumed = fresh(lr=5.0)
    assert load_dcp(tmp_path / "theirs", stages, resumed) == {"rng_restored": False}
    loaded = digests_of(stages, resumed)
    assert {k: v for k, v in loaded.items() if not k.startswith("lr ")} == expected
    assert loaded["lr norm.weight"] == "[0.01, (0.8, 0.95), 0.0]"


@pytest.mark.parametrize("at", ["written", "exchanged"])
def test_a_killed_save_leaves_the_old_or_the_new_state(saved, at):
    stages, _ = fresh()
    child = os.fork()
    if not child:
        if at == "written":
            dcp_files.replace_directory = lambda *_: os._exit(9)
        else:
            dcp_files.shutil.rmtree = lambda path: os._exit(9) if path.name.endswith(".part") else None
        save_dcp(saved, stages, extra={"step": 2})
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert load_dcp(saved, fresh()[0])["step"] == (1 if at == "written" else 2)
    save_dcp(saved, stages, extra={"step": 3})
    assert load_dcp(saved, fresh()[0])["step"] == 3
    assert [path.name for path in saved.parent.iterdir()] == ["state"]


def test_a_file_system_that_cannot_exchange_directories(saved, monkeypatch):
    monkeypatch.setattr(dcp_files, "_exchange", lambda *_: False)
    save_dcp(saved, fresh()[0], extra={"step": 2})
    assert load_dcp(saved, fresh()[0])["step"] == 2
    saved.rename(saved.with_name(".state.old"))  # killed between the two renames
    with pytest.raises(PipeproofError) as caught:
        load_dcp(saved, fresh()[0])
    assert "a save was killed" in caught.value.findings[0].help


def test_another_directory_is_never_replaced(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("a")
    code, text = code_of(lambda: save_dcp(tmp_path / "notes", fresh()[0]))
    assert (code, "exists, and is not a distributed checkpoint" in text) == ("PP936", True)
    assert (tmp_path / "notes" / "a.txt").read_text() == "a"
