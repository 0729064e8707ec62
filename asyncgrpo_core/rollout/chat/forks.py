"""Trial conversations: does every turn's prompt go on exactly where the turn before ended?

A turn whose prompt does not begin with the tokens so far starts a new sample (a fork): more tokens are forwarded, none
is lost to training. The trial plays whole rollouts with made-up replies and says which transitions fork, and why.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from asyncgrpo_core.rollout.chat.parsing import tool_names
from asyncgrpo_core.rollout.chat.samples import (
    SAMPLE_TOOLS,
    SYSTEM,
    TOOL,
    USER,
    Reply,
    cannot_write,
    end_mark,
    may_reason,
    sample_call,
    sample_message,
    write_reply,
)

if TYPE_CHECKING:
    from asyncgrpo_core.rollout.chat.format import ChatFormat


@dataclass(frozen=True)
class Transition:
    """One step of a trial conversation: what was appended after a reply, and whether the prompt went on from there."""

    conversation: str
    appended: str
    keeps_prefix: bool
    reason: str = ""


@dataclass(frozen=True)
class ForkReport:
    """What the trial found.

    `template` says in words which template renders the conversations. `shows_tools`: the tools' names are in the
    first prompt.
    """

    template: str
    transitions: tuple[Transition, ...]
    shows_tools: bool = True

    @property
    def keeps_prefix(self) -> bool:
        return all(transition.keeps_prefix for transition in self.transitions)

    @property
    def text(self) -> str:
        """One paragraph for the log."""
        unseen = (
            ""
            if self.shows_tools
            else (" The template does not show the tools to the model: describe them in a system message.")
        )
        return self._forks_text() + unseen

    def _forks_text(self) -> str:
        if not self.transitions:
            return f"{self.template}: no trial conversation could be played, so nothing is known about forks."
        forks = [transition for transition in self.transitions if not transition.keeps_prefix]
        if not forks:
            return (
                f"{self.template}: all {len(self.transitions)} trial transitions go on from the tokens before, so a "
                "rollout's turns make one sample."
            )
        reasons: dict[str, list[str]] = {}
        for fork in forks:
            places = reasons.setdefault(fork.reason, [])
            if fork.conversation not in places:
                places.append(fork.conversation)
        listed = "; ".join(f"{reason} (in: {', '.join(places)})" for reason, places in reasons.items())
        return (
            f"{self.template}: {len(forks)} of {len(self.transitions)} trial transitions start a new sample: {listed}. "
            'Training stays right, at the cost of forwarding tokens again; turn_prompts="append" avoids it.'
        )


_SCRIPTS: dict[str, tuple[Reply | str, ...]] = {
    "plain": (USER, Reply("Hello."), USER, Reply("Bye."), USER),
    "white space around replies": (USER, Reply(" Hello. \n"), USER),
    "with a system message": (SYSTEM, USER, Reply("Hello."), USER, Reply("Bye."), USER),
    "reasoning": (USER, Reply("Two.", "One and one."), USER, Reply("Four.", "Two and two."), USER),
    "one call": (USER, Reply(calls=(0,)), TOOL, Reply("Sunny."), USER),
    "text and a call": (USER, Reply("Let me see.", calls=(0,)), TOOL, Reply("Sunny."), USER),
    "two calls": (USER, Reply(calls=(0, 1)), TOOL, TOOL, Reply("Done."), USER),
    "calls in a row": (USER, Reply(calls=(0,)), TOOL, Reply(calls=(1,)), TOOL, Reply("Done."), USER),
    "reasoning and calls": (
        USER,
        Reply(reasoning="I ask.", calls=(0,)),
        TOOL,
        Reply("Sunny.", "It says so."),
        USER,
        Reply("Bye.", "They leave."),
        USER,
    ),
    "JSON without spaces": (USER, Reply(calls=(0,), compact=True), TOOL),
}


def fork_report(chat: ChatFormat, tools: list[dict[str, Any]] | None = None) -> ForkReport:
    """Play the trial conversations as the run would, with its template, its kwargs and its turn_prompts.

    Args:
        chat: with tools on.
        tools: the run's tools' JSON schemas; samples when left out.
    """
    template = "The tokenizer's own chat template"
    if chat.continues:
        template = f"The training template of the {chat.family} family"
    if not chat.tools_on:
        return ForkReport(template, ())
    tools = tools or SAMPLE_TOOLS
    first = chat.render_text([sample_message(USER, 0)], tools)
    shown = all(name in first for name in tool_names(tools))
    return ForkReport(template, tuple(_play_all(chat, tools, by_text=False)), shown)


def rendered_forks(chat: ChatFormat) -> int:
    """How often whole-conversation rendering forks in the trial, with the template that `chat` has now.

    Text is compared, not tokens: how a tokenizer splits it is no fault of a template.
    """
    return sum(not transition.keeps_prefix for transition in _play_all(chat, SAMPLE_TOOLS, by_text=True))


def text_form_is_same(chat: ChatFormat) -> bool:
    """Whether the tokenizer's own template shows a reply with calls just as well when it is given as plain text."""
    sample = sample_call(chat)
    if sample is None or chat.reader is None:
        return False
    question, result = sample_message(USER, 0), sample_message(TOOL, 0)
    as_text = {"role": "assistant", "content": chat.prefill + sample}
    odd = ' a {"b":  1}\n\n<think>\nd</think> c \n'
    try:
        start = chat.own_text([question], SAMPLE_TOOLS, True)
        odd_reply = {"role": "assistant", "content": chat.prefill + odd}
        shown = chat.own_text([question, odd_reply, question], SAMPLE_TOOLS, True)
        second = chat.own_text([question, as_text, result], SAMPLE_TOOLS, True)
    except Exception:  # a template may raise what it likes; then it does not take text
        return False
    if not shown.startswith(start + odd) or not second.startswith(start + sample):
        return False
    try:
        structured = chat.reader.read(sample, chat.prefill, SAMPLE_TOOLS).message
        return chat.own_text([question, structured, result], SAMPLE_TOOLS, True) == second
    except Exception:  # it takes text and cannot take calls
        return str(result["content"]) in second


