"""Output held to a grammar: which tokens may come next, from ``llguidance``.

A ``Grammar`` is plain data. A model's ``GrammarCompiler`` turns it into a ``Matcher`` for each sequence.
The limits below bound what any input can cost, when it is compiled and at each token.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from emlxd.core import Grammar
from emlxd.errors import RequestError, ServerFault
from emlxd.text import json_schema
from emlxd.text.grammar_guard import GrammarGuard, limits
from emlxd.text.tokenizer import Tokenizer

MAX_REGEX = 4_096
MAX_CHOICES = 10_000
MAX_SOURCE = 256 * 1024
MAX_LITERAL = json_schema.MAX_LITERAL
MAX_CACHED = 128

_LITERAL = re.compile(r'"(?:[^"\\\n]|\\.)*"')

WHITESPACE = r"[ \n]{1,8}"
"""At most this between two tokens of JSON: a model cannot go on with white space for ever."""


class InvalidGrammar(RequestError):
    code = "invalid_grammar"


def json_object_grammar(param: str) -> Grammar:
    """Any JSON object."""
    return Grammar("json_schema", '{"type": "object"}', param)


def json_schema_grammar(schema: Any, param: str) -> Grammar:
    """JSON that ``schema`` allows. Raises UnsupportedSchema for one that cannot be enforced whole."""
    schema = json_schema.checked(schema, param)
    return Grammar("json_schema", _bounded(json.dumps(_as_object(schema)), param), param)


def regex_grammar(pattern: str, param: str) -> Grammar:
    """Text that ``pattern`` matches from its first to its last character."""
    if len(pattern) > MAX_REGEX:
        raise InvalidGrammar(f"'{param}' may have at most {MAX_REGEX} characters.", param=param)
    return Grammar("regex", pattern, param)


def choice_grammar(choices: Sequence[str], param: str) -> Grammar:
    """One of ``choices``, to the letter."""
    if not choices or len(choices) > MAX_CHOICES:
        raise InvalidGrammar(f"'{param}' must have 1 to {MAX_CHOICES} entries.", param=param)
    if any(len(choice) > MAX_LITERAL for choice in choices):
        raise _too_long(param)
    alternatives = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    return Grammar("lark", _bounded(f"start: CHOICE\nCHOICE: {alternatives}", param), param)


def lark_grammar(source: str, param: str) -> Grammar:
    """Text of a context-free grammar in llguidance's dialect of Lark."""
    if any(len(literal[0]) > MAX_LITERAL for literal in _LITERAL.finditer(source)):
        raise _too_long(param)
    return Grammar("lark", _bounded(source, param), param)


def nested_grammar(main: str, content: Grammar) -> Grammar:
    """The Lark grammar ``main``, in which ``@content`` is ``content``."""
    if content.kind == "lark":
        part: dict[str, Any] = {"lark_grammar": content.source}
    else:
        part = json.loads(_source(content))["grammars"][0]
    grammars = [{"lark_grammar": main}, part | {"name": "content"}]
    return Grammar("nested", json.dumps({"grammars": grammars}), content.param)


def embedded_schema(schema: Any) -> str:
    """A schema as part of a Lark grammar, with the same limit on white space."""
    return f"%json {json.dumps(_as_object(schema) | {'x-guidance': {'whitespace_pattern': WHITESPACE}})}"


