"""Loading of settings."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from everlift.errors import SettingsError
from everlift.settings import from_environment, from_flags, load, to_dict


@dataclass(frozen=True)
class Worker:
    model: str
    max_num_seqs: int = 256
    share: float = 0.9
    device: Literal["cpu", "cuda"] = "cpu"
    stops: tuple[int, ...] = ()
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs: must be positive, not {self.max_num_seqs}")


@dataclass(frozen=True)
class Ledger:
    url: str = "embedded"
    durability: Literal["memory", "every_sec"] = "every_sec"


@dataclass(frozen=True)
class Config:
    worker: Worker = field(default_factory=lambda: Worker("demo"))
    ledger: Ledger = field(default_factory=Ledger)
    state_dir: Path = Path("/tmp")
    verbose: bool = False
    pools: Mapping[str, Ledger] = field(default_factory=dict)


def error(*layers: dict[str, object]) -> str:
    with pytest.raises(SettingsError) as caught:
        load(Config, *layers)
    return str(caught.value)


def flag_error(assignment: str) -> str:
    with pytest.raises(SettingsError) as caught:
        from_flags(Config, [assignment])
    return str(caught.value)


def environment_error(**environ: str) -> str:
    with pytest.raises(SettingsError) as caught:
        from_environment(Config, environ)
    return str(caught.value)


def test_settings_without_layers_are_the_defaults() -> None:
    assert load(Config) == Config()


def test_settings_load_every_type_from_plain_values() -> None:
    loaded = load(
        Config,
        {
            "worker": {"model": "m", "share": 1, "device": "cuda", "stops": [1, 2], "threads": 3},
            "ledger": {"durability": "memory"},
            "state_dir": "/x",
            "verbose": True,
        },
    )
    assert loaded == Config(
        Worker("m", 256, 1.0, "cuda", (1, 2), 3),
        Ledger(durability="memory"),
        Path("/x"),
        True,
    )
    assert isinstance(loaded.worker.share, float)


def test_settings_later_layer_overrides_per_key() -> None:
    yaml = {"worker": {"model": "m", "max_num_seqs": 1, "share": 0.5}, "verbose": True}
    environment = from_environment(Config, {"EVERLIFT_WORKER__MAX_NUM_SEQS": "2"})
    flags = from_flags(Config, ["worker.share=0.25"])
    assert load(Config, yaml, environment, flags) == Config(Worker("m", 2, 0.25), verbose=True)


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("worker.max_num_seqs=8", {"worker": {"max_num_seqs": 8}}),
        ("worker.share=.5", {"worker": {"share": 0.5}}),
        ("worker.stops=1, 2", {"worker": {"stops": [1, 2]}}),
        ("worker.stops=", {"worker": {"stops": []}}),
        ("worker.threads=none", {"worker": {"threads": None}}),
        ("worker.threads=4", {"worker": {"threads": 4}}),
        ("worker.model=a=b", {"worker": {"model": "a=b"}}),
        ("ledger.durability=memory", {"ledger": {"durability": "memory"}}),
        ("verbose=on", {"verbose": True}),
        ("verbose=0", {"verbose": False}),
    ],
)
def test_settings_flags_are_parsed_by_type_of_key(
    assignment: str, expected: dict[str, object]
) -> None:
    assert from_flags(Config, [assignment]) == expected


def test_settings_ignore_other_environment_variables() -> None:
    environ = {"PATH": "/bin", "EVERLIFT_ADDRESS": "x", "EVERLIFT_STATE_DIR": "/y"}
    assert from_environment(Config, environ, ["EVERLIFT_ADDRESS"]) == {"state_dir": "/y"}


def test_unknown_key_suggests_nearest_in_its_section() -> None:
    expected = "worker.max_num_seq: unknown key; did you mean worker.max_num_seqs?"
    assert error({"worker": {"max_num_seq": 1}}) == expected
    assert flag_error("worker.max_num_seq=1") == expected


def test_unknown_key_in_wrong_section_suggests_right_section() -> None:
    expected = "max_num_seqs: unknown key; did you mean worker.max_num_seqs?"
    assert error({"max_num_seqs": 1}) == expected
    assert flag_error("ledger.share=1") == "ledger.share: unknown key; did you mean worker.share?"


def test_unknown_key_without_similar_suggests_nothing() -> None:
    assert error({"zzz": 1}) == "zzz: unknown key"


def test_misspelt_section_suggests_right_one() -> None:
    assert error({"leger": {"url": "x"}}) == "leger: unknown key; did you mean ledger?"
    assert flag_error("leger.url=x") == "leger.url: unknown key; did you mean ledger.url?"


def test_unknown_variable_suggests_nearest() -> None:
    assert environment_error(EVERLIFT_WORKER__MAX_NUM_SEQ="1") == (
        "EVERLIFT_WORKER__MAX_NUM_SEQ: unknown key; did you mean EVERLIFT_WORKER__MAX_NUM_SEQS?"
    )


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"verbose": 1}, "verbose: must be true or false, not 1"),
        ({"worker": {"max_num_seqs": "8"}}, "worker.max_num_seqs: must be an integer, not '8'"),
        ({"worker": {"max_num_seqs": True}}, "worker.max_num_seqs: must be an integer, not True"),
        ({"worker": {"share": "a"}}, "worker.share: must be a number, not 'a'"),
        ({"worker": {"model": 1}}, "worker.model: must be text, not 1"),
        ({"worker": {"device": "x"}}, "worker.device: must be one of cpu, cuda, not 'x'"),
        ({"worker": {"stops": 1}}, "worker.stops: must be a list, each an integer, not 1"),
        ({"worker": {"stops": ["a"]}}, "worker.stops: must be an integer, not 'a'"),
        ({"worker": {"threads": "a"}}, "worker.threads: must be an integer, not 'a'"),
        ({"worker": 1}, "worker: must be a section of settings, not 1"),
        (
            {"ledger": {"durability": "x"}},
            "ledger.durability: must be one of memory, every_sec, not 'x'",
        ),
        ({"state_dir": 1}, "state_dir: must be a path, not 1"),
    ],
)
def test_settings_type_error_names_key_and_type(layer: dict[str, object], message: str) -> None:
    defaults: dict[str, object] = {"worker": {"model": "m"}}
    assert error(defaults, layer) == message


@pytest.mark.parametrize(
    ("key", "value", "end"),
    [
        ("worker.device", "cudo", "one of cpu, cuda, not 'cudo'; did you mean cuda?"),
        ("ledger.durability", "evrysec", "not 'evrysec'; did you mean every_sec?"),
    ],
)
def test_unknown_choice_suggests_the_nearest(key: str, value: str, end: str) -> None:
    assert flag_error(f"{key}={value}").endswith(end)


def test_settings_unparsable_text_names_flag_or_variable() -> None:
    assert flag_error("worker.max_num_seqs=many") == (
        "worker.max_num_seqs: must be an integer, not 'many'"
    )
    assert environment_error(EVERLIFT_VERBOSE="maybe") == (
        "EVERLIFT_VERBOSE: must be true or false, not 'maybe'"
    )


def test_flag_without_value_is_rejected() -> None:
    assert flag_error("verbose") == "verbose: must be key=value"


def test_settings_validation_error_has_full_key_path() -> None:
    assert error({"worker": {"model": "m", "max_num_seqs": 0}}) == (
        "worker.max_num_seqs: must be positive, not 0"
    )


def test_section_cannot_be_set_as_key() -> None:
    assert flag_error("worker=x") == "worker: is a section; only its keys can be set"
    assert environment_error(EVERLIFT_LEDGER="x") == (
        "EVERLIFT_LEDGER: is a section; only its keys can be set"
    )


def test_section_without_required_key_is_rejected() -> None:
    assert error({"worker": {"share": 0.5}}) == "worker.model: must be set"


def test_config_round_trips_through_plain_values() -> None:
    config = Config(Worker("m", stops=(1,)), Ledger(durability="memory"))
    assert to_dict(config)["worker"] == {
        "model": "m",
        "max_num_seqs": 256,
        "share": 0.9,
        "device": "cpu",
        "stops": [1],
        "threads": None,
    }
    assert load(Config, to_dict(config)) == config


def test_named_sections_are_loaded_from_every_source() -> None:
    flags = from_flags(Config, ["pools.a.url=x"])
    variables = from_environment(Config, {"EVERLIFT_POOLS__B__DURABILITY": "memory"})
    config = load(Config, flags, variables, {"pools": {"a": {"durability": "memory"}}})
    assert config.pools == {"a": Ledger("x", "memory"), "b": Ledger(durability="memory")}
    assert load(Config, to_dict(config)) == config


def test_named_section_errors_have_the_full_path() -> None:
    assert error({"pools": 3}) == "pools: must be a section of settings, not 3"
    assert error({"pools": {"a": 3}}) == "pools.a: must be a section of settings, not 3"
    assert error({"pools": {"a": {"url": 3}}}) == "pools.a.url: must be text, not 3"
    unknown = "pools.a.urls: unknown key; did you mean pools.a.url?"
    assert error({"pools": {"a": {"urls": "x"}}}) == flag_error("pools.a.urls=x") == unknown
    assert flag_error("pools.a=x") == "pools.a: is a section; only its keys can be set"


def test_copied_setting_is_not_reported_beside_its_original() -> None:
    values = {"worker": {"model": "m", "share": "x"}, "pools": {"a": {"url": 3}}}
    for copies, number in (({"pools.a.url": "worker.share"}, 1), ({"pools.a.url": "worker.x"}, 2)):
        with pytest.raises(SettingsError) as caught:
            load(Config, values, copies=copies)
        assert len(str(caught.value).splitlines()) == number