def agrees_with_own(chat: ChatFormat) -> bool:
    """Whether the continuation template writes what follows a reply as the tokenizer's own template does.

    Compared are an answer with a user message and a call with its result. Where its own refuses the call or leaves it
    out, there is nothing to agree with.
    """
    assert chat.reader is not None
    question, names = sample_message(USER, 0), sorted(tool_names(SAMPLE_TOOLS))
    start = chat.own_text([question], SAMPLE_TOOLS, True)
    for reply, following in ((Reply("Hello."), sample_message(USER, 2)), (Reply(calls=(0,)), sample_message(TOOL, 2))):
        text = write_reply(chat, [question], reply, names)
        if text is None:
            return False
        structured = chat.reader.read(text, chat.prefill, SAMPLE_TOOLS).message
        try:
            own = chat.own_text([question, structured, following], SAMPLE_TOOLS, True)
        except Exception:  # a template may raise what it likes
            if reply.calls:
                continue
            return False
        written = structured["content"] if not reply.calls else text
        if reply.calls and names[0] not in own[len(start) :]:
            continue
        ours = chat.render_text([question, {**structured, "raw": text}, following], SAMPLE_TOOLS)
        if written not in own or own.rpartition(written)[2] != ours.rpartition(written)[2]:
            return False
    return True


# -- playing ---------------------------------------------------------------------------------------------------


def _play_all(chat: ChatFormat, tools: list[dict[str, Any]], by_text: bool) -> list[Transition]:
    transitions: list[Transition] = []
    for name, script in _SCRIPTS.items():
        replies = [step for step in script if isinstance(step, Reply)]
        if any(reply.reasoning for reply in replies) and not may_reason(chat):
            continue
        if chat.known is not None and any(cannot_write(chat.known, reply) for reply in replies):
            continue
        transitions += _Player(chat, tools, by_text).play(name, script)
    return transitions


