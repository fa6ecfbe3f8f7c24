"""Output of `everlift build`: it has the given settings, and Serve can read it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import Config, load
from cluster.errors import ClusterFailed
from cluster.ray import build
from cluster.ray.build import application, check_shown, serve_yaml
from cluster.ray.deployments import RUN_TIME_SETTINGS
from cluster.ray.ray_cluster import _placement, _rank_resources, _strategy
from everlift.errors import SettingsError
from tests.support.chart import all_settings

EVERLIFT = Path(sys.executable).with_name("everlift")
SOME = [
    "num_routers=2",
    "num_workers=3",
    "router_resource=everlift_router",
    "chaos=true",
    "log_level=debug",
    "router.host=0.0.0.0",
    "router.max_queued=7",
    "worker.tensor_parallel=2",
    "worker.device=cuda",
    "worker.fake.step_time=0.25",
    "worker.speculation.num_draft_tokens=2",
    "ledger.durability_class=always",
    "ledger.retention=60",
    "autoscale.max_workers=8",
    "autoscale.min_workers=0",
    "model=fake",
    "state_dir=/var/lib/everlift",
]

SHAPE = ["model=fake", "worker.max_num_seqs=9"]


def built(config: Config) -> dict[str, Any]:
    [application] = yaml.safe_load(serve_yaml(config))["applications"]
    return dict(application)


@given(st.sets(st.sampled_from(SOME)))
def test_build_output_loads_as_the_same_config(assignments: set[str]) -> None:
    if "autoscale.min_workers=0" in assignments:
        assignments.add("autoscale.max_workers=8")
    if "autoscale.max_workers=8" in assignments:
        assignments.discard("num_workers=3")
    config = load(None, {}, sorted(assignments))
    assert load(None, {}, options=all_settings(built(config))) == config


MODELS = [
    "models.small.model=org/small",
    "models.small.worker.max_num_seqs=256",
    "models.small.worker.num_blocks=3",
    "models.small.num_workers=2",
    "models.small.served_model_names=s",
    "models.small.tool_format=auto",
    "models.x.model=org/x",
    "models.x.adapters=a=org/a",
    "models.x.autoscale.max_workers=5",
    "models.x.autoscale.ttft_target=2",
    "worker.max_num_seqs=9",
    "router.tool_format=hermes",
    "autoscale.ttft_target=7",
    "chaos=true",
]


@given(st.sets(st.sampled_from(MODELS)))
def test_build_output_loads_with_the_same_models(assignments: set[str]) -> None:
    named = {f"models.{name}.model=org/{name}" for name in ("small", "x")}
    config = load(None, {}, sorted(assignments | named))
    application = built(config)
    assert build._divided(application["args"])[1] == []
    assert load(None, {}, options=all_settings(application)) == config


def test_build_writes_only_settings_that_models_do_not_inherit() -> None:
    some = ["worker.max_num_seqs=9", "models.small.worker.dtype=float32", MODELS[0]]
    application = built(load(None, {}, ["model=fake", *some]))
    assert application["args"]["models"] == {
        "small": {"model": "org/small", "worker": {"dtype": "float32"}}
    }
    names = [each["name"] for each in application["deployments"]]
    assert names == ["router", "worker", "worker-small"]


def test_build_autoscaler_of_each_model_has_its_name() -> None:
    scaled = ["autoscale.max_workers=2", "models.small.autoscale.max_workers=3", MODELS[0]]
    _, *workers = built(load(None, {}, ["model=fake", *scaled]))["deployments"]
    bounds = [each["autoscaling_config"] for each in workers]
    assert [each["policy"]["policy_kwargs"]["model"] for each in bounds] == ["fake", "org/small"]
    assert [each["max_replicas"] for each in bounds] == [2, 3]


@pytest.mark.parametrize(
    "other",
    [
        ["num_routers=5"],
        ["num_workers=7"],
        ["log_level=debug"],
        ["router.order=shortest", "router.max_queued=9", "router.fair_share=false"],
        ["models.small.num_workers=3"],
        ["models.small.autoscale.ttft_target=3"],
    ],
)
def test_build_keeps_run_time_settings_out_of_args(other: list[str]) -> None:
    shape = [*SHAPE, MODELS[0]]
    before, after = built(load(None, {}, shape)), built(load(None, {}, [*shape, *other]))
    assert before["args"] == after["args"]
    assert before["deployments"] != after["deployments"]


@pytest.mark.filterwarnings("ignore")  # warnings of Serve
@pytest.mark.parametrize(
    "other",
    [
        "autoscale.max_workers=9",
        "autoscale.min_workers=2",
        "autoscale.ttft_target=9",
        "models.small.autoscale.max_workers=9",
        "models.small.autoscale.ttft_target=9",
    ],
)
def test_build_autoscaler_bounds_keep_the_code_version(other: str) -> None:
    from ray.serve._private.deploy_utils import get_app_code_version
    from ray.serve.schema import ServeApplicationSchema

    scaled = [*SHAPE, "autoscale.max_workers=4", "models.small.autoscale.max_workers=4", MODELS[0]]
    before, after = (
        ServeApplicationSchema.model_validate(built(load(None, {}, assignments)))
        for assignments in (scaled, [*scaled, other])
    )
    assert before != after
    assert get_app_code_version(before) == get_app_code_version(after)


@pytest.mark.parametrize("name", RUN_TIME_SETTINGS)
def test_application_rejects_args_of_deployments(name: str) -> None:
    *sections, key = name.replace("*", "small").split(".")
    args: dict[str, Any] = {key: {"ttft_target": 1} if key == "autoscale" else 1}
    for section in reversed(sections):
        args = {section: args}
    path = name.replace("*", "small")
    with pytest.raises(SettingsError, match=f"{path}: must be set in `deployments`"):
        application({"model": "fake", **args})


def test_build_writes_only_changed_settings() -> None:
    assert built(load(None, {}, ["model=fake", "worker.max_num_seqs=9"]))["args"] == {
        "model": "fake",
        "worker": {"max_num_seqs": 9},
    }


@pytest.mark.filterwarnings("ignore")  # warnings of Serve
def test_build_output_is_valid_for_serve() -> None:
    from ray.serve.schema import ServeDeploySchema

    [application] = ServeDeploySchema.model_validate(
        yaml.safe_load(serve_yaml(load(None, {}, ["model=fake"])))
    ).applications
    assert (application.import_path, application.name) == (
        "cluster.ray.build:application",
        "everlift",
    )


def test_build_refuses_to_write_a_password() -> None:
    config = load(None, {}, ["ledger.url=redis://user:hidden@here:6379/0"])
    with pytest.raises(SettingsError, match=r"ledger\.url: .*EVERLIFT_LEDGER__URL") as caught:
        serve_yaml(config)
    assert "hidden" not in str(caught.value)
    with pytest.raises(SettingsError):
        check_shown(config)


def test_build_command_merges_file_flags_and_environment(tmp_path: Path) -> None:
    settings_file = tmp_path / "cluster.yaml"
    settings_file.write_text("worker: {max_num_seqs: 9}\n")
    built = subprocess.run(
        [EVERLIFT, "build", "--config", settings_file, "--set", "chaos=yes"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ
        | {"EVERLIFT_NUM_ROUTERS": "2", "EVERLIFT_LEDGER__URL": "redis://user:hidden@here:6379/0"},
    )
    [application] = yaml.safe_load(built.stdout)["applications"]
    assert application["args"]["worker"] == {"max_num_seqs": 9}
    assert application["args"]["chaos"] is True
    assert application["deployments"][0]["num_replicas"] == 2


@pytest.mark.parametrize(
    ("device", "nodes", "gpus"),
    [
        ("auto", [{"CPU": 4.0}], 0),
        ("auto", [{"CPU": 4.0}, {"CPU": 4.0, "GPU": 8.0}], 1),
        ("cuda", [{"CPU": 4.0}], 1),
        ("cpu", [{"CPU": 4.0, "GPU": 8.0}], 0),
    ],
)
def test_rank_resources_include_a_gpu_if_wanted(
    device: str, nodes: list[dict[str, float]], gpus: int
) -> None:
    [group] = load(None, {}, [f"worker.device={device}"]).groups
    assert _rank_resources(group, nodes, 2).get("GPU", 0) == gpus


def test_ranks_of_a_model_take_its_own_resource() -> None:
    some = ["models.small.worker_resource=small", MODELS[0]]
    resources = [_rank_resources(group, [], 2) for group in load(None, {}, some).groups]
    assert resources == [{"CPU": 2}, {"CPU": 2, "small": 1}]


@pytest.mark.parametrize(
    ("nodes", "strategy"),
    [
        ([{"CPU": 8.0, "GPU": 4.0}], "STRICT_PACK"),
        ([{"CPU": 8.0, "GPU": 2.0}, {"CPU": 8.0, "GPU": 2.0}], "PACK"),
        # The only node is the head: nodes with GPUs are added on demand.
        ([{"CPU": 8.0}], "STRICT_PACK"),
    ],
)
def test_placement_strategy_packs_ranks_on_a_large_node(
    nodes: list[dict[str, float]], strategy: str
) -> None:
    assert _strategy(nodes, {"CPU": 1.0, "GPU": 1.0}, 4) == strategy


VLLM = ["worker.engine=vllm", "worker.tensor_parallel=4", "model=/m"]


def test_vllm_rank_has_the_resources_of_all_devices_of_a_node() -> None:
    placement = _placement(
        load(None, {}, VLLM).groups[0], [{"CPU": 8, "GPU": 4}], {"CPU": 2, "GPU": 1}
    )
    assert placement.bundles == [{"CPU": 8, "GPU": 4}]
    assert (placement.strategy, placement.rank_resources) == ("STRICT_PACK", {"CPU": 8, "GPU": 4})
    assert not placement.environment


def test_vllm_places_its_own_actors_over_several_nodes() -> None:
    nodes = [{"CPU": 8.0, "GPU": 2.0}] * 2
    placement = _placement(load(None, {}, VLLM).groups[0], nodes, {"CPU": 2, "GPU": 1})
    assert (placement.bundles, placement.strategy) == ([{"CPU": 2, "GPU": 1}] * 4, "PACK")
    # The rank leaves the GPUs to the actors, but must see that GPUs exist.
    assert not placement.rank_resources and placement.environment


def test_vllm_over_several_nodes_without_gpus_is_refused() -> None:
    with pytest.raises(ClusterFailed, match="only with GPUs"):
        _placement(load(None, {}, VLLM).groups[0], [{"CPU": 2.0}] * 4, {"CPU": 2})


def test_own_ranks_have_a_bundle_each() -> None:
    config = load(None, {}, ["worker.tensor_parallel=4", "model=/m", "nodes_per_worker=2"])
    placement = _placement(config.groups[0], [{"CPU": 8.0}], {"CPU": 2})
    assert (placement.bundles, placement.strategy) == ([{"CPU": 2}] * 4, "PACK")
    assert placement.rank_resources == {"CPU": 2}
