"""A merged file has the SHA-256 of itself: any is changed in it is found before it is taken for anything."""

import hashlib
import json

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from pipeproof.cli.main import main
from pipeproof.state.array_files import CHECKSUM_KEY, EMPTY_CHECKSUM
from pipeproof.state.checkpoint import INDEX_KEY
from pipeproof.state.open_checkpoint import file_findings, open_checkpoint
from pipeproof.state.state_codes import StateError
from tests.state.reshard.plans import DENSE, files_of, reshard, state_of, write_plan


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A plan, a merged file of a whole state, and one of weights under other people's names."""
    root = tmp_path_factory.mktemp("sealed")
    plan = write_plan(root / "plan.yaml", "tp2", DENSE)
    source = state_of(plan, root / "saved")
    reshard(source, "-o", root / "whole.safetensors")
    reshard(source, "-o", root / "named.safetensors", "--names", "huggingface")
    return plan, root / "whole.safetensors", root / "named.safetensors"


def metadata_of(file):
    with safe_open(file, "np") as opened:
        return opened.metadata()


def said(*words, status):
    result = CliRunner().invoke(main, ["state", *map(str, words)])
    assert result.exit_code == status, result.output
    return result.output


def test_the_checksum_is_the_sha_256_of_the_file_with_dashes_in_its_place(made):
    for file in made[1:]:
        checksum, content = metadata_of(file)[CHECKSUM_KEY], file.read_bytes()
        assert content.count(checksum.encode()) == 1
        assert hashlib.sha256(content.replace(checksum.encode(), b"-" * 64)).hexdigest() == checksum
        assert not file_findings(file)
        assert "its file matches its own SHA-256" in said(file, "--verify", status=0)


def test_the_same_state_makes_the_same_bytes(made, tmp_path):
    plan, whole, _ = made
    reshard(whole, "--to", plan, "-o", tmp_path / "state")
    reshard(tmp_path / "state", "-o", tmp_path / "again.safetensors", "--jobs", 1)
    assert load_file(tmp_path / "again.safetensors").keys() == load_file(whole).keys()
    reshard(whole, "-o", tmp_path / "copy.safetensors")
    assert (tmp_path / "copy.safetensors").read_bytes() == whole.read_bytes()


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_a_flipped_bit_is_found_anywhere(made, tmp_path_factory, data):
    file = data.draw(st.sampled_from(made[1:]))
    content = bytearray(file.read_bytes())
    head = 8 + int.from_bytes(content[:8], "little")
    place = data.draw(st.one_of(st.integers(0, head - 1), st.integers(head, len(content) - 1)))
    key = content.index(CHECKSUM_KEY.encode())
    if key <= place < key + len(CHECKSUM_KEY):
        return  # then the file says nothing of itself, as those of other tools
    content[place] ^= 1 << data.draw(st.integers(0, 7))
    bad = tmp_path_factory.mktemp("bad") / "bad.safetensors"
    bad.write_bytes(content)
    (fault, *_) = file_findings(bad)
    assert fault.code == "PP920"
    assert str(bad) in fault.message


def test_a_changed_byte_ends_a_reshard_by_the_name_of_the_file(made, tmp_path):
    plan, whole, named = made
    for file, words in ((whole, ()), (named, ("--names", "huggingface"))):
        content = bytearray(file.read_bytes())
        content[-5] ^= 1
        bad = tmp_path / file.name
        bad.write_bytes(content)
        text = reshard(bad, "--to", plan, *words, "-o", tmp_path / f"{file.stem}_out", status=2)
        assert f"{bad} was changed: its SHA-256 is not the {metadata_of(file)[CHECKSUM_KEY][:12]}.." in text
        assert not (tmp_path / f"{file.stem}_out").exists()
        assert "1 fault" in said(bad, "--verify", status=1)


def test_a_file_without_a_checksum_is_taken_and_that_is_reported(made, tmp_path):
    plan, whole, _ = made
    weights = {name: array for name, array in load_file(whole).items() if not name.startswith("optimizer/")}
    bare, without_checksum = tmp_path / "bare.safetensors", tmp_path / "unsealed.safetensors"
    save_file(weights, bare)
    metadata = metadata_of(whole)
    del metadata[CHECKSUM_KEY]
    save_file(load_file(whole), without_checksum, metadata)
    for number, file in enumerate((bare, without_checksum)):
        text = reshard(file, "--to", plan, "-o", tmp_path / f"out{number}")
        assert f"{file} has no SHA-256 of its content: its bytes are not checked" in text
        assert "there is no SHA-256 of it" in said(file, "--verify", status=0)
    assert "no SHA-256" not in reshard(whole, "--to", plan, "-o", tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "out1")


def test_of_a_directory_each_file_is_compared_with_its_own(made, tmp_path):
    _, _, named = made
    arrays, (first, *rest) = load_file(named), sorted(load_file(named))
    save_file({first: arrays[first]}, tmp_path / "a.safetensors", {CHECKSUM_KEY: "0" * 64})
    save_file({name: arrays[name] for name in rest}, tmp_path / "b.safetensors")
    weight_map = {name: "a.safetensors" if name == first else "b.safetensors" for name in arrays}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (fault,) = file_findings(tmp_path)
    assert "a.safetensors was changed" in fault.message
    save_file({first: arrays[first]}, tmp_path / "a.safetensors")
    assert "there is no SHA-256 of 2 of them" in said(tmp_path, "--verify", status=0)


@pytest.mark.parametrize("num_written", [0, 1, 63])
def test_a_file_whose_checksum_was_never_written_is_unfinished(made, tmp_path, num_written):
    content = made[1].read_bytes()
    checksum = metadata_of(made[1])[CHECKSUM_KEY]
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(
        content.replace(checksum.encode(), (checksum[:num_written] + EMPTY_CHECKSUM[num_written:]).encode())
    )
    with pytest.raises(StateError, match="was not written to its end"):
        open_checkpoint(bad)


def test_an_embedded_index_that_was_changed_is_refused_when_the_file_is_opened(made, tmp_path):
    arrays, metadata = load_file(made[1]), metadata_of(made[1])
    del metadata[CHECKSUM_KEY]
    metadata[INDEX_KEY] = metadata[INDEX_KEY].replace('"steps_done":3', '"steps_done":4')
    bad = tmp_path / "bad.safetensors"
    save_file(arrays, bad, metadata)
    with pytest.raises(StateError, match=r"in the metadata of .* was changed: its SHA-256"):
        open_checkpoint(bad)
    index = json.loads(metadata[INDEX_KEY])
    del index["sha256"]
    save_file(arrays, bad, {**metadata, INDEX_KEY: json.dumps(index)})
    assert open_checkpoint(bad).index.steps_done == 4
