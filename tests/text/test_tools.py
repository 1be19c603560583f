"""Tool calls in every format: read as they were written, however they come in, and enforced."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emlxd.core import Grammar, Tool
from emlxd.text.grammar import GrammarCompiler
from emlxd.text.reader import Call, Read, Reader, Text
from emlxd.text.tokenizer import Tokenizer
from emlxd.text.tools.format import Format
from emlxd.text.tools.table import FORMATS, detect
from tests.text.vocabularies import bpe_metadata
from tests.text.walk import walk

Written = tuple[str, dict[str, Any]]

WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "unit": {"type": "string", "enum": ["c", "f"]},
            "detail": {"$ref": "#/$defs/detail"},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
        "$defs": {
            "detail": {
                "type": "object",
                "properties": {
                    "wind": {"type": "boolean"},
                    "note": {"type": ["string", "null"], "maxLength": 9},
                },
                "required": ["wind"],
                "additionalProperties": False,
            }
        },
    },
)
NOW = Tool("now", {"type": "object", "properties": {}, "additionalProperties": False})
TOOLS = (WEATHER, NOW)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _hermes(calls: Iterable[Written]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {_json(arguments)}}}\n</tool_call>'
        for name, arguments in calls
    )


def _llama(calls: Iterable[Written]) -> str:
    return "; ".join(_json({"name": name, "parameters": arguments}) for name, arguments in calls)


def _array(calls: Iterable[Written]) -> str:
    return json.dumps(
        [{"name": name, "arguments": arguments} for name, arguments in calls], ensure_ascii=False
    )


def _mistral_args(calls: Iterable[Written]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(arguments)}" for name, arguments in calls)


def _deepseek(calls: Iterable[Written], head: str, tail: str, between: str = "") -> str:
    written = [
        f"<｜tool▁call▁begin｜>{head.format(name)}{_json(arguments)}{tail}<｜tool▁call▁end｜>"  # noqa: RUF001
        for name, arguments in calls
    ]
    return f"<｜tool▁calls▁begin｜>{between.join(written)}<｜tool▁calls▁end｜>"  # noqa: RUF001


def _element(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _qwen_coder(calls: Iterable[Written]) -> str:
    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{_element(value)}\n</parameter>\n" for key, value in arguments.items())
        + "</function>\n</tool_call>"
        for name, arguments in calls
    )


def _glm(calls: Iterable[Written]) -> str:
    return "\n".join(
        f"<tool_call>{name}\n"
        + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_element(value)}</arg_value>\n"
            for key, value in arguments.items()
        )
        + "</tool_call>"
        for name, arguments in calls
    )


def _gemma(calls: Iterable[Written], open: str, close: str, quote: str) -> str:
    def text(value: Any) -> str:
        match value:
            case str():
                return f"{quote}{value}{quote}"
            case dict():
                return f"{{{','.join(f'{key}:{text(value[key])}' for key in sorted(value))}}}"
            case list():
                return f"[{','.join(map(text, value))}]"
            case _:
                return _json(value)

    return "".join(f"{open}call:{name}{text(arguments)}{close}" for name, arguments in calls)


def _minimax(calls: Iterable[Written]) -> str:
    invoked = "".join(
        f'<invoke name="{name}">\n'
        + "".join(
            f'<parameter name="{key}">{_element(value)}</parameter>\n' for key, value in arguments.items()
        )
        + "</invoke>\n"
        for name, arguments in calls
    )
    return f"<minimax:tool_call>\n{invoked}</minimax:tool_call>"


def _harmony(calls: Iterable[Written]) -> str:
    return "".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(arguments)}<|call|>"
        for name, arguments in calls
    )


WRITERS: dict[str, Callable[[Iterable[Written]], str]] = {
    "hermes": _hermes,
    "llama": _llama,
    "mistral": lambda calls: f"[TOOL_CALLS]{_array(calls)}",
    "mistral-args": _mistral_args,
    "granite": lambda calls: f"<|tool_call|>{_array(calls)}",
    "phi": lambda calls: f"<|tool_call|>{_array(calls)}<|/tool_call|>",
    "deepseek-v3": lambda calls: _deepseek(calls, "function<｜tool▁sep｜>{}\n```json\n", "\n```", "\n"),  # noqa: RUF001
    "deepseek-v31": lambda calls: _deepseek(calls, "{}<｜tool▁sep｜>", ""),  # noqa: RUF001
    "qwen-coder": _qwen_coder,
    "glm": _glm,
    "gemma": lambda calls: _gemma(calls, *FORMATS["gemma"].markers),
    "function-gemma": lambda calls: _gemma(calls, *FORMATS["function-gemma"].markers),
    "minimax": _minimax,
    "harmony": _harmony,
}

each_format = pytest.mark.parametrize("name", FORMATS)


def result(reads: Sequence[Read]) -> tuple[str, str, list[tuple[str | None, str]]]:
    """Content, reasoning, and the calls with the text of their arguments."""
    texts = {"content": "", "reasoning": ""}
    calls: list[tuple[str | None, str]] = []
    for read in reads:
        if isinstance(read, Text):
            texts[read.channel] += read.text
        elif read.name is not None:
            assert read.call == len(calls) and read.id
            calls.append((read.name, read.arguments))
        else:
            assert read.call == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + read.arguments)
    return texts["content"], texts["reasoning"], calls


def read(reader: Reader, pieces: Iterable[str]) -> tuple[str, str, list[tuple[str | None, str]]]:
    reads = [event for piece in pieces for event in reader.push(piece)]
    return result([*reads, *reader.finish()])


def calls_in(name: str, text: str) -> list[Written]:
    content, _, calls = read(FORMATS[name].reader(TOOLS), text)
    assert content == ""
    return [(str(name), json.loads(arguments)) for name, arguments in calls]


CALLS: list[list[Written]] = [
    [("now", {})],
    [("get_weather", {"city": "Ústí", "days": 3})],
    [
        (
            "get_weather",
            {"city": 'say "hi" {[<\\>]}\n', "days": 1, "unit": "c", "detail": {"wind": True, "note": None}},
        )
    ],
    [("get_weather", {"city": "7", "days": 2}), ("now", {}), ("get_weather", {"city": "", "days": 9})],
]


@each_format
@pytest.mark.parametrize("calls", CALLS)
def test_what_was_written_is_read(name: str, calls: list[Written]) -> None:
    assert calls_in(name, WRITERS[name](calls)) == calls


@each_format
def test_text_around_calls(name: str) -> None:
    if name in ("llama", "harmony"):
        return
    written = WRITERS[name]([("now", {})])
    content, _, calls = read(FORMATS[name].reader(TOOLS), [f"Let me see.\n\n{written}\n"])
    assert (content, calls) == ("Let me see.", [("now", "{}")])
    content, _, calls = read(FORMATS[name].reader(TOOLS), [f"{written}\n\nDone."])
    assert (content, calls) == ("Done.", [("now", "{}")])


@each_format
@pytest.mark.parametrize(
    "text", ["", "  ", "plain text \n", "a < b [TOOL <|x|> <tool { ;", "{}", '{"a": 1}', '{"name": "Bob"}']
)
def test_text_without_calls_is_text(name: str, text: str) -> None:
    assert read(FORMATS[name].reader(TOOLS), [text]) == (text, "", [])


@each_format
def test_call_of_an_unknown_tool_is_text(name: str) -> None:
    text = WRITERS[name]([("rm", {"path": "/"})])
    content, _, calls = read(FORMATS[name].reader(TOOLS), [text])
    assert calls == []
    assert content == ('{"path": "/"}' if name == "harmony" else text)


@each_format
def test_every_cut_call_is_text_or_complete(name: str) -> None:
    text = WRITERS[name]([("get_weather", {"city": "x", "days": 1})])
    for end in range(len(text)):
        reader = FORMATS[name].reader(TOOLS)
        content, _, calls = read(reader, [text[:end]])
        if calls:
            assert [json.loads(arguments) for _, arguments in calls] == [{"city": "x", "days": 1}]
        elif name != "harmony":
            assert content == text[:end]


MALFORMED = {
    "hermes": '<tool_call>\n{"name": "now", "arguments": {"a": }\n</tool_call>',
    "llama": '{"name": "now", "parameters": {"a"}}',
    "mistral": '[TOOL_CALLS][{"name": "now", "arguments": {}]',
    "mistral-args": "[TOOL_CALLS]now[ARGS]{]",
    "granite": '<|tool_call|>[{"name": "now", "arguments": 3}]',
    "phi": '<|tool_call|>[{"name": "now"}]<|/tool_call|>',
    "deepseek-v3": "<｜tool▁calls▁begin｜>now",  # noqa: RUF001
    "deepseek-v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}x",  # noqa: RUF001
    "qwen-coder": "<tool_call>\n<function=now>\n<parameter=a>\n1\n</function>\n</tool_call>",
    "glm": "<tool_call>now\n<arg_key>a</arg_key></tool_call>",
    "gemma": "<|tool_call>call:now{a}<tool_call|>",
    "function-gemma": "<start_function_call>call:now{a:b}<end_function_call>",
    "minimax": '<minimax:tool_call>\n<invoke name="now">\n</minimax:tool_call>',
    "harmony": "<|channel|>commentary to=functions.now<|message|>{x}<|call|>",
}


@each_format
def test_malformed_call_is_text_and_counted(name: str) -> None:
    reader = FORMATS[name].reader(TOOLS)
    content, _, calls = read(reader, [MALFORMED[name]])
    assert calls == []
    assert content == ("{x}" if name == "harmony" else MALFORMED[name])
    assert reader.malformed > 0


@each_format
def test_call_after_a_malformed_one(name: str) -> None:
    if name == "llama":
        return
    good = WRITERS[name]([("now", {})])
    content, _, calls = read(FORMATS[name].reader(TOOLS), [f"{MALFORMED[name]} {good}"])
    assert calls == [("now", "{}")]
    assert content.strip() in (MALFORMED[name], "{x}")


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("hermes", '<tool_call>{"name":"now","arguments":{}}</tool_call>', [("now", {})]),
        (
            "hermes",
            '<tool_call>\n{"arguments": {"city": "x", "days": 1}, "name": "get_weather"}',
            [("get_weather", {"city": "x", "days": 1})],
        ),
        ("hermes", '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>', [("now", {})]),
        ("llama", '<|python_tag|>{"type": "function", "name": "now", "parameters": {}}', [("now", {})]),
        (
            "llama",
            '<|python_tag|>get_weather.call(city="a, )b", days=2)',
            [("get_weather", {"city": "a, )b", "days": 2})],
        ),
        ("mistral", '[TOOL_CALLS] [{"name": "now", "arguments": {}, "id": "abcdefghi"}]', [("now", {})]),
        ("mistral-args", "[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}", [("now", {})]),
        ("qwen-coder", "<function=now>\n</function>", [("now", {})]),
        (
            "harmony",
            "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}",
            [("now", {})],
        ),
    ],
)
def test_variants_that_models_write(name: str, text: str, calls: list[Written]) -> None:
    assert calls_in(name, text) == calls


def test_harmony_channels() -> None:
    text = (
        "<|channel|>analysis<|message|>Hmm.<|end|><|start|>assistant<|channel|>commentary<|message|>Wait. "
        "<|end|><|start|>assistant<|channel|>final<|message|>Done."
    )
    assert read(FORMATS["harmony"].reader(TOOLS), [text]) == ("Wait. Done.", "Hmm.", [])


def test_ids_differ_and_suit_the_format() -> None:
    def ids(name: str) -> list[str]:
        reader = FORMATS[name].reader(TOOLS)
        reads = [*reader.push(WRITERS[name]([("now", {}), ("now", {})])), *reader.finish()]
        return [event.id for event in reads if isinstance(event, Call) and event.id]

    assert len(set(ids("hermes"))) == 2
    assert all(len(id) == 9 and id.isalnum() for id in ids("mistral"))


_FRAGMENTS = {
    name: [*FORMATS[name].markers, WRITERS[name](CALLS[1]), WRITERS[name](CALLS[3]), MALFORMED[name]]
    for name in FORMATS
}
_COMMON = ["text", " ", "\n", "{", "}", '"', "now", "<", "[", '{"name": "now", "arguments": {}}', "</", ">"]


@given(st.data())
def test_pieces_do_not_matter(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(list(FORMATS)))
    parts = data.draw(st.lists(st.sampled_from(_FRAGMENTS[name] + _COMMON), max_size=6))
    text = "".join(
        part[: data.draw(st.integers(0, len(part)))] if data.draw(st.booleans()) else part for part in parts
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(FORMATS[name].reader(TOOLS), pieces) == read(FORMATS[name].reader(TOOLS), [text])


@each_format
def test_one_character_at_a_time(name: str) -> None:
    for calls in CALLS:
        text = WRITERS[name](calls)
        assert read(FORMATS[name].reader(TOOLS), text) == read(FORMATS[name].reader(TOOLS), [text])


@each_format
def test_held_call_is_passed_on_as_it_comes(name: str) -> None:
    reader = FORMATS[name].reader(TOOLS)
    reader.hold()
    text = WRITERS[name](CALLS[3])
    events = [event for character in text for event in reader.push(character)]
    assert result([*events, *reader.finish()]) == read(FORMATS[name].reader(TOOLS), [text])
    assert len(events) > 6


@each_format
def test_a_mark_that_was_cut_off_is_no_text(name: str) -> None:
    """Where there is nothing but calls, before the first one; and after one in any case."""
    if name in ("harmony", "llama"):  # whose marks cannot be cut: tokens, and a brace
        return
    text = WRITERS[name](CALLS[1])
    reader = FORMATS[name].reader(TOOLS)
    reader.hold(alone=True)
    assert result([*reader.push(text[:1]), *reader.finish(cut=True)]) == ("", "", [])
    for cut in (True, False):
        reader = FORMATS[name].reader(TOOLS)
        content, _, calls = result([*reader.push(text + text[:1]), *reader.finish(cut=cut)])
        assert (content, len(calls)) == ("" if cut else text[:1], 1)
    reader = FORMATS[name].reader(TOOLS)
    reader.hold()
    assert result([*reader.push(text[:1]), *reader.finish(cut=True)]) == (text[:1], "", [])


@each_format
def test_holding_a_call_that_has_begun_passes_on_what_is_known(name: str) -> None:
    text, reader = WRITERS[name](CALLS[1]), FORMATS[name].reader(TOOLS)
    events: list[Read] = []
    for character in text:
        events += reader.push(character)
        if reader.entered is not None and not reader.held:
            assert text.startswith(reader.entered)
            events += reader.hold()
    assert reader.held
    assert result([*events, *reader.finish()]) == read(FORMATS[name].reader(TOOLS), [text])


@cache
def tokenizer(markers: tuple[str, ...]) -> Tokenizer:
    """All bytes, and the markers as special tokens."""
    metadata = bpe_metadata(())
    metadata["tokenizer.ggml.tokens"] += markers
    metadata["tokenizer.ggml.token_type"] += [3] * len(markers)
    return Tokenizer.from_gguf(metadata)


def special_mark(tokens: Tokenizer) -> Callable[[str], str]:
    return lambda text: f"<[{tokens.id_of(text)}]>"


def _enforced(format: Format, *, special: bool, parallel: bool, seed: int) -> str | None:
    tokens = tokenizer(tuple(format.markers) if special else ())
    rules = format.rules(TOOLS, special_mark(tokens) if special else json.dumps, parallel=parallel)
    grammar = Grammar("lark", f"start: calls\n{rules}", "tools")
    ids = walk(GrammarCompiler(tokens, tokens.vocab_size).matcher(grammar), tokens, seed)
    return None if ids is None else b"".join(map(tokens.token_bytes, ids)).decode()


@each_format
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("parallel", [False, True])
def test_what_the_grammar_allows_is_read_as_valid_calls(name: str, special: bool, parallel: bool) -> None:
    schemas = {tool.name: tool.parameters for tool in TOOLS}
    texts = [_enforced(FORMATS[name], special=special, parallel=parallel, seed=seed) for seed in range(12)]
    found = [calls_in(name, text) for text in texts if text is not None]
    assert found
    for calls in found:
        assert calls and (parallel or len(calls) == 1)
        for tool, arguments in calls:
            jsonschema.validate(arguments, schemas[tool])


@each_format
@pytest.mark.parametrize("calls", CALLS)
def test_the_grammar_allows_what_the_model_was_taught(name: str, calls: list[Written]) -> None:
    if name == "harmony" and len(calls) > 1:
        return
    tokens = tokenizer(tuple(FORMATS[name].markers))
    rules = FORMATS[name].rules(TOOLS, special_mark(tokens), parallel=True)
    matcher = GrammarCompiler(tokens, tokens.vocab_size).matcher(
        Grammar("lark", f"start: calls\n{rules}", "tools")
    )
    text = WRITERS[name](calls).removesuffix("<|call|>")
    assert matcher.accepts(tokens.encode(text, add_special_tokens=False))


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<tool_call>\n{'name': ...}\n</tool_call>", "hermes"),
        ("<|python_tag|>", "llama"),
        ('Respond in the format {"name": function name, "parameters": dictionary}', "llama"),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS] [{", "mistral"),
        ("[TOOL_CALLS]name[ARGS]", "mistral-args"),
        ("<|tool_call|>[", "granite"),
        ("<|tool_call|>[...]<|/tool_call|>", "phi"),
        ("".join(FORMATS["deepseek-v3"].markers) + "```json", "deepseek-v3"),
        ("".join(FORMATS["deepseek-v3"].markers), "deepseek-v31"),
        ("<tool_call>\n<function=x>\n<parameter=y>", "qwen-coder"),
        ("<tool_call>{name}\n<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>", "glm"),
        ('<|tool_call>call:{name}{{ <|"|>{v}<|"|> }}<tool_call|>', "gemma"),
        ("<start_function_call>call:{name}<escape>{v}<escape>", "function-gemma"),
        ('<minimax:tool_call>\n<invoke name="x">', "minimax"),
        ("<|start|>assistant<|channel|>final<|message|>", "harmony"),
        ("{{ messages }}", None),
    ],
)
def test_format_is_known_by_the_template(template: str, name: str | None) -> None:
    format = detect(template)
    assert (format and format.name) == name