class _Player:
    """Plays one script: the prompts, the made-up replies, their parsing and what is appended."""

    def __init__(self, chat: ChatFormat, tools: list[dict[str, Any]], by_text: bool) -> None:
        self.chat, self.tools, self.by_text = chat, tools, by_text
        self.names = sorted(tool_names(tools)) or ["get_weather"]
        self.messages: list[dict[str, Any]] = []
        self.reasonings: list[str] = []

    def play(self, name: str, script: tuple[Reply | str, ...]) -> list[Transition]:
        transitions: list[Transition] = []
        prompt: list[int] | None = None
        held: list[int] = []
        reply: Reply | None = None
        text, index = "", 0
        for position, step in enumerate(script):
            if isinstance(step, str):
                self.messages.append(sample_message(step, position))
                if position + 1 < len(script) and isinstance(script[position + 1], str):
                    continue
                try:
                    new = self._prompt(prompt, held, index)
                except Exception as error:  # templates raise errors of many kinds to refuse a conversation
                    reason = f"the template refuses the conversation: {error}"
                    return [*transitions, Transition(name, _article(step), False, reason)]
                if prompt is not None:
                    keeps = new[: len(held)] == held
                    if self.by_text:
                        keeps = self.chat.decode(new).startswith(self.chat.decode(held))
                    reason = "" if keeps else self._reason(held, new, reply, text)
                    transitions.append(Transition(name, _article(step), keeps, reason))
                prompt = new
                continue
            assert prompt is not None
            written = write_reply(self.chat, self.messages, step, self.names)
            if written is None:
                return transitions
            text, reply, index = written, step, len(self.messages)
            following = script[position + 1] if position + 1 < len(script) else USER
            output = self.chat.encode(text + end_mark(self.chat, following == TOOL))
            self.messages.append(self.chat.parse(prompt, output, self.tools).message)
            self.reasonings += [step.reasoning] if step.reasoning else []
            held = [*prompt, *output]
        return transitions

    def _prompt(self, prompt: list[int] | None, held: list[int], index: int) -> list[int]:
        if prompt is None or self.by_text:
            return self.chat.encode(self.chat.render_text(self.messages, self.tools))
        return self.chat.next_prompt(self.messages, self.tools, prompt, held[len(prompt) :], index)

    def _reason(self, held_ids: list[int], new_ids: list[int], reply: Reply | None, text: str) -> str:
        held, new = self.chat.decode(held_ids), self.chat.decode(new_ids)
        if new.startswith(held):
            return "the same text is tokenised differently"
        at = next((i for i, (a, b) in enumerate(zip(held, new, strict=False)) if a != b), min(len(held), len(new)))
        start = held.rfind(text)
        first_user = next(m["content"] for m in self.messages if m["role"] == USER)
        if at < held.find(first_user):
            return "the system message changes"
        if any(held.count(r) > new.count(r) for r in self.reasonings):
            return "reasoning of earlier turns is dropped"
        blocks = new.removesuffix(self.chat.prefill).count("</think>") - held.count("</think>")
        if blocks:
            return "an empty reasoning block is " + ("put into replies" if blocks > 0 else "taken out of replies")
        if at >= start + len(text):
            return "the end of a reply is rendered differently"
        calls = reply is not None and bool(reply.calls)
        if _squeezed(new[at:]).startswith(_squeezed(text[max(at - start, 0) :])):
            return "tool arguments are re-serialised" if calls else "white space of replies is changed"
        if at >= start and calls:
            return "tool calls are rendered otherwise than the model writes them"
        if start - len(self.chat.prefill) <= at < start:
            return "what the prompt wrote of a reply is rendered differently"
        return f"an earlier message changes from {held[at : at + 24]!r} to {new[at : at + 24]!r}"


def _article(role: str) -> str:
    return {USER: "a user message", TOOL: "a tool result"}.get(role, f"a {role} message")


def _squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text)
