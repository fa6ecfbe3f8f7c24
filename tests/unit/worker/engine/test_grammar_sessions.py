"""Starts with a grammar, which reach the engine when the grammar is compiled."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from everlift.engine_policy import EnginePolicy
from everlift.errors import EngineFailed, EverliftError, InvalidGrammar, QueueFull
from everlift.sampling import Grammar, GrammarKind, SamplingParams
from everlift.v1 import chaos_pb2, session_pb2
from tests.support.worker.worker_support import limits, prompt, start
from worker.engine.adapter_slots import AdapterLoad
from worker.engine.load import Counters, Load
from worker.engine.outcome import Abort
from worker.engine.sequence import Sequence
from worker.grammar.absent import NoGrammars
from worker.serving.sessions import Compiled, Grammars, Session, Sessions

DIGITS = Grammar(GrammarKind.REGEX, ("[0-9]+",))
EMPTY = Load(0, 0, 0, 16, 0, 0, 0, 0, 0, Counters())


@dataclass(frozen=True)
class Toy:
    eos_token_ids: tuple[int, ...] = (7,)


class ToyCompiler:
    """Compiler whose compilations end when the test says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[Grammar, Callable[[Compiled | EverliftError], None]]] = []

    def compile(self, grammar: Grammar, done: Callable[[Compiled | EverliftError], None]) -> None:
        self.asked.append((grammar, done))

    def finish(self, result: Compiled | EverliftError) -> None:
        for _, done in self.asked:
            done(result)


class Engine:
    def __init__(self) -> None:
        self.started: list[Sequence] = []
        self.orders: list[str] = []

    def start(self, sequence: Sequence) -> None:
        self.started.append(sequence)

    def abort(self, abort: Abort) -> None:
        self.orders.append(f"abort {abort.epoch}")

    def set_policy(self, policy: EnginePolicy) -> None:
        raise AssertionError("nobody sets it")

    def load_adapter(self, load: AdapterLoad) -> None:
        raise AssertionError("there are no slots")

    def inject(self, fault: chaos_pb2.Fault) -> None:
        self.orders.append("inject")

    def drain(self) -> None:
        self.orders.append("drain")


class Desk:
    def __init__(self, grammars: Grammars | None = None) -> None:
        self.engine, self.compiler = Engine(), ToyCompiler()
        self.sessions = Sessions(limits(), EMPTY, self.engine, grammars or self.compiler)
        self.router = self.sessions.open_session("a", lambda: None)
        self.cut()

    def send(self, *starts: session_pb2.Start, aborts: tuple[int, ...] = ()) -> None:
        messages = [session_pb2.Abort(epoch=epoch) for epoch in aborts]
        frame = session_pb2.RouterFrame(starts=starts, aborts=messages)
        self.sessions.receive(self.router, frame, now=0.0)

    def cut(self, session: Session | None = None) -> session_pb2.WorkerFrame:
        return self.sessions.take_frame(session or self.router)


def constrained(epoch: int, **fields: object) -> session_pb2.Start:
    sampling = SamplingParams(temperature=0.0, grammar=DIGITS)
    return start(epoch, prompt(3), sampling=sampling, **fields)  # type: ignore[arg-type]


def test_request_is_acknowledged_and_starts_when_compiled() -> None:
    desk = Desk()
    desk.send(constrained(1, stop_token_ids=[5]), start(2, prompt(3)))
    assert [sequence.key.epoch for sequence in desk.engine.started] == [2]
    frame = desk.cut()
    assert frame.accepted_epochs == [1, 2]
    assert (frame.state.num_waiting, frame.state.pending_prefill_tokens) == (2, 6)
    assert [grammar for grammar, _ in desk.compiler.asked] == [DIGITS]
    desk.compiler.finish(toy := Toy())
    started = desk.engine.started[-1]
    assert (started.key.epoch, started.grammar) == (1, toy)
    assert started.stop_token_ids == {5}
    assert desk.cut().state.num_waiting == 2


def test_grammar_start_defaults_to_model_stop_tokens() -> None:
    desk = Desk()
    desk.send(constrained(1))
    desk.compiler.finish(Toy(eos_token_ids=(7, 9)))
    assert desk.engine.started[0].stop_token_ids == {7, 9}


def test_grammar_start_with_finished_output_ends_at_once() -> None:
    desk = Desk()
    desk.send(constrained(1, output=[4, 7]))
    desk.compiler.finish(Toy(eos_token_ids=(7,)))
    assert not desk.engine.started
    progress = desk.cut().progress[0]
    assert (progress.stop, progress.offset) == (session_pb2.STOP_CAUSE_EOS, 2)


def test_invalid_grammar_refuses_its_start() -> None:
    desk = Desk()
    desk.send(constrained(1))
    desk.compiler.finish(InvalidGrammar("parenthesis"))
    frame = desk.cut()
    progress = frame.progress[0]
    assert progress.stop == session_pb2.STOP_CAUSE_REFUSED
    assert (progress.error_slug, progress.error) == ("invalid_grammar", "parenthesis")
    assert frame.state.num_waiting == 0
    assert desk.sessions.is_idle and not desk.engine.started


@pytest.mark.parametrize("error", [QueueFull("too many"), EngineFailed("no fork server")])
def test_failed_compilation_is_retried_on_another_worker(
    error: EverliftError,
) -> None:
    desk = Desk()
    desk.send(constrained(1, output=[4]))
    desk.compiler.finish(error)
    progress = desk.cut().progress[0]
    assert (progress.stop, progress.offset) == (session_pb2.STOP_CAUSE_FAILED, 1)
    assert (progress.error_slug, progress.error) == (error.slug, str(error))


def test_fake_model_refuses_grammar() -> None:
    desk = Desk(NoGrammars())
    desk.send(constrained(1))
    progress = desk.cut().progress[0]
    assert progress.stop == session_pb2.STOP_CAUSE_REFUSED
    assert (progress.error_slug, progress.error) == (
        "invalid_request",
        "the fake model supports no grammar",
    )


def test_abort_during_compilation_ends_sequence() -> None:
    desk = Desk()
    desk.send(constrained(1), constrained(1, choice=1))
    desk.send(aborts=(1,))
    desk.compiler.finish(Toy())
    frame = desk.cut()
    assert not desk.engine.started and not frame.progress
    assert frame.state.num_waiting == 0
    assert desk.sessions.is_idle


def test_session_end_during_compilation_prevents_start() -> None:
    desk = Desk()
    desk.send(constrained(1))
    desk.sessions.end_session(desk.router)
    desk.compiler.finish(Toy())
    assert not desk.engine.started and desk.sessions.is_idle


def test_restart_after_an_abort_waits_for_its_own_compilation() -> None:
    desk = Desk()
    desk.send(constrained(1))
    desk.send(aborts=(1,))
    desk.send(constrained(1, output=[4]))
    _, first_done = desk.compiler.asked.pop(0)
    first_done(Toy())
    assert not desk.engine.started
    desk.compiler.finish(Toy())
    assert [sequence.num_output for sequence in desk.engine.started] == [1]


def test_drain_during_compilation_returns_sequence() -> None:
    desk = Desk()
    desk.send(constrained(1, output=[4, 5]))
    desk.sessions.drain()
    frame = desk.cut()
    assert [(p.epoch, p.offset, p.stop) for p in frame.progress] == [
        (1, 2, session_pb2.STOP_CAUSE_RETURNED)
    ]
    assert frame.state.num_waiting == 0 and desk.sessions.is_idle
    desk.compiler.finish(Toy())
    assert not desk.engine.started
