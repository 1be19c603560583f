"""The last step of every route that generates: the same events, streamed or gathered."""

from __future__ import annotations

from collections.abc import Sequence

from quart import Response

from emlxd.api.generate import Choices, Source
from emlxd.api.render import Renderer, json_response
from emlxd.api.sse import stream_response


async def respond(
    renderer: Renderer, sources: Sequence[Source], *, stream: bool, heartbeat: float
) -> Response:
    """Raises what a generation failed with, unless the client streams and has its headers already."""
    choices = Choices(sources)
    if stream:
        return stream_response(renderer, choices, heartbeat)
    async for index, event in choices:
        renderer.event(index, event)
    return json_response(renderer.result())
