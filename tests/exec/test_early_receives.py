"""A plan whose receives are posted early runs, and is equal to the reference bit for bit."""

import pytest

from tests.exec.processes import bitwise_report
from tests.plans import plan_dict

pytestmark = pytest.mark.needs_paddle

PLAN = {
    "topology": {"pp": 2, "tp": 2},
    "schedule": {"kind": "interleaved", "num_chunks": 2},
    "transport": {"forward": "partial", "backward": "partial", "recv_order": "prefetch_one"},
}


@pytest.mark.slow
def test_two_chunks_in_slices_match_the_reference_bit_for_bit(tmp_path):
    report = bitwise_report(tmp_path, plan_dict(**PLAN))
    assert report["verified"]
    assert all(gradient["md5"] == gradient["reference_md5"] for gradient in report["gradients"])
