"""Shares of a step's terms, and their correlations with errors."""

import pytest
from click.testing import CliRunner

from validation.board.__main__ import measurements
from validation.board.accuracy_board import MEASUREMENTS, Predictor, read_measurements
from validation.board.measurement import Quantity
from validation.board.terms import Term, correlations


def terms_of_first(name, group):
    (file,), _ = read_measurements([MEASUREMENTS / name])
    row = next(row for row in file.rows if row.plan is not None and row.group.startswith(group))
    return Predictor().terms(row)


def test_the_terms_of_a_step_add_up_to_it():
    terms = terms_of_first("mlperf_llama405b_steps.csv", "405B on H100")
    assert sum(terms.values()) == pytest.approx(1)
    assert max(terms, key=terms.get) is Term.PRODUCTS
    assert terms[Term.LAUNCHES] == terms[Term.EXCHANGE] == 0  # replayed, and without experts


def test_the_host_bounds_small_models_and_exchanges_are_a_term_of_experts():
    small = terms_of_first("megatron_goldens.json", "Megatron-LM, dense, h100, step")
    assert max(small, key=small.get) is Term.LAUNCHES
    assert terms_of_first("megatron_bridge_perf.csv", "Megatron-Bridge, MoE")[Term.EXCHANGE] > 0


def test_a_peak_of_memory_has_no_terms():
    (file,), _ = read_measurements([MEASUREMENTS / "megatron_goldens.json"])
    row = next(row for row in file.rows if row.plan is not None and row.quantity is Quantity.ALLOCATED)
    assert Predictor().terms(row) is None


def test_correlations_by_hand():
    terms = [dict.fromkeys(Term, 0.0) | {Term.PRODUCTS: share, Term.MEMORY: 1 - share} for share in (0.2, 0.4, 0.9)]
    found = correlations(terms, [0.1, 0.2, 0.45])
    assert found[Term.PRODUCTS] == (pytest.approx(0.5), pytest.approx(1))
    assert found[Term.MEMORY] == (pytest.approx(0.5), pytest.approx(-1))
    assert found[Term.EXCHANGE] == (0, 0)  # constant


def test_the_board_prints_terms_and_coverage():
    done = CliRunner().invoke(
        measurements, [str(MEASUREMENTS / "mlperf_llama405b_steps.csv"), "--terms"], catch_exceptions=False
    )
    assert done.exit_code == 0
    assert "mean share of a step" in done.stdout
    assert "in their 80 % interval" in done.stdout
