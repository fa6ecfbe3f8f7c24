"""Selection of one of two models for clients, and answers to requests for the other one."""

from __future__ import annotations

import pytest

from everlift.errors import RouterStopping, UnknownModel
from router.active import ActiveModel
from router.ledger.memory.memory import MemoryLedger
from router.requests.served_models import ServedModels
from router.requests.tokenizer import ServedModel


class Connections:
    def __init__(self) -> None:
        self.hang_ups = 0

    def close_when_idle(self) -> None:
        self.hang_ups += 1


def served(*, is_active: bool) -> tuple[ServedModels, ActiveModel, Connections]:
    model, connections = ServedModels([ServedModel.load("fake")]), Connections()
    model.is_active = is_active
    active = ActiveModel(MemoryLedger(lambda: 0.0), model, [connections])
    active.note(is_active, 100.0)
    return model, active, connections


def test_model_without_a_replacement_rejects_other_models() -> None:
    model, _, connections = served(is_active=True)
    model.requested("")
    model.requested("fake")
    with pytest.raises(UnknownModel):
        model.requested("other")
    assert connections.hang_ups == 0


def test_replaced_model_redirects_requests_for_the_other() -> None:
    model, active, connections = served(is_active=True)
    active.note(False, 200.0)
    assert not model.is_active
    # Load balancers may still route here: requests for this model are served.
    model.requested("fake")
    for moment in (200.0, 205.0, 500.0):
        active.note(False, moment)
        with pytest.raises(RouterStopping):
            model.requested("other")
    assert connections.hang_ups == 4


def test_new_model_rejects_other_models_after_the_switch() -> None:
    model, active, connections = served(is_active=False)
    assert connections.hang_ups == 1
    active.note(True, 200.0)
    assert model.is_active
    active.note(True, 209.0)
    with pytest.raises(RouterStopping):
        model.requested("other")
    active.note(True, 210.0)
    with pytest.raises(UnknownModel):
        model.requested("other")
    assert connections.hang_ups == 1
