"""How one model is asked for an answer of a certain shape, and how its answers are read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import structlog

from emlxd.core import Grammar, Shape, Tool
from emlxd.errors import RequestError, ServerFault
from emlxd.text.grammar import GrammarCompiler, InvalidGrammar, json_schema_grammar, nested_grammar
from emlxd.text.json_schema import UnsupportedSchema
from emlxd.text.thinking import find_thinking
from emlxd.text.tokenizer import Tokenizer
from emlxd.text.tools.hermes import Hermes
from emlxd.text.tools.table import FORMATS, detect

log = structlog.get_logger(__name__)

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a request asks of the shape of its answer; ``Dialect`` turns it into a ``Shape``.

    ``choice`` is "none", "auto", "required", or the name of a tool in ``named``. ``grammar`` is for what is
    neither thinking nor a call. In a ``plain`` answer there is neither.
    """

    tools: tuple[Tool, ...] = ()
    choice: str = "auto"
    named: str | None = None
    parallel: bool = True
    grammar: Grammar | None = None
    max_reasoning_tokens: int | None = None
    plain: bool = False


class Dialect:
    """One model's way with tools and thinking. Safe to use from several threads."""

    def __init__(
        self, template: str, tokenizer: Tokenizer, compiler: GrammarCompiler, call_format: str | None = None
    ) -> None:
        """``template`` is the source of the chat template, "" if there is none. It tells the format of calls,
        unless ``call_format`` does.
        """
        self._template = template
        self._tokenizer = tokenizer
        self._compiler = compiler
        self._format = FORMATS[call_format] if call_format else detect(template) or Hermes()
        self._knows_tools = bool(re.search(r"\btools\b", template))

    def messages(self, messages: Sequence[Message], tools: Sequence[Message] | None) -> Sequence[Message]:
        """The conversation for the template. If that knows no tools, they are described in words."""
        if self._knows_tools:
            return messages
        told = [_in_words(message) for message in messages]
        return _with_system(told, _instructions(tools)) if tools else told

    def shape(self, prompt: str, wishes: Wishes) -> Shape:
        """The shape of an answer to ``prompt``. Its grammars are compiled, which can take about a second.

        Raises RequestError for a grammar or a schema that cannot be enforced.
        """
        if wishes.plain:
            return self._compiled(Shape(grammar=wishes.grammar))
        try:
            return self._compiled(self._shape(prompt, wishes))
        except RequestError:
            if not wishes.tools or any(tool.strict for tool in wishes.tools):
                raise
            # Each tool may do, and all of them be too much.
            free = tuple(map(_freed, wishes.tools))
            return self._compiled(self._shape(prompt, replace(wishes, tools=free)))

    def _compiled(self, shape: Shape) -> Shape:
        """``shape``, whose grammars are compiled. Raises RequestError."""
        for grammar in (shape.grammar, shape.call_grammar):
            if grammar:
                self._compiler.matcher(grammar)
        return shape

    def _shape(self, prompt: str, wishes: Wishes) -> Shape:
        tools = () if wishes.choice == "none" else tuple(map(self._enforceable, wishes.tools))
        framed = self._format.writes_all
        return Shape(
            thinking=None if framed else find_thinking(self._template, prompt),
            call_format=self._format.name if tools or framed else "",
            tools=tools,
            parallel_calls=wishes.parallel and wishes.named is None,
            calls_alone=wishes.choice == "required" or wishes.named is not None,
            grammar=self._grammar(tools, wishes),
            call_grammar=self._call_grammar(tools, wishes),
            max_reasoning_tokens=wishes.max_reasoning_tokens,
        )

    def _grammar(self, tools: Sequence[Tool], wishes: Wishes) -> Grammar | None:
        if wishes.choice == "required" or wishes.named:
            return self._calls(tools, wishes)
        if wishes.grammar is None:
            return None
        if not (tools or self._format.writes_all):
            return wishes.grammar
        rules = [self._format.final_rules("@content", self._mark)]
        if tools:
            calls = self._format.rules(tools, self._mark, parallel=wishes.parallel)
            rules += [rule for rule in calls.split("\n") if rule not in rules[0].split("\n")]
        start = "start: final | calls" if tools else "start: final"
        return nested_grammar("\n".join([start, *rules]), wishes.grammar)

    def _call_grammar(self, tools: Sequence[Tool], wishes: Wishes) -> Grammar | None:
        free = tools and wishes.choice == "auto" and not (wishes.named or wishes.grammar)
        return self._calls(tools, wishes) if free else None

    def _calls(self, tools: Sequence[Tool], wishes: Wishes) -> Grammar:
        if wishes.named:
            tools = [tool for tool in tools if tool.name == wishes.named]
        return self._calls_of(tools, parallel=wishes.parallel and not wishes.named, param="tools")

    def _calls_of(self, tools: Sequence[Tool], *, parallel: bool, param: str) -> Grammar:
        rules = self._format.rules(tools, self._mark, parallel=parallel)
        return Grammar("lark", f"start: calls\n{rules}", param)

    def _enforceable(self, tool: Tool) -> Tool:
        """``tool`` with a schema that a grammar can be made of."""
        try:
            return self._enforced(tool)
        except RequestError as error:
            if tool.strict:
                raise
            log.info("tool schema not enforced", tool=tool.name, reason=error.message)
        freed = replace(tool, parameters=self._format.freed(tool.parameters))
        try:
            return self._enforced(freed)
        except RequestError:
            return _freed(tool)

    def _enforced(self, tool: Tool) -> Tool:
        """Raises RequestError if the schema of ``tool`` cannot be enforced whole in the model's format."""
        grammar = json_schema_grammar({"type": "object"} | tool.parameters, tool.param)
        enforced = replace(tool, parameters=json.loads(grammar.source))
        if self._format.raw:
            self._check_rules(enforced)
        else:
            self._compiler.matcher(grammar)
        return enforced

    def _check_rules(self, tool: Tool) -> None:
        grammar = self._calls_of([tool], parallel=False, param=tool.param)
        try:
            self._compiler.matcher(grammar)
        except (InvalidGrammar, ServerFault) as error:
            raise UnsupportedSchema(
                f"Invalid schema in '{tool.param}': not supported in the format '{self._format.name}' "
                f"of this model: {' '.join(error.message.split())}",
                param=tool.param,
            ) from None

    def _mark(self, text: str) -> str:
        """What stands in Lark for a mark of the format: a special token, or its text."""
        id = self._tokenizer.id_of(text)
        special = id is not None and id in self._tokenizer.special_ids
        return f"<[{id}]>" if special else json.dumps(text, ensure_ascii=False)


