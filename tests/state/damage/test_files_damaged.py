"""A file of a state that anything was done to is refused by its name, by everybody; no wrong value is ever taken."""

import json
import os
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cli.commands import invoke
from tests.state.damage.readers import READERS, opened_or_refused, refusal_of
from tests.state.runs import MOE, plan_of
from tests.state.tiny import values, write_state

FILES = [f"rank{rank}.safetensors" for rank in range(4)]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    at = plan_of(
        steps=9, topology={"ep": 2}, model={"num_layers": 2, "vocab_size": 8, "moe": MOE, "tied_embedding": True}
    )
    root = tmp_path_factory.mktemp("made")
    directory = write_state(at, root / "good", 2)
    return at, directory, values(at.plan, 2), root / "bad"


def fresh(made):
    _, good, _, bad = made
    if bad.is_symlink() or bad.is_file():
        bad.unlink()
    shutil.rmtree(bad, ignore_errors=True)
    shutil.copytree(good, bad)
    return bad


def require_refused(made, *names):
    """By every judge, and by one of the names in the message."""
    at, _, whole, bad = made
    for reader in READERS:
        findings = refusal_of(reader, at, bad, whole, 2)
        assert findings, reader
        assert any(name in finding.message for finding in findings for name in names), findings
    opened_or_refused(bad)


def test_a_state_that_nothing_was_done_to_is_taken_by_all(made):
    at, _, whole, _ = made
    bad = fresh(made)
    assert [refusal_of(reader, at, bad, whole, 2) for reader in READERS] == [()] * len(READERS)


@settings(deadline=None, max_examples=25)
@given(name=st.sampled_from(FILES), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), head=st.booleans())
def test_a_flipped_bit_is_found(made, name, place, bit, head):
    file = fresh(made) / name
    content = bytearray(file.read_bytes())
    end = 8 + int.from_bytes(content[:8], "little") if head else len(content)
    content[int(place * end)] ^= 1 << bit
    file.write_bytes(content)
    require_refused(made, name)


@settings(deadline=None, max_examples=25)
@given(name=st.sampled_from(FILES), part=st.floats(0, 1, exclude_max=True), more=st.binary(max_size=9))
def test_a_file_that_was_cut_or_has_more_is_found(made, name, part, more):
    file = fresh(made) / name
    content = file.read_bytes()
    file.write_bytes(content + more if more else content[: int(part * len(content))])
    require_refused(made, name)


@pytest.mark.parametrize("instead", ["nothing", "directory", "pipe", "loop", "dangling", "zeros", "endless", "other"])
@pytest.mark.parametrize("name", [FILES[1], "index.json"])
def test_what_is_in_the_place_of_a_file_is_no_state(made, name, instead):
    file = fresh(made) / name
    size = file.stat().st_size
    file.unlink()
    match instead:
        case "directory":
            file.mkdir()
        case "pipe":
            os.mkfifo(file)
        case "loop":
            file.symlink_to(file)
        case "dangling":
            file.symlink_to(file.parent / "gone")
        case "zeros":
            file.write_bytes(bytes(size))
        case "endless":
            file.symlink_to("/dev/zero")
        case "other":
            file.symlink_to(file.parent / FILES[2])
    require_refused(made, name, "there is no state at")


@settings(deadline=None, max_examples=20)
@given(names=st.lists(st.sampled_from(FILES), min_size=2, max_size=2, unique=True))
def test_files_that_changed_places_are_found(made, names):
    one, other = (fresh(made) / name for name in names)
    one, other = fresh(made) / names[0], one.parent / names[1]
    one.rename(one.parent / "between")
    other.rename(one)
    (one.parent / "between").rename(other)
    require_refused(made, *names)


HUGE = st.sampled_from([2**31, 2**63 - 1, 2**64, 10**30, -1, 1.5, "8", None, True])


def rewrite_header(file, change):
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    table = json.loads(content[8 : 8 + length])
    table = change(table) or table
    text = json.dumps(table).encode() if isinstance(table, dict) else table
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


@settings(deadline=None, max_examples=30)
@given(name=st.sampled_from(FILES), huge=HUGE, key=st.sampled_from(["shape", "data_offsets", "dtype"]), data=st.data())
def test_a_header_that_claims_what_cannot_be_is_refused_and_not_believed(made, name, huge, key, data):
    def change(table):
        tensor = data.draw(st.sampled_from(sorted(table)))
        if key == "dtype" or not table[tensor][key] or data.draw(st.booleans(), label="all of it"):
            table[tensor][key] = huge
        else:
            table[tensor][key][-1] = huge

    rewrite_header(fresh(made) / name, change)
    require_refused(made, name)


@settings(deadline=None, max_examples=12)
@given(
    name=st.sampled_from(FILES), place=st.floats(0, 1, exclude_max=True), how=st.sampled_from(["flip", "cut", "other"])
)
def test_a_reshard_of_a_damaged_state_makes_nothing_and_names_the_file(made, name, place, how):
    bad = fresh(made)
    file, out = bad / name, bad.parent / "out.safetensors"
    content = bytearray(file.read_bytes())
    match how:
        case "flip":
            content[int(place * len(content))] ^= 1
        case "cut":
            content = content[: int(place * len(content))]
        case "other":
            content = (bad / FILES[name == FILES[0]]).read_bytes()
    file.write_bytes(content)
    result = invoke("state", "reshard", bad, "-o", out)
    assert result.exit_code == 2, result.output
    assert name in result.output
    assert not out.exists()
    shutil.rmtree(bad.parent / f".{out.name}.reshard", ignore_errors=True)
