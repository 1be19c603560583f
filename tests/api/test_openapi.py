"""/openapi.json names every route, and the answers are what it says, also to what schemathesis makes up."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from quart import Quart
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from emlxd.api.app import create_app
from emlxd.api.openapi import OPERATIONS, Operation, document
from emlxd.config import Settings
from emlxd.metrics import Metrics
from tests.api.test_properties import make_app
from tests.fakes import FakeEmbedder, FakeRegistry

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
HERE = [one for one in OPERATIONS if not re.match("/admin/(status|config|reload|models)", one.path)]


def routes_of(app: Quart) -> set[tuple[str, str]]:
    return {
        (method.lower(), re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", rule.rule))
        for rule in app.url_map.iter_rules()
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}
    }


def test_every_route_is_described() -> None:
    class Nobody:
        """Answers nothing: only the routes are looked at."""

    app = create_app(FakeRegistry(), Settings(), Metrics(device="fake"), operator=Nobody())  # type: ignore[arg-type]
    page = {("get", "/"), ("get", "/web/{name}")}
    assert routes_of(app) - page == {(one.method, one.path) for one in OPERATIONS}


@pytest.mark.parametrize(
    ("operation", "mode"),
    [
        *((one, GenerationMode.POSITIVE) for one in HERE),
        *((one, GenerationMode.NEGATIVE) for one in HERE if one.body),
    ],
    ids=lambda value: f"{value.method} {value.path}" if isinstance(value, Operation) else value.value,
)
def test_answers_are_as_described(operation: Operation, mode: GenerationMode) -> None:
    """With bodies that are as described, for a model that is there, and with bodies that are not."""
    api = schemathesis.openapi.from_asgi("/openapi.json", make_app(FakeEmbedder()))

    @settings(max_examples=10, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=api[operation.path][operation.method].as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        if mode is GenerationMode.POSITIVE and operation.body:
            case.body["model"] = "fake"
        case.call_and_validate(checks=CHECKS)

    check()


@pytest.mark.parametrize("keys", [True, False])
def test_keys_are_described_where_they_are_needed(keys: bool) -> None:
    assert bool(document(keys=keys)["security"]) == keys


async def test_the_document_is_served(http: httpx.AsyncClient) -> None:
    assert (await http.get("/openapi.json")).json() == document(keys=False)