def _freed(tool: Tool) -> Tool:
    """With any JSON object for its arguments."""
    return replace(tool, parameters={"type": "object"})


def thinks(template: str) -> bool:
    """Whether a model with this chat template may think before it answers."""
    format = detect(template)
    return find_thinking(template, "") is not None or (format is not None and format.writes_all)


def _instructions(tools: Sequence[Message]) -> str:
    described = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "You may call functions to help with the user's request. These are the functions, one a line:\n"
        f"<tools>\n{described}\n</tools>\n"
        "To call one, answer with its name and arguments as a JSON object between tags:\n"
        '<tool_call>\n{"name": "the name", "arguments": {"an argument": "its value"}}\n</tool_call>'
    )


def _in_words(message: Message) -> Message:
    """A message with its calls, or its tool's result, as text."""
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{_text(message)}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    calls = [_call_in_words(call["function"]) for call in message["tool_calls"]]
    return {"role": "assistant", "content": "\n".join(filter(None, [_text(message), *calls]))}


def _call_in_words(function: Mapping[str, Any]) -> str:
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {json.dumps(function["name"])}, "arguments": {text}}}\n</tool_call>'


def _with_system(messages: Sequence[Message], text: str) -> list[Message]:
    if messages and messages[0].get("role") in ("system", "developer"):
        first = {**messages[0], "content": f"{_text(messages[0])}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _text(message: Message) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
