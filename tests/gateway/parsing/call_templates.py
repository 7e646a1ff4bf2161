"""A minimal chat template of each family, which writes an assistant's calls as the family's models do."""

_MESSAGES = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}CALL{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_VALUE = "{{ value if value is string else value | tojson }}"


def _template(call: str, more: str = "") -> str:
    """Return a template; `call` writes `call.function`, and `more` is a comment with the family's other marks."""
    named = "{% set name, arguments = call.function.name, call.function.arguments %}" + call
    return ("{# " + more + " #}" if more else "") + _MESSAGES.replace("CALL", named)


_GEMMA4 = """\
{% macro gemma(value) %}{% if value is string %}<|"|>{{ value }}<|"|>{% elif value is mapping %}{{ '{' }}\
{% for key, one in value.items() %}{{ ',' if not loop.first }}{{ key }}:{{ gemma(one) }}{% endfor %}{{ '}' }}\
{% elif value is sequence %}[{% for one in value %}{{ ',' if not loop.first }}{{ gemma(one) }}{% endfor %}]\
{% else %}{{ value | tojson }}{% endif %}{% endmacro %}"""
_LFM2 = """\
{% macro python(value) %}{% if value is boolean %}{{ 'True' if value else 'False' }}{% elif value is none %}None\
{% elif value is string %}{{ value | tojson }}{% elif value is mapping %}{{ '{' }}\
{% for key, one in value.items() %}{{ ', ' if not loop.first }}{{ key | tojson }}: {{ python(one) }}{% endfor %}\
{{ '}' }}\
{% elif value is sequence %}[{% for one in value %}{{ ', ' if not loop.first }}{{ python(one) }}{% endfor %}]\
{% else %}{{ value }}{% endif %}{% endmacro %}"""
TEMPLATES = {
    "harmony": _template(
        "<|channel|>commentary to=functions.{{ name }} <|constrain|>json<|message|>{{ arguments | tojson }}<|call|>"
    ),
    "gemma4": _GEMMA4 + _template("<|tool_call>call:{{ name }}{{ gemma(arguments) }}<tool_call|>", "<|channel>thought"),
    "glm45": _template(
        "{{ '<tool_call>' + name + '\\n' }}{% for key, value in arguments.items() %}"
        "{{ '<arg_key>' + key + '</arg_key>\\n<arg_value>' }}"
        + _VALUE
        + "{{ '</arg_value>\\n' }}{% endfor %}</tool_call>",
        "<think></think>",
    ),
    "qwen3_coder": _template(
        "{{ '<tool_call>\\n<function=' + name + '>\\n' }}{% for key, value in arguments.items() %}"
        "{{ '<parameter=' + key + '>\\n' }}" + _VALUE + "{{ '\\n</parameter>\\n' }}{% endfor %}"
        "{{ '</function>\\n</tool_call>' }}"
    ),
    "lfm2": _LFM2
    + _template(
        "<|tool_call_start|>[{{ name }}({% for key, value in arguments.items() %}{{ ', ' if not loop.first }}"
        "{{ key }}={{ python(value) }}{% endfor %})]<|tool_call_end|>"
    ),
    "deepseek_v3": _template(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
        "{{ name + '\\n```json\\n' }}{{ arguments | tojson }}"
        "{{ '\\n```' }}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "</think>",
    ),
    "mistral": _template("[TOOL_CALLS]{{ name }}[ARGS]{{ arguments | tojson }}", "[THINK]"),
    "llama3_json": _template('{"name": {{ name | tojson }}, "parameters": {{ arguments | tojson }}}', "<|python_tag|>"),
    "hermes": _template(
        '{{ \'<tool_call>\\n\' }}{"name": {{ name | tojson }}, "arguments": {{ arguments | tojson }}}'
        "{{ '\\n</tool_call>' }}"
    ),
}
