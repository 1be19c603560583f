"""The last step of every route that generates: the same events, streamed or gathered."""

from __future__ import annotations

from collections.abc import Sequence

from quart import Response

from emlxd.api.exchange import current_exchange
from emlxd.api.generate import Events, Run
from emlxd.api.json_values import json_bytes
from emlxd.api.offload import LARGE_COUNT, dump_in_parts, offload
from emlxd.api.render import Renderer
from emlxd.api.sse import stream_response


async def respond(
    renderer: Renderer, runs: Sequence[Run], *, stream: bool, heartbeat: float, named: bool = False
) -> Response:
    """Raises what a generation failed with, unless the client streams and has its headers already.

    ``named``: a stream's events have names.
    """
    events = Events(runs)
    if stream:
        return stream_response(renderer, events, heartbeat, named=named)
    renderer.start()
    async for prompt, event in events:
        renderer.event(prompt, event)
    # Log-probabilities make the answer some hundred times as long as its text.
    large = current_exchange().tally.completion_tokens > LARGE_COUNT
    result = renderer.result()
    return json_bytes(await offload(lambda: dump_in_parts(result), large=large))
