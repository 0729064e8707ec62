"""Tokenizers and chat templates for the chat tests, made here.

The templates render as the families' models do (documented formats), shortened to what the tests need: the
preambles are abridged, the forks of the originals are kept (Qwen3 drops the reasoning of earlier turns and so on).
"""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_TOOLS = """
{%- if tools -%}{{- '# Tools\\n<tools>' -}}{%- for tool in tools -%}{{- '\\n' ~ (tool | tojson) -}}{%- endfor -%}
{{- '\\n</tools>' -}}{%- endif -%}
"""

_QWEN_CALLS = """
{%- for call in message.tool_calls or [] -%}
{%- if message.content or not loop.first -%}{{- '\\n' -}}{%- endif -%}
{{- '<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' ~ (call.function.arguments | tojson)
  ~ '}\\n</tool_call>' -}}
{%- endfor -%}
"""

_QWEN_TOOL = """
{%- if loop.first or loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\\n<tool_response>\\n' ~ message.content ~ '\\n</tool_response>' -}}
{%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
"""

_QWEN_HEAD = (
    """
{%- set first = messages[0].content if messages[0].role == 'system' else DEFAULT -%}
{%- if first or tools -%}{{- '<|im_start|>system\\n' ~ first -}}
{%- if first and tools -%}{{- '\\n\\n' -}}{%- endif -%}"""
    + _TOOLS
    + """{{- '<|im_end|>\\n' -}}{%- endif -%}"""
)

QWEN3 = (
    _QWEN_HEAD.replace("DEFAULT", "''")
    + """
{%- set ns = namespace(query=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set ns.query = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{%- set reasoning = message.reasoning_content or '' -%}
{%- set content = message.content -%}
{%- if not reasoning and '</think>' in content -%}
{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if loop.index0 > ns.query and (loop.last or reasoning) -%}
{{- '<think>\\n' ~ reasoning ~ '\\n</think>\\n\\n' -}}{%- endif -%}
{{- content -}}"""
    + _QWEN_CALLS
    + """{{- '<|im_end|>\\n' -}}
{%- elif message.role == 'tool' -%}"""
    + _QWEN_TOOL
    + """{%- elif not (loop.first and message.role == 'system') -%}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and not enable_thinking -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}"""
)

# opens the reasoning in the prompt, as the thinking-only variants do
QWEN3_THINKING = QWEN3.replace(
    "{%- if enable_thinking is defined and not enable_thinking -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}",
    "{{- '<think>\\n' -}}",
)

