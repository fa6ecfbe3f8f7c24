"""The configuration of a whole cluster."""

from pathlib import Path

import pytest

from cluster.config import DEMO_MODEL, Config, load
from everlift import settings
from everlift.errors import SettingsError


def test_config_defaults_to_the_demo_model() -> None:
    config = load(None, {})
    assert config == Config()
    assert config.model == config.router.model == config.worker.model == str(DEMO_MODEL)


def test_config_layers_file_environment_flags_and_options(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        """
        model: fake
        num_workers: 2
        router: {port: 1, grace: 5}
        worker: {max_num_seqs: 1, num_blocks: 10}
        """
    )
    environ = {"EVERLIFT_ROUTER__PORT": "2", "EVERLIFT_WORKER__MAX_NUM_SEQS": "2", "PATH": "/"}
    config = load(
        file, environ, ["router.port=3", "worker.num_blocks=3"], {"worker": {"num_blocks": 4}}
    )
    assert (config.model, config.num_workers) == ("fake", 2)
    assert (config.router.grace, config.router.port) == (5.0, 3)
    assert (config.worker.max_num_seqs, config.worker.num_blocks) == (2, 4)


def test_config_model_is_shared_with_an_absolute_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "llama").mkdir(parents=True)
    for model in ("models/llama", "./models/llama", str(tmp_path / "models" / "llama")):
        config = Config(model=model)
        path = f"{tmp_path}/models/llama"
        assert config.model == config.router.model == config.worker.model == path


def test_config_model_accepts_a_hub_id() -> None:
    config = Config(model="org/llama", model_revision="v1")
    assert config.model == config.router.model == config.worker.model == "org/llama"
    assert config.model_revision == "v1"
    assert config.router.model_revision == config.worker.model_revision == "v1"
    assert config.worker.name == "org/llama"


def test_config_with_sources_replaces_every_revision() -> None:
    models = {"small": {"model": "org/small", "adapters": ["a=org/a"]}}
    values = {"model": "org/llama", "model_revision": "v1", "num_workers": 2, "models": models}
    config = load(None, {}, options=values)
    pinned = config.with_sources("", "abc", ()).with_sources("small", "def", ("a=org/a@ghi",))
    models = {"small": {"model": "org/small", "model_revision": "def", "adapters": ["a=org/a@ghi"]}}
    expected = values | {"model_revision": "abc", "models": models}
    assert pinned == load(None, {}, options=expected)
    assert [group.worker.model_revision for group in pinned.groups] == ["abc", "def"]


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("worker.model=x", "model must be set for the whole cluster, not for a part of it"),
        (
            "router.model_revision=x",
            "model_revision must be set for the whole cluster, not for a part of it",
        ),
        ("model_revision=v1", "model_revision is for a hub id (org/name), not for '/"),
        ("worker.load_format=pickle", "must be one of auto, dummy, not 'pickle'"),
        ("num_workers=0", "num_workers must be at least 1, not 0"),
        ("worker.tensor_parallel=0", "worker.tensor_parallel must be at least 1, not 0"),
        ("worker.max_num_seq=1", "did you mean worker.max_num_seqs?"),
        ("num_worker=1", "did you mean num_workers?"),
        ("ledger.url=http://x:secret@y", "ledger.url must be embedded, or begin with"),
        ("log_level=loud", "log_level: must be one of debug, info, warning, error, not 'loud'"),
    ],
)
def test_config_rejects_invalid_settings_without_secrets(assignment: str, message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(None, {}, [assignment])
    assert message in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a", "must be a mapping of setting names"),
        ("{", "is not YAML"),
        ("worker: {max_num_seq: 1}", "worker.max_num_seq: unknown key"),
        ("1: 2", "1: unknown key"),
    ],
)
def test_config_rejects_a_malformed_file(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=message):
        load(file, {})


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("heartbeat=5", r"lease \(1\.2\) must be at least twice heartbeat"),
        ("max_losses=0", "max_losses must be at least 1, not 0"),
        ("max_losses_total=0", "max_losses_total must be at least 1, not 0"),
        ("host=", "host must be set: an empty host would mean every address"),
        ("internal_host=", "internal_host must be set: an empty host would mean every address"),
        ("http_port=70000", "http_port must be at most 65535, not 70000"),
        ("metrics_port=-4", "metrics_port must be at least 0, not -4"),
        ("lease=nan", "lease must be a finite number, not nan"),
        ("worker_silence=0", "worker_silence must be above 0, not 0"),
        ("grace=inf", "grace must be a finite number, not inf"),
        ("keep_alive=-1", "keep_alive must be at least 0, not -1"),
        ("local_depth=-5", "local_depth must be at least 0, not -5"),
        ("access=file", "access_file must be set if access is file, and only then"),
        ("max_message_bytes=1", "max_message_bytes must be at least 1024, not 1"),
        ("max_body_bytes=1", "max_body_bytes must be at least 1024, not 1"),
        ("trace_sample=2", "trace_sample must be at most 1, not 2"),
        ("template_timeout=0", "template_timeout must be above 0, not 0"),
        ("template_processes=0", "template_processes must be at least 1, not 0"),
    ],
)
def test_config_names_a_wrong_router_setting_once(setting: str, message: str) -> None:
    with pytest.raises(SettingsError, match=rf"^router\.{message}$"):
        load(None, {}, [f"router.{setting}"])


