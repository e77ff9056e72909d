"""Cases of programs of several processes: each is a function, which compares a pipeline with the unpartitioned model.

A program runs all of its cases in one start of its processes.
"""

import functools
import sys

import pytest

from tests.train.launch import launch, run

pytestmark = pytest.mark.needs_torch

CASES = {
    "edges": ["unet", "residuals", "direct", "wrong"],
    "gradients_and_state": [
        "unused", "unused_copies", "unused_later", "untrained", "tied", "state", "reused", "remembered",
    ],
    "losses": ["tokens", "data_ranks", "refusals"],
    "stage_inputs": ["structured", "uneven", "inside", "named", "mirrored", "frozen_ties", "sparse", "lengths"],
    "step_contract": ["random_arguments", "block_masks", "collators_dicts", "other_rows"],
}  # fmt: skip
"""Cases of programs of two processes; the first lines of a program describe them."""


def of_programs(programs):
    """Parameters of a test: the program and the case of each."""
    return pytest.mark.parametrize(
        ("program", "case"), [(program, case) for program, cases in programs.items() for case in cases]
    )


@functools.cache
def output_of(program, num_processes, *cases):
    return launch(f"{program}.py", num_processes, *cases, timeout=600).stdout


def require_done(output, num_processes, case):
    """Fail with the output unless every rank has come to the end of a case."""
    for rank in range(num_processes):
        assert f"{case} done on rank {rank}\n" in output, output


@of_programs(CASES)
def test_a_case_on_two_ranks(program, case):
    require_done(output_of(program, 2), 2, case)


ENCODER_CASES = ("trained", "frozen", "tokens", "wrong")


@pytest.mark.parametrize("case", ENCODER_CASES)
def test_an_encoder_before_a_language_model_with_two_ranks_or_two_replicas(case):
    require_done(output_of("vision_language", 3, *ENCODER_CASES), 3, case)


def test_replicas_of_an_encoder_on_the_ranks_of_a_language_model():
    require_done(output_of("vision_language", 2, "shared"), 2, "shared")


@pytest.mark.slow
@pytest.mark.parametrize(("num_processes", "case"), [(3, "edges")] + [
    (num, case) for num in (4, 5) for case in (*ENCODER_CASES, "edges")])  # fmt: skip
def test_two_replicas_of_the_encoder_or_of_a_language_model_with_two_ranks(num_processes, case):
    cases = ["edges"] if num_processes == 3 else [*ENCODER_CASES, "edges"]
    require_done(output_of("vision_language", num_processes, *cases), num_processes, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES["edges"])
def test_edges_have_all_bits_on_four_ranks(case):
    require_done(output_of("edges", 4), 4, case)


@pytest.mark.needs("transformers")
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", ["t5", "bart", "t5_direct"])
def test_an_encoder_and_a_decoder_of_hugging_face_have_all_bits(case, num_ranks):
    require_done(output_of("encoder_decoder", num_ranks), num_ranks, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["eager", "left", "failed", "inductor"])
def test_stages_as_graphs(case):
    require_done(output_of("graph_stages", 2, case), 2, case)


@pytest.mark.needs("transformers")
@pytest.mark.parametrize("case", ["shares", "means"])
def test_a_causal_lm_divides_by_the_labels_of_the_whole_step_as_transformers_does(case):
    require_done(output_of("losses", 2), 2, case)


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_no_thread_of_gloo_is_left_when_the_script_destroys_its_groups(tmp_path):
    """A pipeline that is not closed keeps no group alive: a thread of gloo at the exit may abort the process."""
    assert run("ended_groups.py", 2, tmp_path).stdout.count("has no thread of gloo") == 2


@pytest.mark.slow  # two processes start PyTorch
def test_pairs_that_alternate_at_overlap_points_have_the_bits_of_whole_ones():
    run("overlap_points.py", 2, timeout=120)


def test_outside_of_a_pair_an_overlap_point_only_waits():
    from pipeproof.torch import overlap_point

    waited = []

    class Work:
        def wait(self):
            waited.append(True)

    overlap_point(Work())
    assert waited == [True]
