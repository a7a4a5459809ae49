"""Conversations to prompts, by the Jinja template that a model ships."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .model_config import ModelError

_PLAIN = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


class ChatTemplate:
    """A compiled template; rendering is sandboxed, since templates come with downloaded models."""

    def __init__(self, source: str, bos_token: str = "") -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ModelError(f"the chat template does not parse: {error}") from error
        self._bos_token = bos_token

    @classmethod
    def plain(cls) -> ChatTemplate:
        """One line per message, for models without a template."""
        return cls(_PLAIN)

    def render(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> str:
        """The prompt text. Raises ValueError for messages that the template refuses."""
        try:
            return self._template.render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                bos_token=self._bos_token,
            )
        except (TemplateError, TypeError) as error:
            raise ValueError(f"the chat template refused the messages: {error}") from error


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
