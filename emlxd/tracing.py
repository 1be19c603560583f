"""Traces for OpenTelemetry: a span for each request. It takes the extra ``emlxd[otel]``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from emlxd.errors import UserError
from emlxd.version import package_version

if TYPE_CHECKING:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider

    from emlxd.config import TracingSettings

Value = str | int | float | Sequence[str]
EXPORT_TIMEOUT = 5.0  # seconds


class Tracer:
    """Writes a span when all of it is known, at its end, so that nothing is done for it before."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("emlxd", package_version())

    def record(
        self, name: str, attributes: Mapping[str, Value], *, seconds: float, parent: str, failed: bool
    ) -> None:
        """A span that ends now. ``parent`` is the request's ``traceparent`` header, or empty."""
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        end = time.time_ns()
        span = self._tracer.start_span(
            name,
            context=TraceContextTextMapPropagator().extract({"traceparent": parent}),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=end - round(seconds * 1e9),
        )
        if failed:
            span.set_status(StatusCode.ERROR)
        span.end(end)

    def close(self) -> None:
        """Sends what is not sent yet."""
        self._provider.shutdown()


def check_tracing(settings: TracingSettings) -> None:
    """Raises UserError if an endpoint is set and the extra is not installed."""
    if settings.endpoint:
        _exporter()


def _exporter() -> type[OTLPSpanExporter]:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise UserError("tracing.endpoint needs OpenTelemetry: pip install 'emlxd[otel]'.") from None
    return OTLPSpanExporter


def open_tracer(endpoint: str) -> Tracer:
    """A tracer that sends to an OTLP endpoint over HTTP. Raises UserError without the extra."""
    exporter = _exporter()(endpoint=endpoint, timeout=EXPORT_TIMEOUT)
    from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({SERVICE_NAME: "emlxd", SERVICE_VERSION: package_version()})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracer(provider)