def test_config_accepts_an_empty_file_and_rejects_a_missing_one(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    with pytest.raises(SettingsError, match="No such file"):
        load(file, {})
    file.touch()
    assert load(file, {}) == Config()


def test_config_ignores_variables_of_client_commands() -> None:
    assert load(None, {"EVERLIFT_ADDRESS": "x"}) == Config()
    with pytest.raises(SettingsError, match="EVERLIFT_ADRESS: unknown key"):
        load(None, {"EVERLIFT_ADRESS": "x"})


def test_config_state_dir_follows_xdg_state_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/somewhere")
    assert Config().state_dir == Path("/somewhere/everlift")


def test_config_round_trips_through_a_dict() -> None:
    for model in ("model=fake", "model=org/llama"):
        config = load(None, {}, [model, "worker.num_blocks=7", "ledger.url=unix:///x"])
        assert settings.load(Config, settings.to_dict(config)) == config


def test_config_rejects_num_workers_with_an_autoscaler() -> None:
    with pytest.raises(SettingsError, match=r"set autoscale\.min_workers"):
        load(None, {}, ["num_workers=2", "autoscale.max_workers=4"])


def test_config_model_inherits_from_the_whole_cluster(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        """
        model: org/big
        adapters: [a=org/a]
        num_workers: 2
        router: {tool_format: hermes, served_model_names: [large], predictor: lengths.json}
        worker: {tensor_parallel: 2, max_num_seqs: 9, grammar: {cache_mib: 1, max_queued: 2}}
        autoscale: {ttft_target: 9, drain_target: 8, max_routers: 3}
        internal_tls: {ca: /a, cert: /b, key: /c}
        models:
          small:
            model: org/small
            num_workers: 4
            worker: {tensor_parallel: 1, grammar: {cache_mib: 3}}
            autoscale: {drain_target: 7}
        """
    )
    config = load(file, {})
    big, small = config.groups
    assert (big.name, big.model, big.num_workers, big.section) == ("", "org/big", 2, "")
    assert (small.name, small.model, small.num_workers) == ("small", "org/small", 4)
    assert (small.section, small.label, big.label) == ("models.small.", "worker-small", "worker")
    assert (small.worker.tensor_parallel, small.worker.max_num_seqs) == (1, 9)
    assert (small.worker.grammar.cache_mib, small.worker.grammar.max_queued) == (3, 2)
    assert (small.worker.adapters, small.worker.internal_tls) == ((), config.internal_tls)
    assert (small.autoscale.ttft_target, small.autoscale.drain_target) == (9, 7)
    assert small.autoscale.max_routers is None
    [router] = config.router.more_models
    assert (router.model, router.tool_format) == ("org/small", "hermes")
    assert (router.served_model_names, router.predictor) == ((), "")
    assert settings.load(Config, settings.to_dict(config)) == config


def test_config_model_does_not_inherit_its_number_of_workers() -> None:
    scaled = ["autoscale.max_workers=4", "autoscale.min_workers=0", "models.small.model=org/small"]
    _, small = load(None, {}, scaled).groups
    assert (small.most_workers, small.autoscale.is_on, small.autoscale.min_workers) == (1, False, 1)
    _, small = load(None, {}, [*scaled, "models.small.autoscale.max_workers=3"]).groups
    assert small.most_workers == 3


def test_config_model_is_set_by_flag_and_variable() -> None:
    environ = {"EVERLIFT_MODELS__SMALL__NUM_WORKERS": "2"}
    config = load(None, environ, ["models.small.model=org/small", "models.x-1.model=org/x"])
    assert [(it.label, it.num_workers) for it in config.groups] == [
        ("worker", 1),
        ("worker-small", 2),
        ("worker-x-1", 1),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("small: 3", "5: models.small: must be a section of settings, not 3"),
        ("small: {num_workers: 2}", "models.small.model: must be set"),
        ("small: {modle: a/b}", "5: models.small.modle: unknown key; did you mean models.small."),
        ("small: {model: a/b, num_workers: 0}", "5: models.small.num_workers must be at least 1"),
        ("Small: {model: a/b}", "5: models.Small: the name must have at most 32 lower-case"),
        ("small: {model: a/b, worker: {port: x}}", "5: models.small.worker.port: must be an int"),
        (
            "small: {model: org/big}",
            "5: models.small.model has the name 'org/big', which model has",
        ),
        (
            "small: {model: a/b, served_model_names: [large]}",
            "5: models.small.served_model_names has the name 'large', which router.served_model",
        ),
        (
            "small: {model: a/b, adapters: [a=x/y]}",
            "5: models.small.adapters has the name 'a', which adapters has too",
        ),
        (
            "small: {model: a/b, autoscale: {max_routers: 2}}",
            "5: models.small.autoscale.max_routers must be set for the whole cluster",
        ),
        (
            "small: {model: a/b, num_workers: 2, autoscale: {max_workers: 2}}",
            "5: models.small.num_workers is for a fixed number of workers",
        ),
        (
            "small: {model: ./x, model_revision: a}",
            "5: models.small.model_revision is for a hub id",
        ),
        (
            "small: {model: a/b, worker: {model: c/d}}",
            "models.small.model must be set for the whole",
        ),
    ],
)
def test_config_names_a_wrong_setting_of_a_model(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "model: org/big\nadapters: [a=org/a]\nrouter: {served_model_names: [large]}\n"
        f"models:\n  {text}\n"
    )
    with pytest.raises(SettingsError) as caught:
        load(file, {})
    assert message in str(caught.value)


def test_config_reports_an_inherited_setting_once(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "worker: {max_num_seqs: many}\nmodels: {small: {model: a/b, worker: {port: -1}}}\n"
    )
    with pytest.raises(SettingsError) as caught:
        load(file, {})
    assert str(caught.value).replace(f"{file}", "FILE").splitlines() == [
        "FILE:1: worker.max_num_seqs: must be an integer, not 'many'",
        "FILE:2: models.small.worker.port must be at least 0, not -1",
    ]


def test_config_models_are_not_set_in_the_section_router() -> None:
    with pytest.raises(SettingsError, match="must not be set: set models"):
        load(None, {}, options={"router": {"more_models": [{"model": "a/b"}]}})
