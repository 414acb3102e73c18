"""Chat templates for tests, in the formats of Qwen3-Coder and DeepSeek. They are not those of the models.

DeepSeek-V3's has tool calls where a message has no content as well, and its arguments may be text or objects; that of
V3.1 joins arguments as text.
"""

from __future__ import annotations

QWEN3_CODER = """{% for tool in tools or [] %}<function>{{ tool.function.name }}</function>
{% endfor %}{% for message in messages %}<|{{ message.role }}|>
{{ message.content }}
{% for call in message.tool_calls or [] %}<tool_call>
<function={{ call.function.name }}>
{% for name, value in call.function.arguments | items %}<parameter={{ name }}>
{{ value | tojson if value is mapping or (value is sequence and value is not string) else value }}
</parameter>
{% endfor %}</function>
</tool_call>
{% endfor %}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""

BEGIN = "<｜tool▁calls▁begin｜>"
END = "<｜tool▁calls▁end｜>"

DEEPSEEK_V3 = (
    """{% for message in messages %}<|{{ message['role'] }}|>
{% if message['content'] is not none %}{{ message['content'] }}{% endif %}
{% if message['tool_calls'] %}"""
    + BEGIN
    + """{% for call in message['tool_calls'] %}{{ '' if loop.first else '\\n' }}"""
    + """<｜tool▁call▁begin｜>{{ call['type'] }}<｜tool▁sep｜>{{ call['function']['name'] + '\\n```json\\n' }}"""
    + """{{ call['function']['arguments'] | tojson }}{{ '\\n```' }}<｜tool▁call▁end｜>{% endfor %}"""
    + END
    + """{% endif %}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
)

DEEPSEEK_V31 = (
    """{% for message in messages %}<|{{ message['role'] }}|>
{{ message['content'] or '' }}
{% if message['tool_calls'] %}{{ '"""
    + BEGIN
    + """' }}{% for call in message['tool_calls'] %}"""
    + """{{ '<｜tool▁call▁begin｜>' + call['function']['name'] + '<｜tool▁sep｜>' + call['function']['arguments']"""
    + """ + '<｜tool▁call▁end｜>' }}{% endfor %}"""
    + END
    + """{% endif %}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
)
