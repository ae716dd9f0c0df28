"""A prompt's continuation, token by token, as text that can be shown at once."""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tfm.engine.errors import TfmError
from tfm.engine.progress import Progress, silent
from tfm.engine.sampling import Logits, sample
from tfm.engine.sampling_params import SamplingParams
from tfm.engine.speculation import PromptLookup

if TYPE_CHECKING:
    from tfm.engine.cache import Sequence
    from tfm.engine.constraint import Constraint
    from tfm.engine.model import Model

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Token:
    """One generated token.

    text is what may be shown now that the token is there; all texts together are the answer. It is "" in mid-character,
    and where what could be the start of a stop text is held back. bytes are the token's own. logprob is the log-softmax
    of the model's logits at id, top the likeliest (id, logprob). finish_reason is on the last token only: "stop" for an
    end-of-text token or a stop text, "length" when max_tokens or the context is used up.
    """

    id: int
    text: str
    logprob: float
    bytes: bytes
    top: tuple[tuple[int, float], ...] = ()
    finish_reason: FinishReason | None = None


class StopFinder:
    """Looks for the stop texts in a stream and holds back what may be the start of one.

    The stop that is complete first ends the text, so it does not matter how the stream is cut; of two that end together
    the one that starts first.
    """

    def __init__(self, stops: Items[str]) -> None:
        if isinstance(stops, str):
            raise TfmError("stop", repr(stops), "a list of texts")
        if "" in stops:
            raise TfmError("stop", "an empty text", "at least one character")
        self._stops = tuple(dict.fromkeys(stops))
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """The text that is certain not to be part of a stop; "" once one was found."""
        if self.found or not self._stops:
            return "" if self.found else text
        held = self._held + text
        places = [(start + len(stop), start) for stop in self._stops if (start := held.find(stop)) >= 0]
        if places:
            self.found, self._held = True, ""
            return held[: min(places)[1]]
        keep = max(_overlap(held, stop) for stop in self._stops)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def flush(self) -> str:
        """What is held back, at the end of the stream."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest start of stop, short of all of it, with which text ends."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


@dataclass(frozen=True)
class Request:
    """A prompt and how it is to be continued; sampling None is greedy.

    A stop text ends the answer before it, also when it is the name of a control token; only generated text is searched.
    logprobs is how many of the likeliest tokens to report with each. constraint, new for this request, says what may
    follow. No ids at all stand for BOS alone.
    """

    ids: Items[int]
    max_tokens: int = 1024
    sampling: SamplingParams | None = None
    stop: Items[str] = ()
    logprobs: int = 0
    constraint: "Constraint | None" = None


class Continuation:
    """A request on its way: the text so far, and what the next logits make of it.

    prompt and answer are token ids; most is how many tokens the answer may have, in the request and in the context.
    Raises TfmError for a prompt that does not fit the context and for options that do not make sense.
    """

    def __init__(self, model: "Model", request: Request) -> None:
        self._params = (request.sampling or SamplingParams()).seeded()
        self._params.check_ids(model.config.vocab_size)
        for name, value in (("max_tokens", request.max_tokens), ("logprobs", request.logprobs)):
            if value < 0:
                raise TfmError(name, value, "a whole number from 0")
        self._tokenizer, self._logprobs, self._constraint = model.tokenizer, request.logprobs, request.constraint
        self.prompt = model.checked(request.ids) or [_bos_id(model)]
        if len(self.prompt) > model.ctx:
            raise model.too_long(len(self.prompt))
        self.answer: list[int] = []
        self.most = min(request.max_tokens, model.ctx - len(self.prompt) + 1)
        self._finder = StopFinder(request.stop)
        self._ending_ids = _ending_ids(model, request.stop)
        self._decoder = model.tokenizer.stream(continues=not model.tokenizer.is_special(self.prompt[-1]))

    def take(self, logits_V: Logits) -> Token:
        """The next token of the answer, chosen by the logits after what is there."""
        assert self._params.seed is not None
        constraint = self._constraint
        position = len(self.prompt) + len(self.answer)
        chosen = sample(
            logits_V, self._params, self._params.seed, position, self.prompt, self.answer, self._logprobs, constraint
        )
        self.answer.append(chosen.id)
        is_end = chosen.id in self._ending_ids
        if constraint is not None and not is_end:
            constraint.accept(chosen.id)
        text = "" if is_end else self._finder.push(self._decoder.push(chosen.id))
        finish: FinishReason | None = None
        if is_end or self._finder.found or (constraint is not None and constraint.is_finished):
            finish = "stop"
        elif len(self.answer) == self.most:
            finish = "length"
        if finish is not None and not self._finder.found:
            text += self._finder.push(self._decoder.flush()) + self._finder.flush()
        data = self._tokenizer.token_bytes(chosen.id)
        return Token(chosen.id, text, chosen.logprob, data, chosen.top, finish)


def _bos_id(model: "Model") -> int:
    """What stands for a prompt without a token."""
    if model.tokenizer.bos_id is None:
        raise TfmError("prompt", "no tokens", "at least one: this model has no BOS token to start from")
    return model.tokenizer.bos_id


def _ending_ids(model: "Model", stop: Items[str]) -> frozenset[int]:
    """EOS, and control tokens whose names are stop texts: generated text never shows those."""
    named = (model.tokenizer.hidden.get(text) for text in stop)
    return model.tokenizer.eos_ids | {id_ for id_ in named if id_ is not None}


def generate(
    model: "Model",
    request: Request,
    chunk: int = 512,
    progress: Progress = silent,
    sequence: "Sequence | None" = None,
    speculate: int = 0,
) -> Iterator[Token]:
    """Continue a request's prompt, token by token.

    chunk is how many tokens of the prompt to run at once, speculate how many tokens to propose for a step (see
    speculation.py): the result is the same. progress is told how much of the prompt has been run. A sequence that is
    given keeps what it has of the prompt, which then is not run again, and stays open. Raises TfmError before the first
    token for what Continuation refuses.
    """
    for name, value, least in (("chunk", chunk, 1), ("speculate", speculate, 0)):
        if value < least:
            raise TfmError(name, value, f"a whole number from {least}")
    return _tokens(model, Continuation(model, request), chunk, progress, sequence, speculate)


def _tokens(
    model: "Model",
    text: Continuation,
    chunk: int,
    progress: Progress,
    sequence: "Sequence | None",
    speculate: int,
) -> Iterator[Token]:
    if text.most == 0:
        return
    if sequence is None:
        with model.sequence() as own:
            yield from _tokens(model, text, chunk, progress, own, speculate)
        return
    prompt = text.prompt
    begin = sequence.keep(prompt)
    while len(prompt) - begin > chunk:
        model.step([(sequence, prompt[begin : begin + chunk])], "none")
        begin += chunk
        progress("reading the prompt", begin, len(prompt))
    token = text.take(model.step([(sequence, prompt[begin:])])[0])
    yield token
    lookup = PromptLookup([*prompt, token.id], speculate) if speculate else None
    while token.finish_reason is None:
        proposed = [] if lookup is None else lookup.propose(text.most - len(text.answer) - 1)
        before = len(text.answer)
        logits = model.step([(sequence, [token.id, *proposed])], "all")
        for logits_V, guess in zip(logits, [*proposed, None], strict=True):
            token = text.take(logits_V)
            yield token
            if token.finish_reason is not None or token.id != guess:
                break
        if lookup is not None:
            lookup.push(text.answer[before:])
        sequence.truncate(len(prompt) + len(text.answer) - 1)
