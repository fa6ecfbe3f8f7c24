"""How long the outputs of a router's requests become. Pure.

    a request  --predict-->  Prediction  ...  its outputs end  --note-->  what the next ones learn

Without a model, and while tau says that its order is worth nothing, every output that may end by
itself is expected to be as long as the last ones were by and large. With a model whose order is
worth nothing requests are not ordered by that either: they leave the queue by arrival.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from zlib import crc32

from everlift.messages import Request
from everlift.text import Vocabulary
from router.prediction.asked import asked
from router.prediction.histories import Histories
from router.prediction.learned import Guess, Learned
from router.prediction.length_distribution import LengthDistribution
from router.prediction.model import Model
from router.prediction.output_lengths import OutputLengths
from router.prediction.recent_ranks import RecentRanks
from router.prediction.trust import Trust

#: Where nothing tells requests apart nobody gives way to others.
_NO_RANK = 0.0
#: Of so many requests one is let in whatever the model says that it gets at the least.
_TRIALS = 20


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of each output of a request the ``length``, which knows nothing of its ``max_tokens``;
    ``rank`` is the part of the requests lately whose outputs together are shorter."""

    length: LengthDistribution
    rank: float = _NO_RANK
    #: as ``rank``, of its prompt and all its outputs
    work_rank: float = _NO_RANK
    #: seconds that what waited when it came will take
    foreseen_wait_s: float = 0.0
    guess: Guess | None = None
    #: who made the guess
    learned: Learned | None = None
    #: nothing but its ``max_tokens`` ends it
    is_certain: bool = False
    #: there is a model, and its order is worth nothing
    is_distrusted: bool = False

    def output_tokens(self, request: Request) -> int:
        """Of all its outputs."""
        return request.n * self.length.to_come(0, request.max_tokens)

    def total_tokens(self, request: Request) -> int:
        """Of its prompt and all its outputs."""
        return len(request.prompt_ids) + self.output_tokens(request)

    def least_tokens(self, request: Request) -> int:
        """That each of its outputs gets, or nearly always does."""
        if self.is_certain:
            return request.max_tokens
        least = max(1, request.sampling.min_tokens)
        if self.guess is None or self.is_distrusted or _is_trial(request):
            return least
        return min(max(least, self.guess.least_tokens), request.max_tokens)

    def ordered_tokens(self, request: Request) -> int:
        """``total_tokens`` where requests may be ordered by that; 0 where they leave by arrival."""
        return 0 if self.is_distrusted else self.total_tokens(request)


def _is_trial(request: Request) -> bool:
    """Who is refused for a long output does not show that it would have been a short one: the model
    would never be put right."""
    return crc32(request.request_id.encode()) % _TRIALS == 0


#: Before anything is predicted.
NOTHING = Prediction(LengthDistribution(0.0), is_certain=True)


class Predictor:
    def __init__(self, tokenizer: Vocabulary, served: str, min_tau: float) -> None:
        """``served`` is the served model's name. Below ``min_tau`` predictions are not trusted."""
        self._tokenizer = tokenizer
        self._served = served
        self._min_tau = min_tau
        self._lengths = OutputLengths()
        self._histories = Histories()
        self._ranks = RecentRanks()
        self._work_ranks = RecentRanks()
        self._learned: Learned | None = None

    @property
    def trust(self) -> Trust | None:
        """None while there is no model."""
        return None if self._learned is None else self._learned.trust

    def load(self, model: Model) -> None:
        """It predicts from now on. Raises ValueError where it is of another model's outputs."""
        if model.served != self._served:
            raise ValueError(f"is of {model.served!r}, and {self._served!r} is served")
        self._histories.learn(model.histories)
        self._learned = Learned(model, self._histories, self._min_tau)

    def predict(self, request: Request, moment: float) -> Prediction:
        """``moment`` is ledger time in seconds."""
        prediction = self._foretold(request, moment)
        if self._is_distrusted:
            return replace(prediction, is_distrusted=True)
        work_rank = self._work_ranks.rank(prediction.total_tokens(request))
        return replace(prediction, rank=self._rank(prediction, request), work_rank=work_rank)

    @property
    def _is_distrusted(self) -> bool:
        return self.trust is not None and not self.trust.is_trusted

    def _foretold(self, request: Request, moment: float) -> Prediction:
        """Its length alone."""
        ends_by_itself = request.stop or request.stop_token_ids or request.sampling.grammar
        if not ends_by_itself:
            return Prediction(LengthDistribution(request.max_tokens), is_certain=True)
        if self._learned is None:
            return Prediction(LengthDistribution(self._lengths.mean))
        guess = self._learned.guess(asked(request, self._tokenizer, moment))
        length = LengthDistribution(self._lengths.mean) if self._is_distrusted else guess.length
        return Prediction(length, guess=guess, learned=self._learned)

    def _rank(self, prediction: Prediction, request: Request) -> float:
        if self._learned is None:
            return _NO_RANK
        return self._ranks.rank(prediction.output_tokens(request))

    def note(self, prediction: Prediction, num_tokens: int) -> bool:
        """An output ended, by itself or by its ``max_tokens``. Whether others are trusted from now
        on, or are not any more."""
        if prediction.is_certain:
            return False
        self._lengths.note(num_tokens)
        learned, guess = prediction.learned, prediction.guess
        if guess is None or learned is None or learned is not self._learned:
            return False
        was_trusted = learned.trust.is_trusted
        learned.note(guess, num_tokens)
        return learned.trust.is_trusted is not was_trusted

    def note_cut_off(self, prediction: Prediction, num_tokens: int) -> None:
        """An output had so many tokens when its deadline came, and would have got more."""
        guess, learned = prediction.guess, prediction.learned
        if guess is not None and learned is not None and learned is self._learned:
            learned.note_cut_off(guess, num_tokens)
