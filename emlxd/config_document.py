"""A YAML file as plain values, with the line of everything in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import yaml

from emlxd.errors import ConfigError

Keys = tuple[str | int, ...]
"""Where a value sits: ``("models", 0, "slots")``."""

# Aliases multiply: a few hundred bytes of YAML can stand for billions of values.
MAX_VALUES: Final = 50_000

_MERGE: Final = "tag:yaml.org,2002:merge"
_PLAIN: Final = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")


class Document:
    """A YAML file as plain values, the line of every key, and what is wrong with the file as YAML."""

    def __init__(self, path: Path | None) -> None:
        """Empty without a ``path``. Raises ConfigError."""
        self.values: dict[str, Any] = {}
        self.problems: list[tuple[int, str]] = []
        self.unreadable: set[Keys] = set()
        self._lines: dict[Keys, int] = {(): 1}
        self._budget = MAX_VALUES
        # Only its constructor for scalars is used; a safe one, which knows no Python objects.
        self._scalars = yaml.SafeLoader("")
        if path is None:
            return
        try:
            self.values = self._mapping(_compose(path), ())
        except RecursionError:
            raise ConfigError([f"{path}: nested too deeply, expected a few levels"]) from None
        if self._budget < 0:
            raise ConfigError([f"{path}: aliases expand to over {MAX_VALUES} values, expected fewer"])

    def line(self, where: Keys) -> int:
        """The line of ``where``, or of the nearest thing around it that the file has."""
        while where not in self._lines:
            where = where[:-1]
        return self._lines[where]

    def _value(self, node: yaml.Node, where: Keys) -> Any:
        self._budget -= 1
        if self._budget < 0:
            return None
        self._lines.setdefault(where, _line(node))
        if isinstance(node, yaml.CollectionNode) and node.tag not in _PLAIN:
            problem = f"the tag {node.tag} is not allowed, expected none"
        elif isinstance(node, yaml.MappingNode):
            return self._mapping(node, where)
        elif isinstance(node, yaml.SequenceNode):
            return [self._value(item, (*where, index)) for index, item in enumerate(node.value)]
        else:
            try:
                return self._scalars.construct_object(node)
            except yaml.constructor.ConstructorError:
                problem = f"the tag {node.tag} is not allowed, expected none"
            except ValueError as error:
                problem = f"{node.value!r} is not a value ({error}), expected text in quotes"
        self.problems.append((_line(node), f"{dotted(where)}: {problem}"))
        self.unreadable.add(where)
        return None

    def _mapping(self, node: yaml.MappingNode, where: Keys) -> dict[str, Any]:
        values: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        # Merges first, so that the lines of the mapping's own keys win as their values do.
        for key_node, value_node in sorted(node.value, key=lambda pair: pair[0].tag != _MERGE):
            key = key_node.value
            problem = None
            if key_node.tag == _MERGE:
                parts = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
                for part in parts:
                    found = self._value(part, where)
                    merged = found | merged if isinstance(found, dict) else merged
                    if not isinstance(part, yaml.MappingNode):
                        problem = "found nothing that can be merged, expected keys and values"
            elif not isinstance(key, str) or not key:
                problem = "found a key that is not text, expected text"
            elif key in values:
                first = self._lines[(*where, key)]
                problem = f"duplicate key {key!r}, expected it once; it is also on line {first}"
            else:
                self._lines[(*where, key)] = _line(key_node)
                values[key] = self._value(value_node, (*where, key))
            if problem is not None:
                self.problems.append((_line(key_node), f"{dotted(where)}: {problem}"))
        return merged | values


def _compose(path: Path) -> yaml.MappingNode:
    """The keys and values of a YAML file, each with its place. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigError([f"{path}: cannot read the file: {error.strerror}"]) from None
    except UnicodeDecodeError as error:
        at = f"{path}:{1 + error.object[: error.start].count(10)}"
        raise ConfigError([f"{at}: byte {error.start} is not UTF-8, expected a UTF-8 file"]) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        context = f" {error.context}" if error.context else ""
        meant = "; YAML is indented with spaces" if "'\\t'" in (error.problem or "") else ""
        raise ConfigError([f"{path}:{line}: not valid YAML{context}: {error.problem}{meant}"]) from None
    except yaml.reader.ReaderError as error:
        line = 1 + text[: error.position].count("\n")
        found = f"found the character #x{error.character:04x}, expected text without it"
        raise ConfigError([f"{path}:{line}: not valid YAML: {found}"]) from None
    if root is None:
        raise ConfigError([f"{path}:1: the file is empty, expected at least a list of models"])
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError([f"{path}:{_line(root)}: found no keys, expected some such as 'models:'"])
    return root


def _line(node: yaml.Node) -> int:
    line: int = node.start_mark.line
    return line + 1


def dotted(where: Keys) -> str:
    """``models[0].slots``"""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in where)
    return text.removeprefix(".") or "the file"
