"""Pipelines of Paddle's semi-automatic parallelism: their plan, their messages, and the bits of their gradients."""

import pytest

from pipeproof.interop.traces import check_log
from pipeproof.specs.load_plan import load_plan
from tests.train.paddle_ranks import found_by

pytestmark = pytest.mark.needs_paddle


def ranks_of(tmp_path, kind):
    return found_by(tmp_path, "semi_auto.py", 2, kind, tmp_path / "logs")


def test_fthenb_has_the_messages_of_its_plan_and_the_bits_of_a_training_by_it(tmp_path):
    found = ranks_of(tmp_path, "gpipe")
    for of_rank in found:
        assert "call plan_of_schedule after the first step" in of_rank["early"]
        assert of_rank["verdict"] == "proved"
        assert of_rank["theirs"] == of_rank["ours"]
    assert len(found[0]["theirs"]) == len(found[1]["theirs"]) == 6
    assert found[1]["losses"][0] == found[1]["losses"][1] != []
    layers = found[0]["plan"]["model"]["layers"]
    assert [layer.get("out") for layer in layers] == [
        [{"shape": ["b", 8], "dtype": "float32", "gradient": True}],
        None,
    ]
    assert not check_log(tmp_path / "logs", plan=load_plan(tmp_path / "found.yaml")).findings


def test_vpp_has_the_order_of_its_plan(tmp_path):
    for of_rank in ranks_of(tmp_path, "interleaved"):
        assert of_rank["order"] == of_rank["planned"] != []
        assert of_rank["plan"]["schedule"]["num_chunks"] == 2


@pytest.mark.slow
def test_1f1b_deadlocks_on_paddles_gloo_and_the_recording_shows_both_sends(tmp_path):
    """Both ranks send in their first batch, and Paddle's own gloo returns from a send when it has been received."""
    assert all("TIMEOUT" in of_rank["error"] for of_rank in ranks_of(tmp_path, "1f1b"))
    first = check_log(tmp_path / "logs").findings[0]
    assert (first.code, [op.op[:9] for op in first.witness.ops]) == ("PP931", ["send 0->1", "send 1->0"])
