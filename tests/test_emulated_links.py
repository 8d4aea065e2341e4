"""Real groups over emulated links: what was fitted to some predicts the steps of others."""

import pytest
from emulated_links import EXCHANGES, STEPS, measure, median_error, outcomes
from namespaces import Link, why_no_shaping

FITTED = (Link(delay_seconds=1e-3, bits_per_second=1e8), Link(delay_seconds=3e-3, bits_per_second=2e8))
OTHER = Link(delay_seconds=2e-3, bits_per_second=1.5e8)


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.skipif(why_no_shaping() is not None, reason=str(why_no_shaping()))
def test_steps_at_held_out_ranks_and_over_a_link_never_fitted_are_predicted_within_a_tenth() -> None:
    groups = {2: EXCHANGES, 4: EXCHANGES, 3: STEPS}
    measured = {link: measure(link, groups, steps=5) for link in FITTED}
    measured[OTHER] = measure(OTHER, {3: STEPS, 5: STEPS}, steps=5)
    found = list(outcomes(measured, fitted_ranks=(2, 4)))
    assert len(found) == 4 * len(STEPS)
    for some in (found, [o for o in found if o.new_link], [o for o in found if not o.new_link]):
        assert median_error(some) < 0.10, [f"{o.ranks} ranks: {100 * o.error:+.0f} %" for o in some]
