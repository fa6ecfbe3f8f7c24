import os
from dataclasses import replace

import pytest

from cluster.autoscale.config import AutoscaleConfig
from cluster.config import Config
from cluster.llm.background import single_worker_config


@pytest.mark.parametrize(
    "config", [Config(num_workers=8), Config(autoscale=AutoscaleConfig(max_workers=8))]
)
def test_single_worker_gets_all_cores_of_configured_cluster(config: Config) -> None:
    threads = single_worker_config(config).worker.num_threads

    assert threads == len(os.sched_getaffinity(0))


def test_single_worker_keeps_configured_number_of_threads() -> None:
    config = Config()
    config = replace(config, worker=replace(config.worker, num_threads=3))

    assert single_worker_config(config).worker.num_threads == 3
