"""A prompt's continuation, token by token, as text that can be shown at once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tfm.engine.errors import TfmError
from tfm.engine.progress import Progress, silent
from tfm.engine.sampling import SamplingParams, sample

if TYPE_CHECKING:
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

    def __init__(self, stops: Sequence[str]) -> None:
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


def generate(
    model: "Model",
    ids: Sequence[int],
    max_tokens: int = 1024,
    sampling: SamplingParams | None = None,
    stop: Sequence[str] = (),
    logprobs: int = 0,
    chunk: int = 512,
    progress: Progress = silent,
) -> Iterator[Token]:
    """Continue ids by at most max_tokens tokens; sampling None is greedy.

    A stop text ends the answer before it, also when it is the name of a control token; only generated text is searched.
    logprobs is how many of the likeliest tokens to report with each, chunk how many tokens of the prompt to run at once
    (the result is the same); progress is told how much of it has been run. No ids at all stand for BOS alone. Raises
    TfmError, before the first token, for a prompt that does not fit the context and for options that do not make sense.
    """
    params = (sampling or SamplingParams()).seeded()
    params.check_ids(model.config.vocab_size)
    for name, value, least in (("max_tokens", max_tokens, 0), ("logprobs", logprobs, 0), ("chunk", chunk, 1)):
        if value < least:
            raise TfmError(name, value, f"a whole number from {least}")
    prompt = list(ids)
    if not prompt:
        if model.tokenizer.bos_id is None:
            raise TfmError("prompt", "no tokens", "at least one: this model has no BOS token to start from")
        prompt = [model.tokenizer.bos_id]
    if len(prompt) > model.ctx:
        raise model.too_long(len(prompt))
    finder = StopFinder(stop)
    most = min(max_tokens, model.ctx - len(prompt) + 1)
    return _tokens(model, prompt, most, params, finder, _ending_ids(model, stop), logprobs, chunk, progress)


def _ending_ids(model: "Model", stop: Sequence[str]) -> frozenset[int]:
    """EOS, and control tokens whose names are stop texts: generated text never shows those."""
    named = (model.tokenizer.hidden.get(text) for text in stop)
    return model.tokenizer.eos_ids | {id_ for id_ in named if id_ is not None}


def _tokens(
    model: "Model",
    prompt: list[int],
    most: int,
    params: SamplingParams,
    finder: StopFinder,
    ending_ids: frozenset[int],
    logprobs: int,
    chunk: int,
    progress: Progress,
) -> Iterator[Token]:
    if most == 0:
        return
    assert params.seed is not None
    tokenizer = model.tokenizer
    decoder = tokenizer.stream(continues=not tokenizer.is_special(prompt[-1]))
    answer: list[int] = []
    with model.sequence() as sequence:
        last = (len(prompt) - 1) // chunk * chunk
        for begin in range(0, last, chunk):
            model.step([(sequence, prompt[begin : begin + chunk])], "none")
            progress("reading the prompt", begin + chunk, len(prompt))
        new = prompt[last:]
        for count in range(1, most + 1):
            logits_V = model.step([(sequence, new)])[0]
            chosen = sample(logits_V, params, params.seed, sequence.length, prompt, answer, logprobs)
            text = "" if chosen.id in ending_ids else finder.push(decoder.push(chosen.id))
            finish: FinishReason | None = None
            if chosen.id in ending_ids or finder.found:
                finish = "stop"
            elif count == most:
                finish = "length"
            if finish is not None and not finder.found:
                text += finder.push(decoder.flush()) + finder.flush()
            data = tokenizer.token_bytes(chosen.id)
            yield Token(chosen.id, text, chosen.logprob, data, chosen.top, finish)
            if finish is not None:
                return
            answer.append(chosen.id)
            new = [chosen.id]
