"""Chat messages to a prompt, by the model's own Jinja template.

Templates come with the model files and are not trusted: they run in Jinja's sandbox.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from emlxd.errors import ModelFormatError, RequestError

_MAX_PRODUCT = 1_000_000
# The space at its end tells whether the template trims messages.
_CONTINUE_TAG = "EMLXD_CONTINUES_HERE "


class ChatTemplate:
    """One template, parsed once. Rendering is safe from several threads."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """``special_tokens`` are variables of the template, such as ``bos_token``.

        Raises ModelFormatError if ``source`` is not valid Jinja.
        """
        environment = _environment()
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelFormatError(f"chat template, line {error.lineno}: {error.message}") from error
        except (RecursionError, SyntaxError) as error:
            raise ModelFormatError(f"chat template is nested too deeply: {error}") from error
        self._special_tokens = dict(special_tokens)
        self._needs = _Needs(tree, source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt, special tokens written out.

        ``continue_final_message`` leaves the last message open, and no new one is begun. Raises
        RequestError if the template refuses the messages or cannot render them.
        """
        chat = [self._needs.normalise(message) for message in messages]
        final_text = _mark_end(chat) if continue_final_message else None
        try:
            prompt = self._template.render(
                self._special_tokens
                | {"documents": None}
                | variables
                | {
                    "messages": chat,
                    "tools": tools and list(tools),
                    "add_generation_prompt": add_generation_prompt and not continue_final_message,
                }
            )
        except _Refused as refusal:
            raise RequestError(str(refusal), param="messages") from refusal
        except Exception as error:  # a template can raise whatever Python can
            raise RequestError(
                f"The model's chat template cannot render these messages: {error}", param="messages"
            ) from error
        return prompt if final_text is None else _cut_at_mark(prompt, final_text)


class _Refused(jinja2.TemplateError):
    """The template called ``raise_exception``."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """Also bounds what ``*`` and ``**`` can make."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if _size_of_product(operator, left, right) > _MAX_PRODUCT:
            raise SecurityError(f"'{operator}' makes too large a value")
        return super().call_binop(context, operator, left, right)


def _size_of_product(operator: str, left: Any, right: Any) -> int:
    """In bits for numbers, in items for sequences."""
    match left, right:
        case int(), int():
            return left.bit_length() * (right if operator == "**" else right.bit_length())
        case (str() | list() | tuple() as items, int(times)) | (
            int(times),
            str() | list() | tuple() as items,
        ):
            return len(items) * times
        case _:
            return 0


class _Generation(Extension):
    """``{% generation %}`` marks what the model wrote, for training: its body renders as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise _Refused(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


class _Needs:
    """What a template expects of its messages, read from its source."""

    def __init__(self, tree: nodes.Template, source: str) -> None:
        self._developer = "developer" in source
        self._parts = _iterates(tree, "content")
        self._only_parts = self._parts and not re.search(r"\bis\s+(not\s+)?string\b", source)
        self._null_content = bool(
            re.search(r"\bcontent\b['\"\])\s]*(is\s+(not\s+)?|==|!=)\s*none\b", source, re.I)
        )
        self._arguments_text = _prints_raw(tree, "arguments")
        self._thinking = any(
            _reads(node, "thinking") for node in tree.find_all((nodes.Getattr, nodes.Getitem))
        )

    def normalise(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of ``message`` as the template wants it. Nulls are left out, as Transformers does."""
        result = {name: value for name, value in message.items() if value is not None}
        if result.get("role") == "developer" and not self._developer:
            result["role"] = "system"
        if result.get("tool_calls"):
            result["tool_calls"] = [self._tool_call(call) for call in result["tool_calls"]]
        result["content"] = self._content(result.get("content"))
        # gpt-oss' template wants one or the other of a message that calls.
        if (
            self._thinking
            and "reasoning_content" in result
            and not (result["content"] and "tool_calls" in result)
        ):
            result.setdefault("thinking", result["reasoning_content"])
        return result

    def _content(self, content: Any) -> Any:
        if content is None:
            return None if self._null_content else ""
        if isinstance(content, str):
            return [{"type": "text", "text": content}] if self._only_parts else content
        if self._parts:
            return [dict(part) for part in content]
        return "".join(map(_text_of, content))

    def _tool_call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call.get("function", {}))
        arguments = function.get("arguments")
        if isinstance(arguments, str) and not self._arguments_text:
            function["arguments"] = _parsed(arguments)
        return {**call, "function": function}


def _text_of(part: Mapping[str, Any]) -> str:
    for kind in ("text", "refusal"):
        if isinstance(text := part.get(kind), str):
            return text
    raise RequestError(
        f"A content part of type '{part.get('type')}' is not supported by this model; expected 'text'.",
        param="messages",
    )


def _parsed(arguments: str) -> Any:
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _reads(node: nodes.Node | None, key: str) -> bool:
    """Whether ``node`` is ``x.key``, ``x['key']`` or a variable named ``key``, filtered or not."""
    match node:
        case nodes.Getattr(attr=name) | nodes.Name(name=name):
            return bool(name == key)
        case nodes.Getitem(arg=nodes.Const(value=value)):
            return bool(value == key)
        case nodes.Filter(node=inner):
            return _reads(inner, key)
        case _:
            return False


def _iterates(tree: nodes.Template, key: str) -> bool:
    return any(_reads(loop.iter, key) for loop in tree.find_all(nodes.For))


def _prints_raw(tree: nodes.Template, key: str) -> bool:
    """Whether the template writes ``key`` as text, and nowhere treats it as an object."""
    written = [
        *(part for output in tree.find_all(nodes.Output) for part in output.nodes),
        *(part for concat in tree.find_all(nodes.Concat) for part in concat.nodes),
        *(side for add in tree.find_all(nodes.Add) for side in (add.left, add.right)),
    ]
    opened = [
        *(filter.node for filter in tree.find_all(nodes.Filter)),
        *(call.node.node for call in tree.find_all(nodes.Call) if isinstance(call.node, nodes.Getattr)),
        *(loop.iter for loop in tree.find_all(nodes.For)),
    ]
    return any(_reads(node, key) for node in written) and not any(_reads(node, key) for node in opened)


def _mark_end(chat: list[dict[str, Any]]) -> str:
    """Put the mark after the final message's text, which is returned."""
    final = chat[-1] if chat else {}
    match final.get("content"):
        case str(text) if text:
            final["content"] = text + _CONTINUE_TAG
            return text
        case [*parts] if texts := [part for part in parts if isinstance(part.get("text"), str)]:
            text = texts[-1]["text"]
            texts[-1]["text"] = text + _CONTINUE_TAG
            return str(text)
        case _:
            raise RequestError("The final message has no text that could be continued.", param="messages")


def _cut_at_mark(prompt: str, final_text: str) -> str:
    end = prompt.rfind(_CONTINUE_TAG.rstrip())
    if end < 0 or final_text.strip() not in prompt:
        raise RequestError(
            "The final message cannot be continued: the model's chat template changes it.", param="messages"
        )
    kept = prompt[:end]
    return kept if prompt.startswith(_CONTINUE_TAG, end) else kept.rstrip()
