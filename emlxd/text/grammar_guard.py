"""Compiles grammars in a process of its own first: what crashes, hangs or fills that one is refused.

llguidance bounds what a compiled grammar costs, but not all that compiling takes: rules that nest by
thousands overflow the stack, and regular expressions that are to hold together can take hours and gigabytes.
Run as a program this is that process. It reads a grammar a line and answers each with an empty line.
"""

from __future__ import annotations

import json
import re
import resource
import select
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from typing import Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

SECONDS: Final = 10.0  # usual grammars take milliseconds, large ones one or two seconds
STACK: Final = 6 << 20  # bytes: less than any of the daemon's threads has
MEMORY: Final = 4 << 30

_SPECIAL: Final = re.compile(r"<\[\d+\]>")  # a special token by its number, of which bytes have few


class GrammarGuard:
    """Safe to use from several threads, which wait for each other. The process starts when it is needed."""

    def __init__(self, seconds: float = SECONDS) -> None:
        """``seconds`` is how long a grammar may take."""
        self._seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def stands(self, compiled: str) -> bool:
        """Whether ``compiled``, a grammar as llguidance writes it, can be compiled at a bearable cost."""
        line = json.dumps(compiled).encode() + b"\n"
        with self._lock:
            try:
                answered = self._ask(line)
            except OSError:
                answered = False
            if not answered:
                self._end()
            return answered

    def close(self) -> None:
        """Ends the process. It comes back if it is needed again."""
        with self._lock:
            self._end()

    def _ask(self, line: bytes) -> bool:
        if self._process is None:
            command = [sys.executable, "-m", "emlxd.text.grammar_guard"]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            self._stop = weakref.finalize(self, _end, self._process)
        asked, answers = self._process.stdin, self._process.stdout
        assert asked and answers
        asked.write(line)
        asked.flush()
        ready, _, _ = select.select([answers], [], [], self._seconds)
        return bool(ready) and bool(answers.readline())

    def _end(self) -> None:
        if self._process is not None:
            self._stop()
            self._process = None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with suppress(OSError), process:  # what it was not told yet cannot be
        pass


def limits() -> LLParserLimits:
    return LLParserLimits(
        max_items_in_row=20_000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=100_000,
        max_lexer_states=50_000,
        max_grammar_size=500_000,
        verbose_errors=False,
    )


def main() -> None:
    _limit(resource.RLIMIT_STACK, STACK)
    _limit(resource.RLIMIT_AS, MEMORY)
    tokenizer = LLTokenizer("byte")
    for line in sys.stdin.buffer:
        grammar = _SPECIAL.sub("<[0]>", json.loads(line))
        LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
        print(flush=True)


def _limit(what: int, size: int) -> None:
    _, most = resource.getrlimit(what)
    with suppress(ValueError, OSError):  # a system that has no such limit
        resource.setrlimit(what, (size if most == resource.RLIM_INFINITY else min(size, most), most))


if __name__ == "__main__":
    main()
