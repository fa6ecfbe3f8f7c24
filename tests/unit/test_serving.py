"""What `everlift up` says of the cluster that it has started."""

from __future__ import annotations

import pytest

from cluster.autoscale.config import AutoscaleConfig
from cluster.config import Config
from cluster.serving import workers


@pytest.mark.parametrize(
    "config, words",
    [
        (Config(num_workers=1), "1 worker"),
        (Config(num_workers=2), "2 workers"),
        (
            Config(autoscale=AutoscaleConfig(min_workers=0, max_workers=3)),
            "0 to 3 workers, as its queue needs them",
        ),
    ],
)
def test_how_many_workers_there_are_is_said(config: Config, words: str) -> None:
    assert workers(config) == words