QWEN25 = (
    _QWEN_HEAD.replace("DEFAULT", "'You are Qwen.'")
    + """
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}{{- '<|im_start|>assistant\\n' ~ message.content -}}"""
    + _QWEN_CALLS
    + """{{- '<|im_end|>\\n' -}}
{%- elif message.role == 'tool' -%}"""
    + _QWEN_TOOL
    + """{%- elif not (loop.first and message.role == 'system') -%}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
)

# more than one call in a message is refused, and the text beside a call is left out, as Llama 3.1's does
LLAMA3 = """
{{- bos_token -}}
{%- set offset = 1 if messages[0].role == 'system' else 0 -%}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' -}}
{%- if tools -%}{{- 'Environment: ipython\\n' -}}{%- endif -%}
{{- (messages[0].content if offset else '') ~ '<|eot_id|>' -}}
{%- for message in messages[offset:] -%}
{%- if message.role == 'tool' -%}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' ~ (message.content | tojson) ~ '<|eot_id|>' -}}
{%- elif message.tool_calls -%}
{%- if message.tool_calls | length != 1 -%}{{- raise_exception('only single tool-calls at once') -}}{%- endif -%}
{%- set call = message.tool_calls[0].function -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' ~ call.name ~ '", "parameters": '
  ~ (call.arguments | tojson) ~ '}<|eot_id|>' -}}
{%- else -%}
{{- '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\\n\\n' -}}
{%- if loop.first and tools -%}{{- 'Functions:\\n' -}}{%- for t in tools -%}{{- (t | tojson(indent=4)) ~ '\\n\\n' -}}
{%- endfor -%}{%- endif -%}
{{- (message.content | trim) ~ '<|eot_id|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}
"""

# shows the tools; drops everything before </think> in earlier replies, as the R1-era template does
DEEPSEEK_V3 = """
{{- bos_token -}}
{%- for message in messages if message.role == 'system' -%}{{- message.content -}}{%- endfor -%}
{%- if tools -%}{%- for tool in tools -%}{{- '\\n' ~ (tool | tojson) -}}{%- endfor -%}{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{{- '<｜User｜>' ~ message.content -}}
{%- elif message.role == 'tool' -%}
{{- '<｜tool▁outputs▁begin｜>' if loop.previtem.role != 'tool' else '\\n' -}}
{{- '<｜tool▁output▁begin｜>' ~ message.content ~ '<｜tool▁output▁end｜>' -}}
{%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<｜tool▁outputs▁end｜>' -}}{%- endif -%}
{%- elif message.role == 'assistant' -%}
{%- if loop.previtem.role != 'tool' -%}{{- '<｜Assistant｜>' -}}{%- endif -%}
{{- message.content | trim -}}
{%- if message.tool_calls -%}{{- '<｜tool▁calls▁begin｜>' -}}
{%- for call in message.tool_calls -%}
{%- if not loop.first -%}{{- '\\n' -}}{%- endif -%}
{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' ~ call.function.name ~ '\\n```json\\n'
  ~ (call.function.arguments | tojson) ~ '\\n```<｜tool▁call▁end｜>' -}}
{%- endfor -%}{{- '<｜tool▁calls▁end｜>' -}}{%- endif -%}
{{- '<｜end▁of▁sentence｜>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and messages[-1].role != 'tool' -%}{{- '<｜Assistant｜>' -}}{%- endif -%}
"""

# calls as string concatenation: arguments given as a dict are refused, as the original does
DEEPSEEK_V31 = """
{{- bos_token -}}
{%- for message in messages if message.role == 'system' -%}{{- message.content -}}{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{{- '<｜User｜>' ~ message.content -}}
{%- elif message.role == 'tool' -%}{{- '<｜tool▁output▁begin｜>' ~ message.content ~ '<｜tool▁output▁end｜>' -}}
{%- elif message.role == 'assistant' -%}
{%- if loop.previtem.role != 'tool' -%}{{- '<｜Assistant｜></think>' -}}{%- endif -%}
{{- message.content.split('</think>')[-1] -}}
{%- for call in message.tool_calls or [] -%}
{{- ('<｜tool▁calls▁begin｜>' if loop.first else '') + '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>'
  + call.function.arguments + '<｜tool▁call▁end｜>' + ('<｜tool▁calls▁end｜>' if loop.last else '') -}}
{%- endfor -%}
{{- '<｜end▁of▁sentence｜>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and messages[-1].role != 'tool' -%}
{{- '<｜Assistant｜>' ~ ('<think>' if thinking else '</think>') -}}
{%- endif -%}
"""

GLM45 = (
    "{{- '[gMASK]<sop>' -}}{%- if tools -%}{{- '<|system|>\\n' -}}"
    + _TOOLS
    + """{%- endif -%}
{%- set ns = namespace(query=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set ns.query = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{- '<|assistant|>\\n<think>' -}}
{%- if loop.index0 > ns.query and message.reasoning_content -%}{{- message.reasoning_content | trim -}}{%- endif -%}
{{- '</think>' -}}
{%- if message.content | trim -%}{{- '\\n' ~ (message.content | trim) -}}{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{{- '\\n<tool_call>' ~ call.function.name ~ '\\n' -}}
{%- for key, value in call.function.arguments.items() -%}
{{- '<arg_key>' ~ key ~ '</arg_key>\\n<arg_value>' ~ (value if value is string else value | tojson)
  ~ '</arg_value>\\n' -}}
{%- endfor -%}
{{- '</tool_call>' -}}
{%- endfor -%}
{%- elif message.role == 'tool' -%}
{%- if loop.first or loop.previtem.role != 'tool' -%}{{- '<|observation|>' -}}{%- endif -%}
{{- '\\n<tool_response>\\n' ~ message.content ~ '\\n</tool_response>' -}}
{%- else -%}
{{- '<|' ~ message.role ~ '|>\\n' ~ message.content -}}
{%- if message.role == 'user' and enable_thinking is defined and not enable_thinking -%}{{- '/nothink' -}}{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}
{%- if enable_thinking is defined and not enable_thinking -%}{{- '\\n<think></think>' -}}{%- endif -%}
{%- endif -%}"""
)

# a call is a message with the tool's name as metadata there; messages with tool_calls are not rendered at all
GLM4 = """
{{- '[gMASK]<sop>' -}}
{%- if tools -%}{{- '<|system|>\\n# 可用工具' -}}{%- for tool in tools -%}
{{- '\\n\\n## ' ~ tool.function.name ~ '\\n\\n' ~ (tool.function | tojson(indent=4)) -}}{%- endfor -%}{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}{{- '<|observation|>\\n' ~ message.content -}}
{%- elif message.tool_calls -%}{{- raise_exception('tool_calls are given as metadata') -}}
{%- else -%}{{- '<|' ~ message.role ~ '|>\\n' ~ message.content -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""

CHAT_TEMPLATES = {
    "qwen3": QWEN3,
    "qwen2.5": QWEN25,
    "llama3": LLAMA3,
    "deepseek-v3": DEEPSEEK_V3,
    "deepseek-v3.1": DEEPSEEK_V31,
    "glm-4.5": GLM45,
    "glm-4": GLM4,
}

_SPECIAL = {
    "qwen": ["<|im_end|>", "<|endoftext|>", "<|im_start|>"],
    "llama": [
        "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
        "<|python_tag|>",
    ],
    "deepseek": ["<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>"],
    "glm": ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
}  # fmt: skip
# of the vocabulary and not special, as in the originals: a decode that skips special tokens keeps them
_ADDED = {
    "qwen": ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"],
    "llama": [],
    "deepseek": [
        "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>",
        "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
    ],
    "glm": [
        "<tool_call>", "</tool_call>", "<think>", "</think>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
    ],
}  # fmt: skip
_BOS = {"llama": "<|begin_of_text|>", "deepseek": "<｜begin▁of▁sentence｜>"}


@cache
def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with the family's special tokens and a template that renders as the original does.

    Shared between tests: do not change it (see `with_template`).
    """
    return with_template(family, CHAT_TEMPLATES[family])


def with_template(family: str, chat_template: str | None) -> PreTrainedTokenizerFast:
    """The family's tokenizer with another chat template; a new one each time."""
    vendor = next(vendor for vendor in _SPECIAL if family.startswith(vendor))
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    corpus = [
        'user assistant system tool "name": "arguments": {"city": "Bad Ems", "days": 2} get_weather Hello. Sunny.'
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        min_frequency=1,
        special_tokens=_SPECIAL[vendor],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(corpus * 2, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=_SPECIAL[vendor][0],
        bos_token=_BOS.get(vendor),
        clean_up_tokenization_spaces=False,
        chat_template=chat_template,
    )
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in _ADDED[vendor]])
    return tokenizer
