"""A span for each request, by OpenTelemetry's conventions."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

import pytest

from emlxd.config import TracingSettings
from emlxd.errors import UserError
from emlxd.tracing import Tracer, check_tracing, open_tracer
from tests.metrics.house import house
from tests.metrics.test_readings import M, until

trace = pytest.importorskip("opentelemetry.sdk.trace")
in_memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider  # noqa: E402
from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: E402
from opentelemetry.trace import SpanKind, StatusCode  # noqa: E402

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Recorded:
    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = Tracer(provider)

    @property
    def spans(self) -> Sequence[ReadableSpan]:
        return self._exporter.get_finished_spans()


async def test_a_span_says_what_was_asked_and_what_it_took() -> None:
    recorded = Recorded()
    async with house(tracer=recorded.tracer) as daemon:
        daemon.http.headers["traceparent"] = f"00-{TRACE}-{PARENT}-01"
        answer = await daemon.complete(max_tokens=5, temperature=0.5, seed=7, n=2)
        await daemon.http.get("/health")
    (span,) = recorded.spans
    assert (span.name, span.kind) == ("text_completion m", SpanKind.SERVER)
    assert f"{span.context.trace_id:032x}" == TRACE
    assert span.parent is not None and f"{span.parent.span_id:016x}" == PARENT
    assert span.start_time and span.end_time and 0 < span.end_time - span.start_time < 60e9
    attributes = dict(span.attributes or {})
    first_token = attributes.pop("gen_ai.latency.time_to_first_token")
    assert isinstance(first_token, float) and 0 < first_token < (span.end_time - span.start_time) / 1e9
    assert attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "emlxd",
        "gen_ai.request.model": "m",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 0,
        "gen_ai.request.seed": 7,
        "gen_ai.response.model": "m",
        "gen_ai.response.finish_reasons": ("length", "length"),
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 10,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "client.address": "127.0.0.1",
        "emlxd.request_id": answer.headers["x-request-id"],
    }


async def test_failures_are_told_apart() -> None:
    recorded = Recorded()
    async with house(tracer=recorded.tracer) as daemon:
        await daemon.complete("unknown")
        for stream in (False, True):
            daemon.runners["m"].fail_next = RuntimeError("device lost")
            await daemon.complete(stream=stream)
        daemon.http.headers["traceparent"] = "broken"
        await daemon.complete(max_tokens=1)
        await until(daemon, lambda values: values[f"emlxd_requests_running{M}"] == 0)
    found = [
        (span.name, span.status.status_code, (span.attributes or {}).get("error.type"))
        for span in recorded.spans
    ]
    assert found == [
        ("text_completion", StatusCode.UNSET, "404"),
        ("text_completion m", StatusCode.ERROR, "500"),
        ("text_completion m", StatusCode.ERROR, "error"),
        ("text_completion m", StatusCode.UNSET, None),
    ]


async def test_spans_are_sent_to_the_endpoint() -> None:
    received: asyncio.Queue[bytes] = asyncio.Queue()

    async def collect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.put_nowait(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(collect, "127.0.0.1", 0) as collector:
        port = collector.sockets[0].getsockname()[1]
        tracer = open_tracer(f"http://127.0.0.1:{port}/v1/traces")
        tracer.record("chat m", {"gen_ai.operation.name": "chat"}, seconds=0.1, parent="", failed=False)
        await asyncio.to_thread(tracer.close)
        head = await asyncio.wait_for(received.get(), 20)
    assert head.startswith(b"POST /v1/traces HTTP/1.1\r\n")


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    endpoint = "http://127.0.0.1:4318/v1/traces"
    for use in (open_tracer, lambda endpoint: check_tracing(TracingSettings(endpoint=endpoint))):
        with pytest.raises(UserError, match=r"pip install 'emlxd\[otel\]'"):
            use(endpoint)
    check_tracing(TracingSettings())
