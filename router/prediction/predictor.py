"""Prediction of output lengths: features of a request, a trained model, and the fallback. Pure.

    a request  --predict-->  Prediction  ...  its outputs end  --note-->  later predictions

Without a trained model, or while Kendall's tau of its predictions is too low to trust them, each
output that may end by itself has the same predicted length: the mean of recent outputs. While a
loaded model is not trusted, queue orders that use predictions place new requests by their arrival.
"""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import erfc, exp, log, log1p, sqrt
from statistics import NormalDist
from typing import NamedTuple
from zlib import crc32

from everlift.messages import Request
from everlift.request_id import tenant_of
from everlift.text import Vocabulary
from router.admission.recent_ranks import RecentRanks
from router.admission.request import BY_ARRIVAL, QueueKey
from router.prediction.corrections import Corrections
from router.prediction.model import QUANTILES, WORDS, History, Model
from router.prediction.trust import Trust

_LONGEST_LENGTH = float(1 << 30)
#: Minimum probability that an output is longer than a given length, for which the mean of such
#: longer outputs is computed.
_LEAST_PROBABILITY = 1e-12


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Log-normal distribution of an output's length in tokens.

    ``sigma`` is the standard deviation of the natural logarithm. If it is 0, every output has the
    length ``median``.
    """

    median: float
    sigma: float = 0.0

    def quantile(self, part: float) -> float:
        """Return the length in tokens that a fraction ``part`` of such outputs does not exceed."""
        return self.median * exp(self.sigma * NormalDist().inv_cdf(part))

    def expected_remaining(self, num_generated: int, max_tokens: int) -> int:
        """Return the expected number of tokens of an output after its first ``num_generated`` ones.

        The output has at most ``max_tokens`` tokens. The result is at least 1, or 0 if the output
        already has ``max_tokens`` tokens.
        """
        expected = max(num_generated + 1, round(self._conditional_mean(num_generated)))
        return max(0, min(expected, max_tokens) - num_generated)

    def _conditional_mean(self, num_generated: float) -> float:
        """Return the mean length of outputs longer than ``num_generated``.

        E[X | X > m] = E[X] * Phi(sigma - z) / Phi(-z), where z = ln(m / median) / sigma.
        """
        if not self.sigma:
            return self.median
        mean = min(_LONGEST_LENGTH, self.median * exp(min(50.0, self.sigma**2 / 2)))
        if num_generated < 1:
            return mean
        z = log(num_generated / self.median) / self.sigma
        longer = _below(-z)
        return (
            mean * _below(self.sigma - z) / longer if longer > _LEAST_PROBABILITY else num_generated
        )


def _below(z: float) -> float:
    """Return the standard normal distribution function at ``z``."""
    return erfc(-z / sqrt(2.0)) / 2


#: Predicted length of an output in tokens before any output has ended.
_FIRST_GUESS = 128.0
#: Approximate number of most recent outputs that the mean covers.
_LENGTH_MEMORY = 200


class OutputLengths:
    """Running mean of the lengths, in tokens, of outputs that ended at this router."""

    def __init__(self) -> None:
        self.mean = _FIRST_GUESS
        self._count = 0

    def note(self, num_tokens: int) -> None:
        """Record the length of an output that ended by itself or by its ``max_tokens``."""
        self._count = min(_LENGTH_MEMORY, self._count + 1)
        self.mean += (num_tokens - self.mean) / self._count


#: Number of tokens that are read at the beginning, and at the end, of a prompt.
_HEAD, _TAIL = 32, 64
#: Number of first tokens that form a prompt's opening. Prompts with the same opening probably ask
#: for something similar.
_OPENING = 8
#: Number of first tokens by which prompts with the same template or system prompt are recognised.
_TEMPLATE = 32

_PLACES = {word: place for place, words in enumerate(WORDS.values()) for word in words}
_WORD = re.compile(r"[^\s.,:?!()\"'`]+")
_DAY_S = 86400.0


class RequestFeatures(NamedTuple):
    """Features of a request.

    ``static`` holds the values of the features named in STATIC. ``groups`` holds, for each kind in
    GROUPS, the digest of the request's group: requests of the same tenant, of the same application,
    or whose prompts begin alike. A digest is empty if the request has no application, or if the
    prompt is too short. ``arrived`` is the arrival in ledger time, in seconds.
    """

    static: tuple[float, ...]
    groups: tuple[str, ...]
    max_tokens: int
    choices: int
    arrived: float


def extract_features(request: Request, tokenizer: Vocabulary, arrived: float) -> RequestFeatures:
    sampling = request.sampling
    return features_of(
        request.prompt_ids,
        tokenizer,
        max_tokens=request.max_tokens,
        choices=request.n,
        temperature=sampling.temperature,
        stops=len(request.stop),
        has_grammar=sampling.grammar is not None,
        min_tokens=sampling.min_tokens,
        tenant=tenant_of(request.request_id),
        application=request.application,
        arrived=arrived,
    )


def features_of(
    prompt_ids: Sequence[int],
    tokenizer: Vocabulary,
    *,
    max_tokens: int,
    choices: int,
    temperature: float,
    stops: int,
    has_grammar: bool,
    min_tokens: int,
    tenant: str,
    application: str,
    arrived: float,
) -> RequestFeatures:
    """Return the features of a request with these properties.

    ``stops`` is the number of strings that end an output. ``arrived`` is the arrival in ledger
    time, in seconds.
    """
    count = len(prompt_ids)
    static = (
        log1p(count),
        log1p(max_tokens),
        float(choices),
        temperature,
        float(stops),
        float(has_grammar),
        log1p(min_tokens),
        arrived % _DAY_S / 3600.0,
        *_counts(_ends(prompt_ids, tokenizer)),
    )
    groups = (
        _digest(f"tenant {tenant}".encode()),
        _digest(f"application {application}".encode()) if application else "",
        _beginning(prompt_ids, _OPENING),
        _beginning(prompt_ids, _TEMPLATE),
    )
    return RequestFeatures(static, groups, max_tokens, choices, arrived)


def narrowest(groups: Sequence[str]) -> str:
    """Return the last digest in ``groups`` that is not empty; the narrowest group comes last.

    The outputs of this group's requests are the most similar ones.
    """
    return next(group for group in reversed(groups) if group)


def _ends(ids: Sequence[int], tokenizer: Vocabulary) -> str:
    """Return the text of the first ``_HEAD`` and the last ``_TAIL`` tokens of a prompt."""
    if len(ids) <= _HEAD + _TAIL:
        return tokenizer.decode(ids)
    return tokenizer.decode(ids[:_HEAD]) + "\n" + tokenizer.decode(ids[-_TAIL:])


def _counts(text: str) -> list[float]:
    """Return the values of those STATIC features that depend on ``text``, in the order of STATIC.

    The first values state, for each list in WORDS, how many different words of the list the text
    contains. The next values count code fences, question marks, line breaks, digits and words. The
    last two values state whether the text ends in a question mark, and whether it ends in a colon,
    without regard to trailing whitespace.
    """
    words = _WORD.findall(text.lower())
    counts = [0.0] * len(WORDS)
    for word in _PLACES.keys() & words:
        counts[_PLACES[word]] += 1.0
    end = text.rstrip()[-1:]
    counts += (
        float(text.count("```")),
        float(text.count("?")),
        float(text.count("\n")),
        float(sum(map(text.count, "0123456789"))),
        float(len(words)),
        float(end == "?"),
        float(end == ":"),
    )
    return counts


def _beginning(ids: Sequence[int], count: int) -> str:
    return _digest(array("I", ids[:count]).tobytes()) if len(ids) >= count else ""


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=8).hexdigest()


#: Maximum number of groups that are kept; the least recently updated ones are dropped first.
_MAX_GROUPS = 8192
#: Name of the group of all requests.
_ALL = "all"


class Histories:
    """Running means and variances of the output lengths of each group of requests.

    A group is a tenant, an application, or the requests whose prompts begin with the same tokens.
    The means are ordered target statistics (Prokhorenkova et al., CatBoost, arXiv 1706.09516): the
    training records outputs in the order of arrival, and each one only after the features of its
    request were computed. A group that was not in the training data can be used after its first
    outputs.
    """

    def __init__(self, known: Mapping[str, History] | None = None) -> None:
        self._known: OrderedDict[str, History] = OrderedDict(known or {})
        self._all = self._known.pop(_ALL, History())

    def features(self, request_features: RequestFeatures) -> list[float]:
        """Return the values of FEATURES for a request, in this order.

        A group without ended outputs gets the mean and variance of the next wider group that has
        some, or else those of all requests.
        """
        values, around = list(request_features.static), self._all
        for group in request_features.groups:
            found = self._known.get(group) if group else None
            if found is not None:
                around = found
            values += (around.mean, sqrt(around.variance), log1p(found.outputs if found else 0))
        return values

    def note(self, groups: Sequence[str], log_length: float) -> None:
        """Record an output of a request that belongs to ``groups``.

        ``log_length`` is the natural logarithm of the output's length in tokens.
        """
        self._all = self._all.with_one(log_length)
        for group in filter(None, groups):
            self._known[group] = self._known.get(group, History()).with_one(log_length)
            self._known.move_to_end(group)
        while len(self._known) > _MAX_GROUPS:
            self._known.popitem(last=False)

    def learn(self, others: Mapping[str, History]) -> None:
        """Add the histories of groups that are not known yet.

        ``others`` maps digests of groups to histories, the most recently updated one last. When the
        number of groups exceeds its limit, groups of ``others`` are dropped first, beginning with
        the first one; groups that were already known are dropped after them.
        """
        for group, history in reversed([*others.items()]):
            if group == _ALL:
                self._all = self._all if self._all.outputs else history
            elif group not in self._known and len(self._known) < _MAX_GROUPS:
                self._known[group] = history
                self._known.move_to_end(group, last=False)

    def as_dict(self) -> dict[str, History]:
        """Return the histories by digest of the group, the most recently updated one last.

        The key "all" has the history of all requests.
        """
        return {_ALL: self._all, **self._known}


#: Distance of the two QUANTILES of a normal distribution, in standard deviations.
_APART = NormalDist().inv_cdf(QUANTILES[1]) - NormalDist().inv_cdf(QUANTILES[0])
#: Largest sigma of a predicted length. With a larger one, the mean of the log-normal distribution
#: would exceed its 0.9 quantile. Outputs that are either short or long have quantiles so far apart,
#: but not so large a mean.
_WIDEST = 2 * _APART
#: Share of outputs that are shorter than the predicted least length.
LEAST = 0.05
_LEAST_Z = NormalDist().inv_cdf(LEAST)
#: Bounds of the natural logarithm of a length in tokens.
_SHORTEST, _LONGEST = 0.0, log(1 << 30)


@dataclass(frozen=True, slots=True)
class Guess:
    """Prediction of a request's outputs by the trained model, whether it is trusted or not.

    The model's quantiles are corrected by the lengths of earlier outputs. ``logs`` are the natural
    logarithms of the corrected QUANTILES of an output's length in tokens. ``least_log`` is the
    logarithm of the corrected quantile LEAST. ``length`` is the distribution with the quantiles in
    ``logs``, limited to 1 to 2^30 tokens and put in ascending order; its sigma is at most
    ``_WIDEST``. ``uncorrected`` has the logarithms of QUANTILES, and then that of LEAST, before
    correction. The only features of the request that are kept are its ``groups``, to save memory.
    """

    groups: tuple[str, ...]
    uncorrected: tuple[float, ...]
    logs: tuple[float, ...]
    least_log: float
    length: LengthDistribution
    #: expected tokens of one output
    tokens: int

    @property
    def least_tokens(self) -> int:
        """Number of tokens that 95 % of such outputs reach, as predicted."""
        return int(exp(min(max(_SHORTEST, self.least_log), _LONGEST)))


class Learned:
    """Predictor that uses a trained model, and corrects it by the outputs that end."""

    def __init__(self, model: Model, histories: Histories, min_tau: float) -> None:
        """Create the predictor from a trained model and the ``histories`` of ended outputs.

        Predictions are not trusted while Kendall's tau between predicted and actual lengths is
        below ``min_tau``.
        """
        self._forest = model.forest
        self._histories = histories
        self._corrections = Corrections((*QUANTILES, LEAST))
        self.trust = Trust(min_tau, model.tau)

    def guess(self, request_features: RequestFeatures) -> Guess:
        logs = self._forest.sums(self._histories.features(request_features))
        group, uncorrected = narrowest(request_features.groups), (*logs, _least_log(logs))
        *corrected, least_log = self._corrections.apply(group, uncorrected)
        length = _length(corrected)
        tokens = length.expected_remaining(0, request_features.max_tokens)
        return Guess(
            request_features.groups, uncorrected, tuple(corrected), least_log, length, tokens
        )

    def note(self, guess: Guess, num_tokens: int) -> None:
        """Record an output that ended by itself or by its ``max_tokens``.

        ``guess`` is the prediction for its request, ``num_tokens`` the output's actual length.
        """
        log_length = log(max(1, num_tokens))
        self._histories.note(guess.groups, log_length)
        self._corrections.note(narrowest(guess.groups), guess.uncorrected, log_length)
        within = [log_length <= each for each in guess.logs]
        self.trust.note(guess.tokens, within, num_tokens)

    def note_cut_off(self, guess: Guess, num_tokens: int) -> None:
        """Record an output that was cut off after ``num_tokens`` tokens and would have been longer.

        ``guess`` is the prediction for its request.
        """
        group = narrowest(guess.groups)
        self._corrections.note_longer(group, guess.uncorrected, log(num_tokens + 1))


def _least_log(logs: Sequence[float]) -> float:
    length = _length(logs)
    return log(length.median) + length.sigma * _LEAST_Z


def _length(logs: Sequence[float]) -> LengthDistribution:
    low, high = sorted(min(max(_SHORTEST, each), _LONGEST) for each in logs)
    return LengthDistribution(exp(low), min(_WIDEST, (high - low) / _APART))


#: One in this many requests is admitted without regard to its predicted least length.
_TRIALS = 20


@dataclass(frozen=True, slots=True)
class Prediction:
    """Prediction of the output lengths of one request, made when the request arrives.

    ``length`` is the distribution of the length of a single output, which may exceed
    ``max_tokens``. If only ``max_tokens`` can end the outputs, every length is ``max_tokens``.
    ``queue_key`` contains the values by which queue policies order the request. ``guess`` is the
    trained model's prediction, which is None if no model is loaded or if only ``max_tokens`` can
    end the outputs.
    """

    length: LengthDistribution
    #: expected tokens of all outputs together
    output_tokens: int = 0
    #: leading prompt tokens that some worker had in its prefix cache
    cached_tokens: int = 0
    #: uncached prompt tokens and ``output_tokens`` together
    work_tokens: int = 0
    #: tokens that a single output reaches with a probability of about 95 % or more
    least_tokens: int = 1
    queue_key: QueueKey = BY_ARRIVAL
    guess: Guess | None = None
    #: predictor that made ``guess``
    learned: Learned | None = None
    #: whether only ``max_tokens`` can end an output
    is_certain: bool = False
    #: whether a model is loaded, and the order of its predictions is not trusted
    is_distrusted: bool = False


def _is_trial(request: Request) -> bool:
    """Return whether a request is a trial: one request in about 20, chosen by a hash of its id.

    The trained model's prediction does not affect the ``least_tokens`` of a trial, so a trial is
    not rejected because of its predicted length. The true lengths of rejected requests remain
    unknown, so without trials a wrong model would never be corrected.
    """
    return crc32(request.request_id.encode()) % _TRIALS == 0


#: Prediction of a request before one has been made.
NOTHING = Prediction(LengthDistribution(0.0), is_certain=True)


class Predictor:
    """Predictor of output lengths, with a trained model or without one."""

    def __init__(self, tokenizer: Vocabulary, served: str, min_tau: float) -> None:
        """Create a predictor of the outputs of the model named ``served``.

        The predictions of a trained model are not trusted while Kendall's tau between predicted and
        actual lengths is below ``min_tau``.
        """
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
        """Trust in the predictions of the trained model; None if no model is loaded."""
        return None if self._learned is None else self._learned.trust

    def load(self, model: Model) -> None:
        """Use this trained model from now on, in place of any earlier one.

        Raises ValueError if it was trained on the outputs of another model than the served one.
        """
        if model.served != self._served:
            raise ValueError(
                f"was trained for the model {model.served!r}, but {self._served!r} is served"
            )
        self._histories.learn(model.histories)
        self._learned = Learned(model, self._histories, self._min_tau)

    def predict(self, request: Request, arrived: float, cached_tokens: int = 0) -> Prediction:
        """Return the prediction for ``request``, which arrived at ``arrived``.

        ``arrived`` is ledger time in seconds. The first ``cached_tokens`` tokens of the prompt are
        in the prefix cache of a worker, and do not count as work.
        """
        prediction = self._predict_length(request, arrived)
        output_tokens = request.n * prediction.length.expected_remaining(0, request.max_tokens)
        work_tokens = len(request.prompt_ids) - cached_tokens + output_tokens
        return replace(
            prediction,
            output_tokens=output_tokens,
            least_tokens=self._least_tokens(request, prediction),
            cached_tokens=cached_tokens,
            work_tokens=work_tokens,
            queue_key=self._queue_key(work_tokens, output_tokens),
            is_distrusted=self._is_distrusted,
        )

    def _least_tokens(self, request: Request, prediction: Prediction) -> int:
        if prediction.is_certain:
            return request.max_tokens
        least = max(1, request.sampling.min_tokens)
        if prediction.guess is None or self._is_distrusted or _is_trial(request):
            return least
        return min(max(least, prediction.guess.least_tokens), request.max_tokens)

    def _queue_key(self, work_tokens: int, output_tokens: int) -> QueueKey:
        if self._is_distrusted:
            return BY_ARRIVAL
        work_rank = self._work_ranks.rank(work_tokens)
        # Without a model all outputs have the same prediction, so no request yields by its rank.
        rank = 0.0 if self._learned is None else self._ranks.rank(output_tokens)
        return QueueKey(work_tokens, rank, work_rank)

    @property
    def _is_distrusted(self) -> bool:
        return self.trust is not None and not self.trust.is_trusted

    def _predict_length(self, request: Request, arrived: float) -> Prediction:
        ends_by_itself = request.stop or request.stop_token_ids or request.sampling.grammar
        if not ends_by_itself:
            return Prediction(LengthDistribution(request.max_tokens), is_certain=True)
        if self._learned is None:
            return Prediction(LengthDistribution(self._lengths.mean))
        guess = self._learned.guess(extract_features(request, self._tokenizer, arrived))
        length = LengthDistribution(self._lengths.mean) if self._is_distrusted else guess.length
        return Prediction(length, guess=guess, learned=self._learned)

    def note(self, prediction: Prediction, num_tokens: int) -> bool:
        """Record an output of the predicted request that ended by itself or by its ``max_tokens``.

        Return True if predictions thereby became trusted or ceased to be trusted, else False.
        """
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
        """Record an output that its request's deadline cut off after ``num_tokens`` tokens."""
        guess, learned = prediction.guess, prediction.learned
        if guess is not None and learned is not None and learned is self._learned:
            learned.note_cut_off(guess, num_tokens)