class Matcher:
    """Follows one sequence through a grammar."""

    def __init__(self, matcher: LLMatcher, vocabulary: _Vocabulary, mask_bytes: int, param: str) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._mask_bytes = mask_bytes
        self._param = param

    @property
    def finished(self) -> bool:
        """Whether the text is complete and nothing may follow but an end token."""
        if self._matcher.is_stopped():
            return True
        # A model without an end token cannot say it.
        return not self._vocabulary.ends and self._matcher.is_accepting() and not any(self._allowed())

    def mask(self) -> bytes:
        """One bit a token, the lowest first, in little-endian words of 32 bits: 1 is allowed.

        Raises InvalidGrammar if the grammar is too complex to go on with, ServerFault if nothing is allowed.
        """
        mask = self._allowed()
        if self._matcher.is_error():
            raise self._failure()
        if mask.count(0) == len(mask):
            raise ServerFault("The grammar allows no next token.")
        return mask

    def _allowed(self) -> bytes:
        return self._matcher.compute_bitmask()[: self._mask_bytes].ljust(self._mask_bytes, b"\0")

    def accept(self, token: int) -> None:
        """Goes on by ``token``. Raises ServerFault if the grammar does not allow it."""
        if not self._matcher.consume_token(token):
            raise self._failure()

    def accepts(self, tokens: Sequence[int]) -> bool:
        """Goes on by ``tokens`` if all of them are allowed, else stays where it is."""
        if self._matcher.validate_tokens(list(tokens)) < len(tokens):
            return False
        return self._matcher.consume_tokens(list(tokens))

    def accepts_text(self, text: str) -> bool:
        """Goes on by ``text``, if it is allowed, however the model cut it into tokens."""
        tokens = self._vocabulary.tokenize(text)
        return bool(tokens) and self.accepts(tokens)

    def copy(self) -> Matcher:
        return Matcher(self._matcher.deep_copy(), self._vocabulary, self._mask_bytes, self._param)

    def _failure(self) -> InvalidGrammar | ServerFault:
        problem = _first_line(self._matcher.get_error())
        if "satisfy the grammar" in problem:
            return ServerFault(f"A token that the grammar does not allow: {problem}")
        if problem.startswith("NoExtension"):
            return InvalidGrammar(f"No text can satisfy '{self._param}'.", param=self._param)
        return InvalidGrammar(f"'{self._param}' is too complex to be enforced: {problem}", param=self._param)


def only(token: int, mask_bytes: int, mask: bytes | None = None) -> bytes:
    """A mask that allows ``token``, and what ``mask`` allows."""
    bits = bytearray(mask or bytes(mask_bytes))
    bits[token >> 3] |= 1 << (token & 7)
    return bytes(bits)


class GrammarCompiler:
    """Compiles grammars for one model, and keeps the latest. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """``vocab_size`` is the width of the model's logits, which may exceed the tokenizer's."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self.mask_bytes = (vocab_size + 31) // 32 * 4
        self._compiled: OrderedDict[Grammar, Matcher] = OrderedDict()
        self._lock = threading.Lock()
        self._guard = GrammarGuard()

    def close(self) -> None:
        """Ends the process that grammars are tried in."""
        self._guard.close()

    @cached_property
    def _vocabulary(self) -> _Vocabulary:
        return _Vocabulary(self._tokenizer, self._vocab_size, 8 * self.mask_bytes)

    def matcher(self, grammar: Grammar) -> Matcher:
        """At the start of ``grammar``. The first time compiles it, which can take about a second.

        Raises RequestError for a grammar that is faulty, too complex, or matches no text.
        """
        with self._lock:
            compiled = self._compiled.get(grammar)
        # Not under the lock: a worker must not wait for another request's grammar.
        compiled = compiled or self._compile(grammar)
        with self._lock:
            self._compiled[grammar] = compiled
            self._compiled.move_to_end(grammar)
            if len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
            return compiled.copy()

    def _compile(self, grammar: Grammar) -> Matcher:
        source = _source(grammar)
        if not self._guard.stands(source):
            raise _translated("compiling it takes too long, or too much memory", grammar)
        compiled = LLMatcher(self._vocabulary.tokenizer, source, log_level=0, limits=limits())
        if compiled.is_error():
            raise _translated(compiled.get_error(), grammar)
        matcher = Matcher(compiled, self._vocabulary, self.mask_bytes, grammar.param)
        if matcher.finished:
            raise InvalidGrammar(f"Only an empty text satisfies '{grammar.param}'.", param=grammar.param)
        matcher.copy().mask()
        return matcher


