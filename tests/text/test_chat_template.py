"""Chat templates, against Transformers' own rendering."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from emlxd.errors import ModelFormatError, RequestError
from emlxd.text.chat_template import ChatTemplate

CHATML = """\
{% for message in messages %}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{% endif %}
"""
LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
    {%- set header = '<|start_header_id|>' ~ message['role'] ~ '<|end_header_id|>\\n\\n' %}
    {{- header + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MISTRAL = """\
{{ bos_token }}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate user/assistant, got "' + message.role + '"') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + message.content + ' [/INST]' }}
    {%- else %}
        {%- generation %}{{ ' ' + message.content + eos_token }}{% endgeneration %}
    {%- endif %}
{%- endfor %}
"""
TOOLS = """\
{%- if tools %}
    {{- '<tools>' }}
    {%- for tool in tools %}
        {%- if tool.function.name == 'hidden' %}{% continue %}{% endif %}
        {{- '\\n' ~ (tool | tojson) ~ '\\n' ~ (tool.function | tojson(indent=2, separators=(',', ':'))) }}
    {%- endfor %}
    {{- '</tools>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<' ~ message.role ~ '>' }}
    {%- if message.content %}{{ message.content }}{% endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '<call>' ~ call.function.name ~ ' ' ~ (call.function.arguments | tojson(ensure_ascii=True)) }}
    {%- endfor %}
{%- endfor %}
{{- strftime_now('%Y') if with_date else '' }}
"""
PARTS = """\
{%- for message in messages %}
    {{- message.role ~ ': ' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}{{ '[' ~ part.type ~ ']' ~ part.text }}{% endfor %}
    {%- endif %}
    {{- ';' }}
{%- endfor %}
"""
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "tools": TOOLS, "parts": PARTS}
SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
TOOL = {
    "type": "function",
    "function": {"name": "počasí", "description": "<b> & 'quoted'", "parameters": {"type": "object"}},
}
TURNS = [
    {"role": "user", "content": "Ahoj <|im_end|> {{ 1 }}"},
    {"role": "assistant", "content": " Dobrý den "},
    {"role": "user", "content": "A dál?\n"},
]


def theirs(name: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    prompt: str = render_jinja_template(
        [messages], chat_template=TEMPLATES[name], **{**SPECIALS, "add_generation_prompt": True} | variables
    )[0][0]
    return prompt


def ours(name: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    return ChatTemplate(TEMPLATES[name], SPECIALS).render(messages, **variables)


class TestAsTransformers:
    @pytest.mark.parametrize("name", TEMPLATES)
    @pytest.mark.parametrize("add_generation_prompt", [True, False])
    @pytest.mark.parametrize("count", [1, 2, 3])
    def test_turns(self, name: str, add_generation_prompt: bool, count: int) -> None:
        turns, options = TURNS[:count], {"add_generation_prompt": add_generation_prompt}
        assert ours(name, turns, **options) == theirs(name, turns, **options)

    def test_tools_and_dates(self) -> None:
        hidden = {"type": "function", "function": {"name": "hidden"}}
        options = {"tools": [TOOL, hidden], "with_date": True}
        prompt = ours("tools", TURNS, **options)
        assert prompt == theirs("tools", TURNS, **options)
        assert "počasí" in prompt and "<b> & 'quoted'" in prompt and "hidden" not in prompt

    @pytest.mark.parametrize("name", ["chatml", "llama3", "tools"])
    @pytest.mark.parametrize("ending", ["", " ", "\n\n"])
    def test_continue_final_message(self, name: str, ending: str) -> None:
        turns = [TURNS[0], {"role": "assistant", "content": "Once upon" + ending}]
        prompt = ours(name, turns, continue_final_message=True)
        expected = theirs(name, turns, continue_final_message=True, add_generation_prompt=False)
        assert prompt == expected
        assert prompt.rstrip().endswith("Once upon")

    def test_continue_final_message_of_parts(self) -> None:
        turns = [{"role": "assistant", "content": [{"type": "text", "text": part} for part in ("a", "b")]}]
        prompt = ours("parts", turns, continue_final_message=True)
        assert prompt == theirs("parts", turns, continue_final_message=True, add_generation_prompt=False)
        assert prompt == "assistant: [text]a[text]b"

    def test_variables_override_special_tokens(self) -> None:
        options = {"bos_token": "<other>"}
        assert ours("llama3", TURNS, **options) == theirs("llama3", TURNS, **options)


class TestNormalisation:
    def test_developer_is_system_where_the_template_knows_no_developer(self) -> None:
        messages = [{"role": "developer", "content": "Be brief."}]
        assert ours("chatml", messages).startswith("<|im_start|>system\nBe brief.")
        knows = ChatTemplate("{% if messages[0].role == 'developer' %}yes{% endif %}", {})
        assert knows.render(messages) == "yes"

    def test_text_parts_are_joined(self) -> None:
        parts = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]
        assert "user\nab<|im_end|>" in ours("chatml", [{"role": "user", "content": parts}])

    def test_text_parts_stay_where_the_template_reads_them(self) -> None:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        assert ours("parts", [{"role": "user", "content": parts}]) == "user: [text]a[text]b;"

    def test_text_becomes_a_part_where_the_template_reads_nothing_else(self) -> None:
        template = ChatTemplate("{% for p in messages[0]['content'] %}{{ p.text }}{% endfor %}", {})
        assert template.render([{"role": "user", "content": "hi"}]) == "hi"

    def test_part_of_another_kind_is_refused(self) -> None:
        with pytest.raises(RequestError, match="image_url") as caught:
            ours("chatml", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
        assert caught.value.param == "messages"

    @pytest.mark.parametrize("name", ["chatml", "llama3", "tools"])
    def test_null_content_with_tool_calls(self, name: str) -> None:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"město": "Brno"}'}}
        messages = [TURNS[0], {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None}]
        plain = {**call, "function": {"name": "f", "arguments": {"město": "Brno"}}}
        expected = theirs(name, [TURNS[0], {"role": "assistant", "content": "", "tool_calls": [plain]}])
        assert ours(name, messages) == expected
        assert call["function"]["arguments"] == '{"město": "Brno"}', "the caller's message was changed"  # type: ignore[index]

    def test_thoughts_are_called_what_the_template_calls_them(self) -> None:
        thought = {"role": "assistant", "content": "", "reasoning_content": "Hm."}
        call = {"function": {"name": "f", "arguments": {}}}
        for key in ("reasoning_content", "thinking"):
            template = ChatTemplate(f"{{% for m in messages %}}{{{{ m.{key} }}}}{{% endfor %}}", {})
            assert template.render([thought]) == "Hm."
            assert template.render([thought | {"tool_calls": [call]}]) == "Hm."
        # gpt-oss' template refuses both of a message that calls.
        assert template.render([thought | {"content": "So.", "tool_calls": [call]}]) == ""

    def test_null_content_stays_null_where_the_template_asks(self) -> None:
        template = ChatTemplate("{{ 'call' if messages[0]['content'] is none else 'text' }}", {})
        assert template.render([{"role": "assistant", "content": None}]) == "call"

    @pytest.mark.parametrize(
        ("source", "expected"),
        [
            ("{{ c.function.arguments | tojson }}", '{"a": 1}'),
            ("{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}", "a=1"),
            ("{{ 'x ' + c['function']['arguments'] }}", 'x {"a":1}'),
            ("{{ 'x ' ~ c.function.arguments }}", 'x {"a":1}'),
        ],
    )
    def test_arguments_are_an_object_unless_written_as_text(self, source: str, expected: str) -> None:
        template = ChatTemplate("{% for c in messages[0].tool_calls %}" + source + "{% endfor %}", {})
        call = {"type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
        assert template.render([{"role": "assistant", "tool_calls": [call]}]) == expected

    @pytest.mark.parametrize("arguments", ["{broken", "[1]", ""])
    def test_arguments_that_are_no_object_stay_text(self, arguments: str) -> None:
        template = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments | tojson }}", {})
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        prompt = template.render([{"role": "assistant", "tool_calls": [call]}])
        assert json.loads(prompt) == arguments


class TestErrors:
    def test_refusal_of_the_template(self) -> None:
        with pytest.raises(RequestError) as caught:
            ours("mistral", [TURNS[1]])
        assert caught.value.message == 'Roles must alternate user/assistant, got "assistant"'
        assert (caught.value.status, caught.value.param) == (400, "messages")

    @pytest.mark.parametrize("source", ["{% if %}", "{{ x | no_such_filter }}", "{% for %}", "{{ 'a"])
    def test_syntax(self, source: str) -> None:
        with pytest.raises(ModelFormatError, match="chat template, line 2"):
            ChatTemplate("\n" + source, {})

    def test_nesting_too_deep(self) -> None:
        with pytest.raises(ModelFormatError, match="nested too deeply"):
            ChatTemplate("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", {})

    @pytest.mark.parametrize("source", ["{{ messages[0].nothing.more }}", "{{ 1 + 'a' }}", "{{ 1 // 0 }}"])
    def test_runtime(self, source: str) -> None:
        with pytest.raises(RequestError, match="cannot render"):
            ChatTemplate(source, {}).render(TURNS)

    @pytest.mark.parametrize(
        "source",
        [
            "{{ messages.__class__.__mro__ }}",
            "{{ raise_exception.__globals__['json'] }}",
            "{{ (''|attr('__class__')).mro() }}",
            "{{ ''.__class__.__mro__ }}",
            "{{ messages.append(1) }}",
            "{% for i in range(1000000) %}{% endfor %}",
            "{{ 'a' * 10000000 }}",
            "{{ 10000000 * 'a' }}",
            "{{ [0] * 10000000 }}",
            "{{ 9 ** (9 ** 9) }}",
        ],
    )
    def test_sandbox(self, source: str) -> None:
        with pytest.raises(RequestError, match="cannot render"):
            ChatTemplate(source, {}).render(TURNS)

    def test_arithmetic_works(self) -> None:
        assert (
            ChatTemplate("{{ 3 * 4 }}{{ '-' * 3 }}{{ 2 ** 10 }}{{ 1.5 * 2 }}", {}).render(TURNS)
            == "12---10243.0"
        )

    @pytest.mark.parametrize("content", ["", [], None])
    def test_nothing_to_continue(self, content: Any) -> None:
        with pytest.raises(RequestError, match="no text"):
            ours("parts", [{"role": "assistant", "content": content}], continue_final_message=True)

    def test_final_message_left_out_by_the_template(self) -> None:
        with pytest.raises(RequestError, match="cannot be continued"):
            ChatTemplate("{{ messages[0].content }}", {}).render(TURNS, continue_final_message=True)
