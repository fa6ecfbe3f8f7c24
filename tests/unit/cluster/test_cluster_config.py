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


def test_config_at_commit_replaces_every_revision() -> None:
    config = Config(model="org/llama", model_revision="v1", num_workers=2)
    assert config.at_commit("abc") == Config(model="org/llama", model_revision="abc", num_workers=2)


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
        ("heartbeat=5", r"lease \(1\.2\) must be twice heartbeat or more"),
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
