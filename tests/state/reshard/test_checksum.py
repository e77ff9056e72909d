"""Merged files of equal content are equal; their SHA-256, step and plan are in a provenance file next to them."""

import hashlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file

from pipeproof.state.open_checkpoint import file_findings, open_checkpoint
from pipeproof.state.state_codes import StateError
from pipeproof.state.state_index import provenance_file
from tests.cli.commands import printed
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


def provenance_of(file):
    return json.loads(provenance_file(file).read_text())


def copied(file, directory):
    for path in (file, provenance_file(file)):
        (directory / path.name).write_bytes(path.read_bytes())
    return directory / file.name


def test_merged_files_of_one_state_have_one_md5_wherever_it_was(tmp_path):
    """Twelve experts on pp 2 x ep 2, on pp 2 x tp 2 with sequence parallel, on pp 4, and back."""
    names = ("ep2_pp2", "tp2_sp_pp2", "pp4")
    plans = {name: write_plan(tmp_path / f"{name}.yaml", name) for name in names}
    place, places = state_of(plans["ep2_pp2"], tmp_path / "saved"), []
    for number, name in enumerate((*names[1:], names[0])):
        places.append(place)
        place = tmp_path / f"on_{number}"
        reshard(places[-1], "--to", plans[name], "-o", place)
    digests, origins = set(), set()
    for number, source in enumerate([*places, place]):
        merged = tmp_path / f"merged{number}.safetensors"
        reshard(source, "-o", merged)
        digests.add(hashlib.md5(merged.read_bytes()).hexdigest())
        origins.add(provenance_of(merged)["digest"])
        with safe_open(merged, "np") as opened:
            assert opened.metadata() == {"format": "pt"}
    assert len(digests) == 1
    assert len(origins) == 3
    assert files_of(place) == files_of(places[0])


def test_an_element_of_another_value_is_another_md5(tmp_path):
    plan = write_plan(tmp_path / "plan.yaml", "tp2", DENSE)
    for steps in (3, 4):
        reshard(state_of(plan, tmp_path / "saved", steps), "-o", tmp_path / f"{steps}.safetensors")
    first, second = (load_file(tmp_path / f"{steps}.safetensors") for steps in (3, 4))
    assert first.keys() == second.keys()
    assert (tmp_path / "3.safetensors").read_bytes() != (tmp_path / "4.safetensors").read_bytes()


@pytest.mark.parametrize("number", [1, 2])
@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_a_flipped_bit_is_found_anywhere(made, tmp_path_factory, number, data):
    bad = copied(made[number], tmp_path_factory.mktemp("bad"))
    content = bytearray(bad.read_bytes())
    head = 8 + int.from_bytes(content[:8], "little")
    place = data.draw(st.one_of(st.integers(0, head - 1), st.integers(head, len(content) - 1)))
    content[place] ^= 1 << data.draw(st.integers(0, 7))
    bad.write_bytes(content)
    (fault, *_) = file_findings(bad)
    assert fault.code == "PP920"
    assert str(bad) in fault.message


def test_a_changed_byte_ends_a_reshard_by_the_name_of_the_file(made, tmp_path):
    plan, whole, named = made
    for file, words in ((whole, ()), (named, ("--names", "huggingface"))):
        bad = copied(file, tmp_path)
        content = bytearray(bad.read_bytes())
        content[-5] ^= 1
        bad.write_bytes(content)
        text = reshard(bad, "--to", plan, *words, "-o", tmp_path / f"{file.stem}_out", status=2)
        assert f"{bad} was changed: its SHA-256 is not the {provenance_of(file)['files'][0]['sha256'][:12]}.." in text
        assert not (tmp_path / f"{file.stem}_out").exists()
        assert "1 fault" in printed("state", "show", bad, "--verify", status=1)


def test_a_file_without_its_provenance_is_weights_and_that_is_reported(made, tmp_path):
    plan, whole, _ = made
    bare = tmp_path / "bare.safetensors"
    bare.write_bytes(whole.read_bytes())
    text = reshard(bare, "--to", plan, "-o", tmp_path / "out")
    assert f"{bare} has no step number (there is no bare.safetensors.provenance.json next to it)" in text
    assert f"{bare} has no SHA-256 of its content: its bytes are not checked" in text
    assert "there is no SHA-256 of it" in printed("state", "show", bare, "--verify")
    assert "have the same type, shape and bits" in printed("state", "diff", whole, bare)
    text = reshard(whole, "--to", plan, "-o", tmp_path / "full")
    assert "SHA-256" not in text
    assert "step number" not in text
    assert json.loads((tmp_path / "full" / "index.json").read_text())["steps_done"] == 3
    reshard(whole, "--to", plan, "--weights-only", "-o", tmp_path / "weights")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "weights")


def test_provenance_that_is_of_another_file_or_was_changed_is_refused_when_the_file_is_opened(made, tmp_path):
    _, whole, named = made
    bad = copied(whole, tmp_path)
    provenance_file(bad).write_bytes(provenance_file(named).read_bytes())
    with pytest.raises(
        StateError, match=r"whole.safetensors has \d+ bytes, and \d+ in whole.safetensors.provenance.json"
    ):
        open_checkpoint(bad)
    text = provenance_file(whole).read_text().replace('"steps_done": 3', '"steps_done": 4')
    provenance_file(bad).write_text(text)
    with pytest.raises(StateError, match=r"provenance.json was changed: its SHA-256"):
        open_checkpoint(bad)
    index = json.loads(text)
    del index["sha256"]
    provenance_file(bad).write_text(json.dumps(index))
    assert open_checkpoint(bad).index.steps_done == 4
    provenance_file(bad).write_text(json.dumps({**index, "files": []}))
    with pytest.raises(StateError, match="must describe one file, and lists 0"):
        open_checkpoint(bad)
