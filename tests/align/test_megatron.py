"""Megatron-Core's GPT next to transformers' Llama, where both are installed."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.needs_torch, pytest.mark.needs("transformers")]

SCRIPT = Path(__file__).parents[2] / "validation" / "pages" / "align_megatron.py"


def test_all_tensors_are_equal_within_rounding_and_a_halved_gradient_is_named():
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    result = subprocess.run([sys.executable, SCRIPT], check=False, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
