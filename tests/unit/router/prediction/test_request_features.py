"""Features by which the lengths of a request's outputs are predicted."""

from __future__ import annotations

from router.prediction.model import STATIC, WORDS
from router.prediction.predictor import RequestFeatures, features_of, narrowest
from tests.support.router.prediction_support import served

SYSTEM = (
    "You are the assistant of a shop that sells tea, and you answer what its customers ask. " * 2
)


def asked(prompt: str, tenant: str = "", **changes: object) -> RequestFeatures:
    facts = {
        "max_tokens": 100,
        "choices": 1,
        "temperature": 1.0,
        "stops": 0,
        "has_grammar": False,
        "min_tokens": 0,
        "application": "",
        "arrived": 3 * 86400 + 6 * 3600.0,
    }
    model = served()
    return features_of(model.encode(prompt), model.tokenizer, tenant=tenant, **facts | changes)  # type: ignore[arg-type]


def features(prompt: str, **changes: object) -> dict[str, float]:
    return dict(zip(STATIC, asked(prompt, **changes).static, strict=True))


def test_features_find_keywords_at_prompt_start_and_end() -> None:
    assert features("Summarise this.")["summarise"] == 1
    long = "tea " * 4000
    assert features(f"Translate this: {long}")["translate"] == 1
    assert features(f"{long}\nExplain why, step by step?")["reason"] == 2
    assert features(f"{long} explain {long}")["reason"] == 0
    assert features(f"{long}\nIs it?")["ends_in_question"] == 1


def test_features_include_sampling_options() -> None:
    actual = features("a", choices=3, temperature=0.5, stops=2, has_grammar=True)
    expected = {"choices": 3, "temperature": 0.5, "stops": 2, "grammar": 1, "hour": 6}
    assert expected.items() <= actual.items()


def test_features_ignore_the_middle_of_a_prompt() -> None:
    """Features of the text depend only on its two ends."""
    a, b = (features(f"{SYSTEM} {middle} {SYSTEM}") for middle in ("tea " * 2000, "cup " * 3000))
    assert {**a, "log_prompt_tokens": 0} == {**b, "log_prompt_tokens": 0}


def test_groups_follow_names_and_prompt_beginnings() -> None:
    one, other = (
        asked(f"{SYSTEM} {it}", "acme", application="chat") for it in ("Tea?", "And milk?")
    )
    assert one.groups == other.groups and all(one.groups)
    assert narrowest(one.groups) == one.groups[3]
    elsewhere = asked(f"{SYSTEM} Tea?", "shop", application="chat")
    assert elsewhere.groups[0] != one.groups[0] and elsewhere.groups[1:] == one.groups[1:]


def test_groups_separate_tenant_and_application_of_one_name() -> None:
    tenant, application, *_ = asked("Hi", "acme", application="acme").groups
    assert tenant != application


def test_short_prompt_has_only_its_tenant_group() -> None:
    short = asked("Hi")
    assert short.groups[1:] == ("", "", "") and narrowest(short.groups) == short.groups[0]


def test_keyword_lists_are_disjoint() -> None:
    words = [word for line in WORDS.values() for word in line]
    assert len(set(words)) == len(words)


def test_request_features_keep_no_prompt_or_tenant_text() -> None:
    kept = repr(asked(f"{SYSTEM} pepper", "acme"))
    assert not any(word in kept for word in ("assistant", "tea", "pepper", "acme"))
