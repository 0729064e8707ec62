"""ChatFormat: messages -> prompt tokens, sampled tokens -> messages, for one tokenizer."""

from __future__ import annotations

from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from asyncgrpo_core.errors import ConfigError
from asyncgrpo_core.rollout.chat import forks
from asyncgrpo_core.rollout.chat.families import Family, recognise
from asyncgrpo_core.rollout.chat.parsing import CALLS, ParsedReply, ReplyReader
from asyncgrpo_core.rollout.chat.samples import SAMPLE_TOOLS

# Stands for the reply whose surroundings are wanted; characters that no template and no model writes.
_MARK = "\ue0f0reply\ue0f1"
_TAIL_TOKENS = 64  # of a prompt, decoded to find what it wrote of the reply


class ChatFormat:
    """How one tokenizer's conversations are rendered and its replies read.

    With tools, a rollout's prompt should go on exactly where the turn before ended; else the turn starts a new sample
    (a fork). Of a known family, the tokenizer's own template is kept when a trial shows that it does so. When it does
    not, it renders the first prompt only (so that this is always the original's), and the family's continuation
    template renders what follows, each reply as its exact text.

    Args:
        tokenizer: with a chat template; without tools, `apply_chat_template` and `decode` are all that is used.
        tools_on: replies are searched for tool calls.
        template_kwargs: the config's chat_template_kwargs; they reach the template.
        turn_prompts: "render" renders the whole conversation each turn; "append" keeps the tokens so far and adds
            those of what the template puts after the reply.

    Attributes:
        family: name of the known model family, None without tools or when it is unknown.
        continues: whether the family's continuation template is in use.

    Raises:
        ConfigError: with tools, there is no chat template, or nothing says how to read replies.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        tools_on: bool = False,
        template_kwargs: dict[str, Any] | None = None,
        turn_prompts: str = "render",
    ) -> None:
        if turn_prompts not in ("render", "append"):
            raise ConfigError(f"turn_prompts={turn_prompts!r} is unknown.", 'Use "render" or "append".')
        self.tokenizer = tokenizer
        # the Rust tokenizer itself: transformers' wrapping of ids costs as much as the tokens do
        self._backend = tokenizer.backend_tokenizer if getattr(tokenizer, "is_fast", False) else None
        if self._backend is not None:
            self._backend.no_truncation()  # as transformers does before every call
            self._backend.no_padding()
        self.tools_on = tools_on
        self.template_kwargs = dict(template_kwargs or {})
        self.turn_prompts = turn_prompts
        self.known: Family | None = None
        self.reader: ReplyReader | None = None
        self.continues = False
        self.prefill = ""  # what a prompt writes of the reply that follows, e.g. an empty reasoning block
        self._text_replies = False
        self._closing_ids: frozenset[int] = frozenset()
        self._end_ids: frozenset[int] = frozenset()
        if tools_on:
            self._set_up()
        self._find_ends()
        if tools_on:
            self._choose_template()

    @property
    def family(self) -> str | None:
        return self.known.name if self.known is not None else None

    # prompts

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> list[int]:
        """Token ids of the conversation, ready for the assistant's reply."""
        if not self.tools_on:
            extra = {"tools": tools} if tools else {}
            if self._backend is not None:
                text = self.tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, tokenize=False, **extra, **self.template_kwargs
                )
                return self.encode(text)
            ids = self.tokenizer.apply_chat_template(
                messages,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                **extra,
                **self.template_kwargs,
            )
            return list(ids)
        return self.encode(self.render_text(messages, tools))

    def next_prompt(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        prompt_ids: list[int],
        output_ids: list[int],
        reply_index: int,
    ) -> list[int]:
        """Prompt of a later turn.

        Args:
            messages: the whole conversation; messages[reply_index] is the latest reply, others follow it.
            tools: the tools' JSON schemas.
            prompt_ids, output_ids: tokens of the turn that made the reply.
            reply_index: index of the reply in messages.
        """
        if self.turn_prompts == "render":
            return self.render(messages, tools)
        suffix = self.encode(self._text_after(messages, tools, reply_index))
        if output_ids and suffix:
            last, first = output_ids[-1], suffix[0]
            # the model has ended its reply itself, if with another end mark than the template's
            if (last == first and last in self._end_ids) or (last in self._closing_ids and first in self._closing_ids):
                suffix = suffix[1:]
        return [*prompt_ids, *output_ids, *suffix]

    def render_text(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, generation: bool = True
    ) -> str:
        """The conversation as text; with `generation`, up to where the assistant's reply begins."""
        start = len(messages)
        if self.continues:
            start = next((i for i, message in enumerate(messages) if "raw" in message), start)
        head = messages[:start]
        text = self.own_text(head, tools, generation or start < len(messages))
        if start == len(messages):
            return text
        assert self.known is not None
        rendered: Any = render_jinja_template(  # ([text], indices); declared as str
            conversations=[[self._with_raw(message) for message in messages[start:]]],
            chat_template=self.known.continuation(),
            add_generation_prompt=generation,
            **{"prefill": self.prefill, **self.template_kwargs},
        )
        return text + rendered[0][0]

    def encode(self, text: str) -> list[int]:
        """Token ids of text with its special tokens. A lone surrogate, as a tool may return, becomes "?"."""
        if not text.isascii():
            text = text.encode("utf-8", "replace").decode("utf-8")  # tokenizers raises on it
        if self._backend is not None:
            return self._backend.encode(text, add_special_tokens=False).ids
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: list[int]) -> str:
        """Text of token ids, special tokens included."""
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    # replies

    def plain_text(self, ids: list[int]) -> str:
        """Text of token ids without special tokens."""
        if self._backend is not None and not self.tokenizer.clean_up_tokenization_spaces:
            return self._backend.decode(ids, skip_special_tokens=True)
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def parse(
        self, prompt_ids: list[int], output_ids: list[int], tools: list[dict[str, Any]] | None = None
    ) -> ParsedReply:
        """Read a sampled reply; never raises on model output.

        Without tools the message is the text without special tokens. With tools it also has `raw`, the exact text.
        """
        if self.reader is None:
            content = self.plain_text(output_ids)
            return ParsedReply({"role": "assistant", "content": content})
        ended = bool(output_ids) and output_ids[-1] in self._end_ids
        text = self.decode(output_ids[:-1] if ended else output_ids)
        reply = self.reader.read(text, self._prefill_of(prompt_ids), tools)
        reply.message["raw"] = text
        return reply

    def _prefill_of(self, prompt_ids: list[int]) -> str:
        assert self.reader is not None
        tail = self.decode(prompt_ids[-_TAIL_TOKENS:])
        if len(prompt_ids) > _TAIL_TOKENS and not self.reader.template.start_anchor_re.search(tail):
            tail = self.decode(prompt_ids)
        return self.reader.prefill(tail)

    # set-up

    def _set_up(self) -> None:
        name = getattr(self.tokenizer, "name_or_path", "") or type(self.tokenizer).__name__
        try:
            source = self.tokenizer.get_chat_template(None, SAMPLE_TOOLS)
        except (AttributeError, ValueError) as error:
            raise ConfigError(
                f"The tokenizer {name} has no chat template, and tools need one.",
                "Use an instruct model's tokenizer, or set tokenizer.chat_template and save it with the model.",
            ) from error
        self.known = recognise(source)
        response = getattr(self.tokenizer, "response_template", None)
        if response is None and self.known is not None:
            response = self.known.response_template
        if response is None:
            raise ConfigError(
                f"Tools are on, but nothing says how tool calls are to be read from replies of {name}: its chat "
                "template is of no family that is known (Qwen2.5, Qwen3, Llama 3, DeepSeek-V3, GLM-4) and the "
                "tokenizer has no response_template.",
                "Set tokenizer.response_template (transformers: response parsing) and save it with the model, or use "
                "a model of a known family.",
            )
        try:
            self.reader = ReplyReader(self.tokenizer, response, self.known)
        except ValueError as error:
            raise ConfigError(f"The response_template of {name} is malformed: {error}.", "Correct it.") from error
        try:
            opening = self.own_text([_user("x")], SAMPLE_TOOLS, True)
        except Exception as error:  # a template may raise what it likes
            raise ConfigError(
                f"The chat template of {name} does not render a user message with tools: {error}.",
                "Correct the template, or chat_template_kwargs if it reads them.",
            ) from error
        self.prefill = self.reader.prefill(opening)

    def _find_ends(self) -> None:
        closing = self.known.turn_ends if self.known is not None else ()
        headers = self.known.next_headers if self.known is not None else ()
        header_ids = {self._token_id(token) for token in headers}
        ids = {self._token_id(token) for token in closing} | {getattr(self.tokenizer, "eos_token_id", None)}
        self._closing_ids = frozenset(i for i in ids - header_ids if isinstance(i, int))
        self._end_ids = self._closing_ids | frozenset(i for i in header_ids if isinstance(i, int))

    def _token_id(self, token: str) -> int | None:
        found = self.tokenizer.convert_tokens_to_ids(token)
        return None if found == getattr(self.tokenizer, "unk_token_id", None) else found

    def _choose_template(self) -> None:
        self._text_replies = forks.text_form_is_same(self)
        own_forks = forks.rendered_forks(self) if self.known is not None else 0
        if own_forks:
            self.continues = True
            # a dialect of the family keeps its own template: its format is the one that the model knows
            self.continues = forks.agrees_with_own(self) and forks.rendered_forks(self) < own_forks
        if self.turn_prompts == "append":
            sample = [_user("x"), {"role": "assistant", "content": "y", "raw": "y"}, _user("z")]
            self._text_after(sample, None, 1)

    def own_text(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, generation: bool) -> str:
        """By the tokenizer's own template."""
        return self.tokenizer.apply_chat_template(
            [self._own_form(message) for message in messages],
            tools=tools or None,
            add_generation_prompt=generation,
            tokenize=False,
            **self.template_kwargs,
        )

    def _own_form(self, message: dict[str, Any]) -> dict[str, Any]:
        if "raw" not in message:
            return message
        if self._text_replies:
            return {"role": "assistant", "content": self.prefill + message["raw"]}
        return {key: value for key, value in message.items() if key != "raw"}

    def _with_raw(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message for the continuation template, which knows replies by their text only."""
        if message.get("role") != "assistant" or "raw" in message:
            return message
        assert self.known is not None
        functions = [call.get("function", call) for call in message.get(CALLS) or []]
        calls = [(function["name"], function["arguments"]) for function in functions]
        text = self.known.write(message.get("content") or "", message.get("reasoning_content") or "", calls)
        return {**message, "raw": text}

    def _text_after(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, reply_index: int) -> str:
        """What the template puts after a reply: its end mark, the messages that follow, the next reply's header."""
        marked = list(messages)
        marked[reply_index] = {"role": "assistant", "content": _MARK}
        if self.continues or self._text_replies:
            marked[reply_index]["raw"] = _MARK
        _before, found, after = (
            self.render_text(marked, tools) if self.tools_on else self.own_text(marked, tools, True)
        ).partition(_MARK)
        if not found or _MARK in after:
            raise ConfigError(
                'turn_prompts="append" needs a chat template that shows an assistant\'s text once, and this '
                "tokenizer's does not.",
                'Set turn_prompts="render".',
            )
        return after


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}
