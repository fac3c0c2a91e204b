"""Chat templates in the shapes that loss masks go wrong on, for the byte tokenizer of tiny.py."""

from __future__ import annotations

# The begin token is the template's own; the roles must alternate; contents are stripped (Llama 2, Gemma).
STRICT = (
    "<|begin|>{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "<{{ message['role'] }}>{{ message['content'] | trim }}<|turn_end|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

# Writes a system turn where there is none (SmolLM2, Qwen2.5).
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}<system>Be good.<|turn_end|>\n{% endif %}"
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<|turn_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

# Puts an empty block of thought before every answer, and into the generation prompt.
EMPTY_THOUGHT = (
    "{% for message in messages %}<{{ message['role'] }}>"
    "{% if message['role'] == 'assistant' %}<t></t>{% endif %}{{ message['content'] }}<|turn_end|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant><t></t>{% endif %}"
)

# The generation prompt has the empty block with enable_thinking=false only; the answers in a row never have it.
THOUGHT_BY_ARGUMENT = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<|turn_end|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is defined and not enable_thinking %}<t></t>{% endif %}{% endif %}"
)

# Qwen3 without its tools: keeps the reasoning after the last question only, takes it from the content or from a field,
# and writes an empty block before a last answer that has none.
QWEN3 = """
{%- if messages[0].role == 'system' %}{{- '<system>' + messages[0].content + '<|turn_end|>\n' }}{%- endif %}
{%- set ns = namespace(last_query=messages|length - 1, found=false) %}
{%- for message in messages[::-1] %}
{%- if not ns.found and message.role == 'user' %}
{%- set ns.found = true %}{%- set ns.last_query = messages|length - 1 - loop.index0 %}
{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- set content = message.content %}
{%- if message.role == 'user' %}{{- '<user>' + content + '<|turn_end|>\n' }}
{%- elif message.role == 'assistant' %}
{%- set reasoning = '' %}
{%- if message.reasoning_content is string %}{%- set reasoning = message.reasoning_content %}
{%- elif '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{{- '<assistant>' }}
{%- if loop.index0 > ns.last_query %}
{{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
{%- else %}{{- content }}{%- endif %}
{{- '<|turn_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<assistant>' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""

# Drops reasoning everywhere, and opens it in the generation prompt (DeepSeek-R1).
DROPS_ALL_THOUGHT = (
    "{% for message in messages %}<{{ message['role'] }}>"
    "{{ message['content'].split('</think>')[-1] }}<|turn_end|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
)

# A blank stands between header and words in a row, where the prompt ends before it; another before the end (Llama 2).
BLANKS_AROUND = (
    "{% for message in messages %}{{ message['role'] }}:{{ ' ' + message['content'] + ' ' }}"
    "{% if message['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

# No token ends a turn.
NO_TURN_END = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

# Templates whose answers can't be told exactly: letters changed, an answer written twice, an answer left out.
CHANGED = "{% for message in messages %}{{ message['content'] | replace('s', 'z') }}<|turn_end|>{% endfor %}"
UPPER = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] | upper }}<|turn_end|>{% endfor %}"
TWICE = "{% for message in messages %}{{ message['content'] }}|{{ message['content'] }}<|turn_end|>{% endfor %}"
SKIPS = "{% for message in messages %}{% if message['role'] == 'user' %}{{ message['content'] }}{% endif %}{% endfor %}"

EXACT = {
    "strict": STRICT,
    "default system": DEFAULT_SYSTEM,
    "empty thought": EMPTY_THOUGHT,
    "thought by argument": THOUGHT_BY_ARGUMENT,
    "qwen3": QWEN3,
    "drops all thought": DROPS_ALL_THOUGHT,
    "blanks around": BLANKS_AROUND,
    "no turn end": NO_TURN_END,
}
