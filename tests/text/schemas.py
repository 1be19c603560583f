"""Varied JSON schemas that can be enforced."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any] | bool


def obj(required: str = "", **properties: Schema) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


_INTEGER: Schema = {"type": "integer"}
_STRING: Schema = {"type": "string", "maxLength": 8}
_BIT: Schema = {"type": "boolean"}
_TREE: Schema = {
    "$defs": {
        "node": obj(
            "value",
            value=_INTEGER,
            children={"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
        )
    },
    "$ref": "#/$defs/node",
}
_LIST: Schema = obj("head", head=_INTEGER, tail={"anyOf": [{"$ref": "#"}, {"type": "null"}]})

SCHEMAS: dict[str, Schema] = {
    "anything": True,
    "empty": {},
    "null": {"type": "null"},
    "boolean": _BIT,
    "integer": _INTEGER,
    "number": {"type": "number"},
    "string": _STRING,
    "array": {"type": "array", "maxItems": 2},
    "object": {"type": "object"},
    "types": {"type": ["integer", "null", "boolean"]},
    "minimum": {"type": "integer", "minimum": 7},
    "maximum": {"type": "integer", "maximum": -3},
    "range": {"type": "integer", "minimum": -5, "maximum": 1234},
    "exclusive": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3},
    "number range": {"type": "number", "minimum": 0, "maximum": 1},
    "number exclusive": {"type": "number", "exclusiveMinimum": -0.5, "exclusiveMaximum": 0.25},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 999},
    "half": {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 10},
    "draft 4 bounds": {"$schema": "http://json-schema.org/draft-07/schema#", "type": "integer", "minimum": 1},
    "lengths": {"type": "string", "minLength": 2, "maxLength": 4},
    "one letter": {"type": "string", "minLength": 1, "maxLength": 1},
    "pattern": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{2,4}$"},
    "loose pattern": {"type": "string", "pattern": "[0-9]", "maxLength": 9},
    "alternatives": {"type": "string", "pattern": "^(red|green|blue)$"},
    "half anchored": {"type": "string", "pattern": "^ab|cd$", "maxLength": 6},
    "escaped dollar": {"type": "string", "pattern": "^a\\$$"},
    "quotes in pattern": {"type": "string", "pattern": '^["\\\\\\n]{2}$'},
    "date": {"type": "string", "format": "date"},
    "date-time": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "email": {"type": "string", "format": "email", "maxLength": 30},
    "const": {"const": {"a": [1, None, "x"], "b": {"c": True}}},
    "const string": {"const": 'quote " and \\ and \n'},
    "enum": {"enum": ["red", "green", 3, None, 2.5, ["x"], {"y": 1}]},
    "enum prefixes": {"enum": ["a", "ab", "abc"]},
    "enum unicode": {"enum": ["žluťoučký", "你好", "😀", "\u0000"]},
    "typed enum": {"type": "string", "enum": ["left", "right", 5]},
    "any of": {"anyOf": [{"type": "integer"}, {"type": "array", "items": _BIT, "maxItems": 2}]},
    "any of objects": {
        "anyOf": [obj("kind a", kind={"const": "a"}, a=_INTEGER), obj("kind b", kind={"const": "b"}, b=_BIT)]
    },
    "one of": {"oneOf": [obj("kind", kind={"const": "x"}), obj("kind n", kind={"const": "y"}, n=_INTEGER)]},
    "all of": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
    "all of objects": {
        "allOf": [
            {"type": "object", "properties": {"a": _INTEGER}, "required": ["a"]},
            {"type": "object", "properties": {"b": _BIT}, "required": ["b"]},
        ]
    },
    "siblings of a reference": {"$defs": {"n": _INTEGER}, "$ref": "#/$defs/n", "minimum": 2, "maximum": 5},
    "one property": obj("a", a=_INTEGER),
    "optional property": obj("a", a=_INTEGER, b=_BIT, c=_STRING),
    "only optional": obj("", a=_BIT, b=_BIT),
    "free properties": {"type": "object", "properties": {"a": _INTEGER}, "required": ["a"]},
    "map": {"type": "object", "additionalProperties": _INTEGER, "maxProperties": 3},
    "non-empty map": {"type": "object", "additionalProperties": _BIT, "minProperties": 1, "maxProperties": 2},
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^x[0-9]$": _INTEGER},
        "additionalProperties": False,
        "maxProperties": 2,
    },
    "free but not that": {
        "type": "object",
        "properties": {"a": {"const": 1}},
        "additionalProperties": {"const": 2},
        "required": ["a"],
        "maxProperties": 3,
    },
    "required only": {
        "type": "object",
        "required": ["x", "y"],
        "additionalProperties": _INTEGER,
        "maxProperties": 2,
    },
    "unicode keys": obj("jméno 名前 🔑", **{"jméno": _STRING, "名前": _INTEGER, "🔑": _BIT}),
    "awkward keys": obj('a"b c\\d', **{'a"b': _INTEGER, "c\\d": _BIT, "e/f~g": _BIT}),
    "nested": obj("a", a=obj("b", b=obj("c", c=obj("d", d=_INTEGER)))),
    "array of objects": {
        "type": "array",
        "items": obj("id", id=_INTEGER, tag=_STRING),
        "minItems": 1,
        "maxItems": 3,
    },
    "matrix": {
        "type": "array",
        "minItems": 2,
        "maxItems": 2,
        "items": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2},
    },
    "tuple": {"type": "array", "prefixItems": [_INTEGER, _BIT, _STRING], "items": False, "minItems": 3},
    "open tuple": {"type": "array", "prefixItems": [_BIT], "items": _INTEGER, "maxItems": 4},
    "draft 7 tuple": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "items": [_INTEGER, _BIT],
        "additionalItems": False,
        "minItems": 2,
    },
    "tree": _TREE,
    "linked list": _LIST,
    "definitions": {
        "definitions": {"p": obj("x y", x=_INTEGER, y=_INTEGER)},
        "type": "array",
        "items": {"$ref": "#/definitions/p"},
        "maxItems": 2,
    },
    "annotations": {
        "type": "integer",
        "title": "T",
        "description": "D",
        "examples": [1],
        "default": 1,
        "x-note": {"not": 1},
        "deprecated": True,
    },
    "person": obj(
        "name age address",
        name={"type": "string", "minLength": 1, "maxLength": 12},
        age={"type": "integer", "minimum": 0, "maximum": 150},
        address=obj(
            "street city", street=_STRING, city=_STRING, zip={"type": "string", "pattern": "^\\d{5}$"}
        ),
        tags={"type": "array", "items": {"enum": ["new", "old"]}, "maxItems": 3},
    ),
}
