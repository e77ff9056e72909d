"""The goldens for PyTorch's stages equal the results of Paddle's unpartitioned reference."""

import numpy as np
import pytest

from tests.stages.torch.features import FEATURES, GOLDENS, assert_kept, golden_of, kept_of, make_plan

pytestmark = pytest.mark.needs_paddle


@pytest.mark.parametrize("feature", FEATURES)
def test_the_golden_is_what_paddle_makes(feature):
    from pipeproof.stages.reference.unpartitioned import run_unpartitioned

    with np.load(golden_of(feature)) as golden:
        assert_kept(kept_of(run_unpartitioned(make_plan(feature))), dict(golden))  # made on another processor


def test_no_golden_is_of_a_feature_that_is_gone():
    assert {path.name for path in GOLDENS.iterdir()} == {golden_of(feature).name for feature in FEATURES}
