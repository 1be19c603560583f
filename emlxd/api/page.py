"""GET /: the page for people, from files of this package. It loads nothing from elsewhere."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from typing import Final

from quart import Blueprint, Response, request

from emlxd.api.surface import Services
from emlxd.errors import RouteNotFound

# No inline script or style, no other host, and no way for a script to turn text into HTML.
POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # ask again each time: an unchanged file costs a 304
}
TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


def routes(services: Services) -> Blueprint:
    blueprint = Blueprint("page", __name__)
    assets = _read_assets()

    @blueprint.get("/")
    async def page() -> Response:
        return assets["index.html"].answer()

    @blueprint.get("/web/<name>")
    async def asset(name: str) -> Response:
        if name not in assets:
            raise RouteNotFound(f"Unknown request URL: GET {request.path}.")
        return assets[name].answer()

    return blueprint


class _Asset:
    def __init__(self, content: bytes, content_type: str) -> None:
        self._content = content
        self._content_type = content_type
        self._etag = hashlib.sha256(content).hexdigest()[:32]

    def answer(self) -> Response:
        """The file, or 304 to a browser that has it."""
        known = request.if_none_match.contains_weak(self._etag)
        response = Response(b"" if known else self._content, 304 if known else 200, HEADERS)
        response.content_type = self._content_type
        response.set_etag(self._etag)
        return response


def _read_assets() -> dict[str, _Asset]:
    folder = files("emlxd.api") / "web"
    return {
        file.name: _Asset(file.read_bytes(), TYPES[f".{file.name.rpartition('.')[2]}"])
        for file in folder.iterdir()
    }
