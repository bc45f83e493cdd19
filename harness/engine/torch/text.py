"""Text to tokens and back, with the tokenizer and chat template of a model folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ....workloads.parsing import read_json_object
from .torch_errors import ModelError


class Text:
    """The tokenizer of a folder; without one, prompts must be token ids and answers have none."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer: Any = None
        if (folder / "tokenizer.json").is_file():
            try:
                self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            except Exception as error:  # the package raises no type of its own
                raise ModelError(f"{folder}/tokenizer.json cannot be read: {error}") from None
        config = folder / "tokenizer_config.json"
        self._fields = read_json_object(config) if config.is_file() else {}
        apart = folder / "chat_template.jinja"
        self._template = apart.read_text("utf-8") if apart.is_file() else None
        template = self._fields.get("chat_template")
        if self._template is None and isinstance(template, str):
            self._template = template

    def tokens(self, text: str, *, special: bool = True) -> list[int]:
        """`special`: with those that begin a text.

        Raises:
            ModelError: there is no tokenizer.
        """
        if self._tokenizer is None:
            raise ModelError("this model has no tokenizer.json: give the prompt as token ids")
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        return token_ids

    def chat(self, messages: Sequence[Any]) -> list[int]:
        """The prompt that a conversation makes.

        Raises:
            ModelError: the folder has no chat template, or it refuses these messages.
        """
        if self._template is None:
            raise ModelError("this model has no chat template: use /v1/completions")
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)

        def refuse(message: str) -> None:
            raise TemplateError(message)

        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        special_tokens = {name: _word(self._fields.get(name)) for name in names}
        try:
            template = environment.from_string(self._template)
            text = template.render(
                messages=messages,
                add_generation_prompt=True,
                raise_exception=refuse,
                **special_tokens,
            )
        except TemplateError as error:
            raise ModelError(f"the chat template refuses these messages: {error}") from None
        return self.tokens(text, special=False)

    def decoded(self, tokens: Sequence[int]) -> str:
        """Without special tokens; empty without a tokenizer."""
        if self._tokenizer is None:
            return ""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text


def _word(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")


class TextStream:
    """An answer's text as it grows: half a character is held back until it is whole."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._tokens: list[int] = []
        self._from = self._read = 0  # decoded together; of these given out

    def add(self, token: int) -> str:
        """Add a token and return the text that is complete now."""
        self._tokens.append(token)
        return self._more(whole=False)

    def rest(self) -> str:
        """Return the text that was held back."""
        return self._more(whole=True)

    def _more(self, *, whole: bool) -> str:
        # With the token before, since some tokenizers drop a space at the beginning.
        previous = self._text.decoded(self._tokens[self._from : self._read])
        text = self._text.decoded(self._tokens[self._from :])
        if len(text) <= len(previous) or (text.endswith("\ufffd") and not whole):
            return ""
        self._from, self._read = self._read, len(self._tokens)
        return text[len(previous) :]
