"""An answer as it comes: what it consists of, when it came, and the object of --json."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfm.engine.generate import Token
    from tfm.engine.model import Model
    from tfm.engine.tokenizer import Tokenizer


@dataclass
class Answer:
    """The tokens of one answer. The moments are of time.perf_counter: begin, model loaded, first and last token."""

    begun_s: float
    loaded_s: float
    prompt_tokens: int
    tokens: list["Token"] = field(default_factory=list)
    first_s: float | None = None
    last_s: float | None = None
    is_whole: bool = False
    cached_tokens: int | None = None  # of the prompt, that came from a file; None where there was none to look in

    def follow(self, tokens: Iterable["Token"]) -> Iterator["Token"]:
        """tokens, noted as they pass."""
        for token in tokens:
            self.last_s = time.perf_counter()
            self.first_s = self.first_s or self.last_s
            self.tokens.append(token)
            yield token
        self.is_whole = True

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)

    @property
    def finish_reason(self) -> str | None:
        """ "length" also when no token was asked for; None for an answer that was broken off."""
        found = self.tokens[-1].finish_reason if self.tokens else None
        return found or ("length" if self.is_whole else None)

    def why_short(self, max_tokens: int, ctx: int) -> str | None:
        """Why it is shorter than the model would have it, for a person; None for one that ended by itself."""
        if self.finish_reason != "length":
            return None
        if len(self.tokens) < max_tokens:
            return f"the answer ends here: the context of {ctx} tokens is full"
        return f"the answer ends here: it has {len(self.tokens)} tokens, and -n allows no more"

    @property
    def prompt_tok_s(self) -> float | None:
        """Tokens of the prompt that were run, for each second until the first token of the answer."""
        run = self.prompt_tokens - (self.cached_tokens or 0)
        return None if self.first_s is None else run / (self.first_s - self.loaded_s)

    @property
    def decode_tok_s(self) -> float | None:
        """Tokens after the first for each second since then."""
        if self.first_s is None or self.last_s is None or self.last_s == self.first_s:
            return None
        return (len(self.tokens) - 1) / (self.last_s - self.first_s)

    def timings(self) -> dict[str, float | None]:
        """first_token_s counts from when the model was loaded, total_s from the begin; null where there is none."""
        values = {
            "load_s": self.loaded_s - self.begun_s,
            "first_token_s": None if self.first_s is None else self.first_s - self.loaded_s,
            "prompt_tok_s": self.prompt_tok_s,
            "decode_tok_s": self.decode_tok_s,
            "total_s": time.perf_counter() - self.begun_s,
        }
        return {name: None if value is None else round(value, 4) for name, value in values.items()}

    def report(self, model: "Model") -> list[str]:
        """Lines for a person. GB/s is what decoding reads: the matrices, and the keys and values of the context."""
        memory = model.memory()
        context = self.prompt_tokens + len(self.tokens) / 2
        token_bytes = memory["decode_bytes"] + memory["kv_bytes_per_1000_tokens"] * context / 1000
        prompt, decode = f"prompt  {self.prompt_tokens} tokens", f"decode  {len(self.tokens)} tokens"
        if self.first_s is not None and self.prompt_tok_s is not None:
            cached = "" if self.cached_tokens is None else f", {self.cached_tokens} from the prompt cache"
            prompt += f"{cached}, {self.prompt_tok_s:.1f} tok/s, first token after {self.first_s - self.loaded_s:.2f} s"
        if self.decode_tok_s is not None:
            decode += f", {self.decode_tok_s:.1f} tok/s, {self.decode_tok_s * token_bytes / 1e9:.1f} GB/s"
        return [
            f"load    {self.loaded_s - self.begun_s:.2f} s, {model.threads} threads",
            prompt,
            decode,
            f"memory  {peak_memory_bytes() / 1e6:.0f} MB at most",
        ]

    def as_json(
        self, model: "Model", seed: int | None, with_tokens: bool, ids_in_text: "IdsInText | None" = None
    ) -> dict[str, Any]:
        """The object that --json prints. completion_tokens counts the token that ended the text as well.

        ids_in_text, new for this answer, is for one that has the ids of its text.
        """
        details = self.details(model.tokenizer, with_tokens, ids_in_text)
        if self.cached_tokens is not None:
            details["cached_tokens"] = self.cached_tokens
        return self.facts(model, seed) | {"timings": self.timings()} | details

    def facts(self, model: "Model", seed: int | None) -> dict[str, Any]:
        """The part of the object that every answer has, but for the timings."""
        return {
            "text": self.text,
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": len(self.tokens),
            "model": model.name,
            "seed": seed,
        }

    def details(
        self, tokenizer: "Tokenizer", with_tokens: bool, ids_in_text: "IdsInText | None" = None
    ) -> dict[str, Any]:
        """The part that was asked for."""
        result: dict[str, Any] = {}
        if ids_in_text is not None:
            result["ids"] = [id_ for token in self.tokens for id_ in ids_in_text.push(token)]
        if with_tokens:
            result["tokens"] = [_token_as_json(token, tokenizer) for token in self.tokens]
        return result


def _token_as_json(token: "Token", tokenizer: "Tokenizer") -> dict[str, Any]:
    top = [piece_as_json(id_, tokenizer.token_bytes(id_)) | {"logprob": logprob} for id_, logprob in token.top]
    return piece_as_json(token.id, token.bytes) | {"logprob": token.logprob, "top": top}


def piece_as_json(id_: int, data: bytes) -> dict[str, Any]:
    """A token by itself: its bytes may be a part of a character only, and then its text shows U+FFFD."""
    return {"id": id_, "text": data.decode("utf-8", "replace"), "bytes": list(data)}


def peak_memory_bytes() -> int:
    """The most memory that this process has had."""
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class IdsInText:
    """Which tokens belong to the text that is shown: a stop text may be held back, and then its tokens are."""

    def __init__(self, tokenizer: "Tokenizer", last_prompt_id: int | None) -> None:
        special = last_prompt_id is not None and tokenizer.is_special(last_prompt_id)
        self._decoder = tokenizer.stream(continues=not special)
        self._waiting: list[tuple[int, int, bool]] = []  # id, length of the text with it, whether it made it longer
        self._made = self._shown = 0

    def push(self, token: "Token") -> list[int]:
        """The ids that are certain now that token is there. One in mid-character waits for those that complete it."""
        grown = len(self._decoder.push(token.id))
        self._made += grown
        self._shown += len(token.text)
        self._waiting.append((token.id, self._made, grown > 0))
        if token.finish_reason == "length" or (token.finish_reason and grown and self._made == self._shown):
            return self._take(len(self._waiting))  # the limit, or a constraint after which nothing may follow
        if token.finish_reason == "stop":
            self._waiting.pop()
            if not grown:  # an end-of-text token, no stop text
                return self._take(len(self._waiting))
        certain = (i + 1 for i, (_, end, longer) in enumerate(self._waiting) if longer and end <= self._shown)
        return self._take(max(certain, default=0))

    def _take(self, count: int) -> list[int]:
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return [id_ for id_, _, _ in taken]
