"""Who may ask: keys, web pages of other origins, and who may operate the server.

Order: a preflight of an allowed origin is answered without a key, since browsers send none; then the
key is checked. An answer to an allowed origin always says so, an error too: a page could not read it.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from ipaddress import IPv6Address, ip_address
from urllib.parse import urlsplit

from quart import Quart, Response, request

from emlxd.api.exchange import current_exchange
from emlxd.api.json_values import no_content
from emlxd.config import Settings
from emlxd.errors import AuthenticationFailed, PermissionDenied
from emlxd.keys import read_keys

# For supervisors, and the page, which asks for the key.
OPEN = frozenset({"/health", "/ready", "/", "/web/<name>"})
ADMIN = "/admin"
PREFLIGHT_SECONDS = 600


def install(app: Quart, settings: Settings) -> None:
    """Guards every route of ``app``. Raises UserError if the file of keys cannot be used."""
    keys = read_keys(settings.server)
    origins = frozenset(settings.server.cors_origins)
    unguarded = OPEN if settings.metrics.require_key else OPEN | {"/metrics"}

    async def admit() -> Response | None:
        origin = request.headers.get("Origin")
        if origin in origins and _is_preflight():
            return no_content(_preflight_headers())
        rule = request.url_rule.rule if request.url_rule else ""
        if keys:
            if rule not in unguarded:
                current_exchange().owner = _check_key(keys)
        elif rule.startswith(ADMIN):
            _check_operator(None if origin == _own_origin() else origin)
        return None

    async def allow_origin(response: Response) -> Response:
        if origins:
            response.vary.add("Origin")
        if (origin := request.headers.get("Origin")) in origins and origin:
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = "x-request-id, retry-after"
        return response

    app.before_request(admit)
    app.after_request(allow_origin)


def _check_key(keys: Sequence[bytes]) -> bytes:
    """A digest of the key that the request has. Raises AuthenticationFailed."""
    given = _given_key()
    if given is None:
        raise AuthenticationFailed(
            "An API key is needed, as 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
        )
    # Every key is compared, and each in constant time: the time tells nothing about any of them.
    matches = [hmac.compare_digest(given, key) for key in keys]
    if not any(matches):
        raise AuthenticationFailed("The API key is not known to this server.")
    return hashlib.sha256(given).digest()


def _given_key() -> bytes | None:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip().encode()
    key = request.headers.get("x-api-key")
    return key.encode() if key else None


def _check_operator(foreign_origin: str | None) -> None:
    """Without keys, operating is for this machine, but not for web pages that are open on it."""
    if foreign_origin is not None:
        raise PermissionDenied("Web pages may not operate this server.")
    # A page of the web can have its own name point to this machine: then only the Host tells.
    host = urlsplit(f"//{request.host}").hostname or ""
    if not (_is_loopback(request.remote_addr or "") and (host == "localhost" or _is_loopback(host))):
        raise PermissionDenied("Without API keys, only the server's own machine may operate it.")


def _own_origin() -> str:
    """What a browser sends as the Origin of the server's own page."""
    return f"{request.scheme}://{request.host}"


def _is_loopback(address: str) -> bool:
    try:
        found = ip_address(address)
    except ValueError:
        return False
    if isinstance(found, IPv6Address) and found.ipv4_mapped:
        found = found.ipv4_mapped
    return found.is_loopback


def _is_preflight() -> bool:
    return request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers


def _preflight_headers() -> dict[str, str]:
    asked = request.headers.get("Access-Control-Request-Headers", "authorization, content-type, x-api-key")
    return {
        "Access-Control-Allow-Methods": "GET, POST, DELETE",
        "Access-Control-Allow-Headers": asked,
        "Access-Control-Max-Age": str(PREFLIGHT_SECONDS),
    }
