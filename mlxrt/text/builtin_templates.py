"""Chat templates for families whose files carry none, by the special tokens of their vocabulary."""

from collections.abc import Collection

CHATML = """{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}"""

LLAMA3 = """{{- bos_token }}
{%- for message in messages -%}
{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif -%}"""

GEMMA = """{{- bos_token }}
{%- for message in messages -%}
{%- if message.role not in ('user', 'assistant') %}{{ raise_exception('only user and assistant') }}{% endif -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif -%}
{%- set role = 'model' if message.role == 'assistant' else 'user' -%}
{{ '<start_of_turn>' + role + '\\n' + message.content | trim + '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif -%}"""

GEMMA4 = """{{- bos_token }}
{%- for message in messages -%}
{%- set role = 'model' if message.role == 'assistant' else message.role -%}
{{ '<|turn>' + role + '\\n' }}
{%- if loop.first and role == 'system' and enable_thinking %}{{ '<|think|>\\n' }}{% endif -%}
{{ message.content | trim + '<turn|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|turn>model\\n' }}{% endif -%}"""

MISTRAL = """{{- bos_token }}
{%- for message in messages -%}
{%- if message.role == 'user' %}{{ '[INST] ' + message.content + '[/INST]' }}
{%- elif message.role == 'assistant' %}{{ ' ' + message.content | trim + eos_token }}
{%- else %}{{ raise_exception('only user and assistant') }}
{%- endif -%}
{%- endfor -%}"""

HARMONY = """{{- '<|start|>system<|message|>You are a helpful assistant.\\nReasoning: ' }}
{{- (reasoning_effort if reasoning_effort is defined else 'medium') + '\\n\\n' }}
{{- '# Valid channels: analysis, commentary, final. Channel must be included for every message.<|end|>' }}
{%- for message in messages -%}
{%- if message.role == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
{%- elif message.role in ('system', 'developer') -%}
{{ '<|start|>developer<|message|># Instructions\\n\\n' + message.content + '<|end|>' }}
{%- else %}{{ '<|start|>user<|message|>' + message.content + '<|end|>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif -%}"""

DEEPSEEK = """{{- bos_token }}
{%- for message in messages -%}
{%- if message.role == 'system' %}{{ message.content }}
{%- elif message.role == 'user' %}{{ '<｜User｜>' + message.content }}
{%- else %}{{ '<｜Assistant｜>' + message.content + eos_token }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif -%}"""

# Which tokens a vocabulary must have for a template, and the template.
FAMILIES = {
    "gpt-oss": (("<|start|>", "<|message|>", "<|channel|>"), HARMONY),
    "ChatML": (("<|im_start|>", "<|im_end|>"), CHATML),
    "Llama 3": (("<|start_header_id|>", "<|eot_id|>"), LLAMA3),
    "Gemma 4": (("<|turn>", "<turn|>"), GEMMA4),
    "Gemma": (("<start_of_turn>", "<end_of_turn>"), GEMMA),
    "DeepSeek": (("<｜User｜>", "<｜Assistant｜>"), DEEPSEEK),
    "Mistral": (("[INST]", "[/INST]"), MISTRAL),
}


def find_builtin(added: Collection[str]) -> tuple[str, str] | None:
    """The family's name and its template."""
    for name, (tokens, template) in FAMILIES.items():
        if all(token in added for token in tokens):
            return name, template
    return None
