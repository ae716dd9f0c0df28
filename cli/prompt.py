"""From a person's text to the token ids that the model continues."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from tfm.cli.options import group
from tfm.cli.text import parse_ids
from tfm.cli.values import TEXT
from tfm.engine.errors import TfmError

if TYPE_CHECKING:
    from tfm.engine.tokenizer import Tokenizer


@dataclass(frozen=True)
class PromptOptions:
    """How the text is put to the model."""

    system: str | None
    prefill: str | None
    raw: bool
    no_special: bool
    ids: bool

    def check(self) -> None:
        """Raises UsageError for options that contradict each other."""
        for name in ("system", "prefill", "no_special"):
            if getattr(self, name) not in (None, False):
                option = f"--{name.replace('_', '-')}"
                if self.ids:
                    raise click.UsageError(f"{option} is for text, and --ids takes token ids.")
                if self.raw and name != "no_special":
                    raise click.UsageError(f"{option} is for a chat, and --raw continues the text as it is.")

    def encode(self, tokenizer: "Tokenizer", text: str) -> list[int]:
        """The ids of text: of a conversation where the model has a chat template, else as it is."""
        if self.ids:
            return parse_ids(text)
        if not self.raw and tokenizer.has_chat_template:
            system = [] if self.system is None else [{"role": "system", "content": self.system}]
            return tokenizer.chat_ids([*system, {"role": "user", "content": text}], prefill=self.prefill)
        if self.system is not None or self.prefill is not None:
            option = "--prefill" if self.system is None else "--system"
            raise TfmError(f"{option}: this model has no chat template", do="use a model that was made for chat")
        ids = tokenizer.encode(text, parse_special=not self.no_special)
        if text and not ids:
            found = "a text of which this tokenizer makes no token"
            raise TfmError("prompt", found, "a text in the letters that its vocabulary has", "use another model")
        return ids


chat_options = [
    click.option("-s", "--system", type=TEXT, help="What the model is told before the prompt."),
    click.option("--prefill", type=TEXT, help="The start of the answer, for the model to go on from."),
    click.option("--raw", is_flag=True, help="Continue the text as it is, without the model's chat template."),
    click.option("--no-special", is_flag=True, help="With --raw: names of control tokens in the text are only text."),
]  # fmt: skip
prompt_options = group("prompt", PromptOptions, [
    *chat_options,
    click.option("--ids", is_flag=True, help="The prompt is token ids, and so is the answer."),
])  # fmt: skip
