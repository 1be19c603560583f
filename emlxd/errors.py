"""Every error that emlxd raises on purpose.

* EmlxdError
  * RequestError                 400  the client's request is at fault
    x ContextLengthExceeded      400
    x AuthenticationFailed       401
    x PermissionDenied           403
    x ModelNotFound              404
    x RequestNotFound            404
    x ResponseNotFound           404
    x RouteNotFound              404
    x MethodNotAllowed           405
    x RequestTimedOut            408
    x PayloadTooLarge            413
    x UnsupportedMediaType       415
    x QueueFull                  429
  * ServerFault                  500  emlxd is at fault
    x Unavailable                503  loading, overloaded, or shutting down
      x NoRoom                   503  the model does not fit into memory now
  * UserError                    not an HTTP error: the command line prints it and exits
    x ConfigError                     config.yaml, with file and line
    x SourceError                     model files that cannot be fetched or found
    x ModelFormatError                model files that cannot be understood

``status``, ``type`` and ``code`` are what OpenAI's API uses for the same fault.
"""

from __future__ import annotations

import json


class EmlxdError(Exception):
    """The root. ``message`` is safe to show to a client."""

    status = 500
    type = "server_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or type(self).code


class RequestError(EmlxdError):
    """A request that cannot be served as it was written. ``param`` names the field at fault."""

    status = 400
    type = "invalid_request_error"


class ContextLengthExceeded(RequestError):
    """The prompt does not fit the model's context."""

    code = "context_length_exceeded"

    def __init__(self, tokens: int, max_context: int, *, param: str = "messages") -> None:
        super().__init__(
            f"This model's maximum context length is {max_context} tokens, "
            f"but the prompt has {tokens} tokens and at least one must be left for the answer. "
            "Shorten the prompt.",
            param=param,
        )


class AuthenticationFailed(RequestError):
    status = 401
    code = "invalid_api_key"


class PermissionDenied(RequestError):
    status = 403
    type = "permission_error"


class ModelNotFound(RequestError):
    status = 404
    code = "model_not_found"

    def __init__(self, name: str) -> None:
        super().__init__(
            f"The model '{name[:80]}' does not exist; GET /v1/models lists those that do.", param="model"
        )


class RequestNotFound(RequestError):
    """The request has ended, or never was."""

    status = 404

    def __init__(self, id: str) -> None:
        super().__init__(f"No request with id '{id[:80]}' is running.", param="id")


class ResponseNotFound(RequestError):
    """The response was never kept, was deleted, or had to make room for newer ones."""

    status = 404

    def __init__(self, id: str) -> None:
        super().__init__(f"Response with id '{id[:80]}' not found.", param="id")


class RouteNotFound(RequestError):
    status = 404
    code = "unknown_url"


class MethodNotAllowed(RequestError):
    status = 405
    code = "method_not_allowed"


class RequestTimedOut(RequestError):
    """The client did not send its body in time, or its answer took longer than ``request_timeout``."""

    status = 408
    code = "request_timeout"


class PayloadTooLarge(RequestError):
    status = 413
    code = "payload_too_large"


class UnsupportedMediaType(RequestError):
    status = 415
    code = "unsupported_media_type"


class QueueFull(RequestError):
    """The model's queue is at its limit. ``retry_after`` is in seconds."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"
    retry_after = 1


class ServerFault(EmlxdError):
    """Something broke inside emlxd while it served the request."""


class Unavailable(ServerFault):
    """Not now: the model is loading, its worker is away, or the server is shutting down."""

    status = 503
    code = "service_unavailable"

    def __init__(self, message: str, *, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class NoRoom(Unavailable):
    """The model does not fit the memory budget beside what has to stay. The message has numbers."""

    code = "insufficient_memory"


class UserError(EmlxdError):
    """A mistake in what the user gave us, shown on the command line without a traceback."""


class ConfigError(UserError):
    """A configuration that cannot be used. One line of ``problems`` each: file, line, what, expected."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class SourceError(UserError):
    """Model files that are missing, cannot be fetched, or fail their checksum."""


class ModelFormatError(UserError):
    """Model files that are damaged or of a kind that emlxd does not know."""


def message_in(body: bytes) -> str | None:
    """That of an error in the form in which OpenAI's API, and emlxd's, answers with it."""
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return None
    return str(message) if message else None
