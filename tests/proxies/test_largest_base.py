"""The largest Base network, 76 million parameters, in float32: every proxy has a valid score there.

`test_dss` and `test_per_sample` have those that need more than a plain pass; here are the others, on small images.
"""

from __future__ import annotations

import numpy as np
import pytest

import lightning_tas as tas

NAMES = ["grad_norm", "plain", "fisher", "grasp", "naswot", "zen", "meco", "length_distortion", "snip_norm"]


@pytest.mark.slow
def test_scores_are_finite_and_valid() -> None:
    space = tas.space("autoformer_base")
    arch = space.largest()
    options = {"zen": {"repeat": 1}, "length_distortion": {"points": 8, "repeat": 1}}
    found = tas.score_many(NAMES, None, [arch], batch_size=2, build={"img_size": 32}, options=options)
    for name in NAMES:
        value = found.value(name)[0]
        assert found.valid(name)[0] and np.isfinite(value), (name, found.reason(name))
        assert np.finfo(np.float32).tiny < abs(value) < np.finfo(np.float32).max, name
    assert found.value("snip_norm")[0] == pytest.approx(arch.depth), "it is itself the largest of its space"
