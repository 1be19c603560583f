"""What a log line looks like, whoever writes it."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from emlxd.config import LogSettings
from emlxd.log import bind_request, configure


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Logging is the process's own: give it back as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_json_lines_hold_message_level_time_and_fields(capsys):
    configure(LogSettings(format="json"))
    structlog.get_logger("emlxd.test").info("model loaded", model="m", bytes=3)
    (line,) = lines(capsys)
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "message": "model loaded",
        "level": "info",
        "logger": "emlxd.test",
        "model": "m",
        "bytes": 3,
    }


def test_auto_is_json_where_there_is_no_terminal(capsys):
    configure(LogSettings())
    structlog.get_logger().warning("x")
    assert lines(capsys)[0]["message"] == "x"


def test_console_is_text_without_colours_where_there_is_no_terminal(capsys):
    configure(LogSettings(format="console"))
    structlog.get_logger().info("model loaded", model="m")
    text = capsys.readouterr().err
    assert "model loaded" in text
    assert "model=m" in text
    assert "\x1b" not in text


def test_the_level_holds_and_can_be_changed(capsys):
    log = structlog.get_logger()
    configure(LogSettings(level="warning", format="json"))
    log.info("hidden")
    configure(LogSettings(level="debug", format="json"))
    log.debug("shown")
    assert [line["message"] for line in lines(capsys)] == ["shown"]


def test_the_standard_library_goes_through_the_same_format(capsys):
    logging.getLogger("hypercorn.error").setLevel(logging.NOTSET)  # a server may have raised it
    logging.getLogger("hypercorn.error").addHandler(logging.StreamHandler())
    configure(LogSettings(format="json"))
    logging.getLogger("hypercorn.error").info("Running on %s", "127.0.0.1")
    logging.getLogger("hypercorn.access").info("GET /")
    logging.getLogger("asyncio").info("Using selector")
    (line,) = lines(capsys)
    assert (line["message"], line["logger"], line["level"]) == (
        "Running on 127.0.0.1",
        "hypercorn.error",
        "info",
    )


def test_an_exception_is_data_in_json(capsys):
    configure(LogSettings(format="json"))
    try:
        raise ValueError("broken")
    except ValueError:
        structlog.get_logger().exception("step failed")
        logging.getLogger("quart.app").exception("handler failed")
    for line in lines(capsys):
        assert line["exception"][0]["exc_type"] == "ValueError"
        assert line["exception"][0]["exc_value"] == "broken"


async def test_each_request_has_its_own_id(capsys):
    configure(LogSettings(format="json"))

    async def handle(request_id: str) -> None:
        bind_request(request_id)
        await asyncio.sleep(0)
        structlog.get_logger().info("served")
        logging.getLogger("other").info("also")

    await asyncio.gather(handle("a"), handle("b"))
    structlog.get_logger().info("outside")
    found = [line.get("request_id") for line in lines(capsys)]
    assert sorted(found[:-1]) == ["a", "a", "b", "b"]
    assert found[-1] is None


@pytest.mark.parametrize("format", ["json", "console"])
def test_a_traceback_does_not_show_local_variables(capsys, format):
    configure(LogSettings(format=format))
    secret = "".join(["hun", "ter2"])
    try:
        raise ValueError(len(secret))
    except ValueError:
        structlog.get_logger().exception("failed")
    text = capsys.readouterr().err
    assert "ValueError" in text
    assert "hunter2" not in text


def test_lines_go_where_standard_error_is_at_the_time(monkeypatch):
    configure(LogSettings(format="json"))
    elsewhere = io.StringIO()
    monkeypatch.setattr(sys, "stderr", elsewhere)
    structlog.get_logger().info("above the bar")
    assert json.loads(elsewhere.getvalue())["message"] == "above the bar"