class _Vocabulary:
    """A ``Tokenizer`` as llguidance takes it. Made at first use: it takes up to a second.

    llguidance takes the first token for the end of a text if there is none. So there is one behind all that
    masks are about, past ``masked`` tokens.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, masked: int) -> None:
        self.ends = sorted(tokenizer.eos_ids)
        self.bos_token_id = tokenizer.bos_id
        self.special_token_ids = sorted(tokenizer.special_ids)
        self.tokens = [tokenizer.token_bytes(id) for id in range(vocab_size)]
        if not self.ends:
            self.tokens += [b""] * (masked + 1 - vocab_size)
        self.eos_token_id = self.ends[0] if self.ends else masked
        self._tokenizer = tokenizer

    @cached_property
    def tokenizer(self) -> LLTokenizer:
        return LLTokenizer(TokenizerWrapper(self), eos_token=self.ends or [self.eos_token_id])

    def __call__(self, text: str) -> list[int]:
        """Tokens whose bytes are exactly ``text``, none of them special."""
        ids = self.tokenize(text)
        special = self._tokenizer.special_ids
        return self._greedy(text.encode()) if not ids or special.intersection(ids) else ids

    def tokenize(self, text: str) -> list[int]:
        """Tokens whose bytes are exactly ``text``, as the model writes them; none if there is no such way."""
        data = text.encode()
        for lead in ("", "\n"):  # some tokenizers put a space before a text
            ids = self._tokenizer.encode(lead + text, add_special_tokens=False)
            for start in range(min(3, len(ids)) + 1):
                if b"".join(self.tokens[id] for id in ids[start:]) == data:
                    return ids[start:]
        return []

    def _greedy(self, data: bytes) -> list[int]:
        """The longest token each time."""
        ids: list[int] = []
        while data:
            lengths = range(min(len(data), 64), 0, -1)
            length = next((length for length in lengths if data[:length] in self._plain), 0)
            if not length:
                break
            ids.append(self._plain[data[:length]])
            data = data[length:]
        return ids

    @cached_property
    def _plain(self) -> dict[bytes, int]:
        special = self._tokenizer.special_ids
        return {data: id for id, data in enumerate(self.tokens) if data and id not in special}


def _source(grammar: Grammar) -> str:
    if grammar.kind == "json_schema":
        try:
            return LLMatcher.grammar_from_json_schema(
                grammar.source, overrides={"whitespace_pattern": WHITESPACE}
            )
        except ValueError as error:
            raise _translated(str(error), grammar) from None
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.source)
    if grammar.kind == "nested":
        return grammar.source
    return LLMatcher.grammar_from_lark(grammar.source)


def _translated(problem: str, grammar: Grammar) -> RequestError:
    """llguidance's error as ours, with the place where its own does not tell it."""
    if problem.startswith("panic"):  # what follows is of no use to a client
        problem = "it is too large"
    if grammar.kind != "json_schema":
        return InvalidGrammar(f"Invalid grammar in '{grammar.param}': {problem.strip()}", param=grammar.param)
    problem = " ".join(problem.split())
    if "oneOf" in problem:
        problem = "'oneOf' is supported only where its branches cannot overlap; 'anyOf' is"
    where = _places(problem, json.loads(grammar.source))
    return json_schema.UnsupportedSchema(
        f"Invalid schema in '{grammar.param}'{where}: {problem}.", param=grammar.param
    )


def _places(problem: str, schema: Any) -> str:
    """The places of the keyword that ``problem`` is about, as far as that can be told."""
    if "regex" in problem:
        found = [f"{place}/pattern" for place, node in json_schema.schemas(schema) if _bad_pattern(node)]
    else:
        named = [keyword for keyword in json_schema.ENFORCED if keyword in problem]
        keyword = min(named, key=lambda name: (problem.find(name), -len(name)), default=None)
        found = json_schema.places(schema, keyword) if keyword else []
    return f" at {' or '.join(repr(place) for place in found[:3])}" if found else ""


def _first_line(text: str) -> str:
    return text.split("\n", 1)[0]


def _bad_pattern(node: Any) -> bool:
    if not (isinstance(node, dict) and "pattern" in node):
        return False
    alone = LLMatcher.grammar_from_json_schema({"type": "string", "pattern": node["pattern"]})
    return bool(LLMatcher.validate_grammar(alone))


def _as_object(schema: Any) -> dict[str, Any]:
    return {"allOf": [schema]} if isinstance(schema, bool) else schema


def _too_long(param: str) -> InvalidGrammar:
    return InvalidGrammar(f"A text in '{param}' may have at most {MAX_LITERAL} characters.", param=param)


def _bounded(source: str, param: str) -> str:
    if len(source) > MAX_SOURCE:
        raise InvalidGrammar(f"'{param}' may have at most {MAX_SOURCE} characters.", param=param)
    return source
