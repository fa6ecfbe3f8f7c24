"""Property tests of the engine with new examples until the soak's duration has passed."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.property import test_worker_engine as properties
from tests.soak.duration import rounds

pytestmark = [pytest.mark.soak, pytest.mark.timeout(0)]
_EXAMPLES = 500


@pytest.mark.parametrize(
    "test",
    [
        properties.test_engine_gives_each_sequence_exactly_its_tokens,
        properties.test_engine_makes_same_plans_from_same_log,
    ],
)
def test_engine_properties_hold_in_many_histories(test) -> None:  # type: ignore[no-untyped-def]
    many = settings(
        max_examples=_EXAMPLES,
        database=None,
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    everything = given(properties.bounds, properties.crowds, properties.events)
    for number in rounds():
        many(seed(number)(everything(test.hypothesis.inner_test)))()
    print(f"\n{(number + 1) * _EXAMPLES} histories")
