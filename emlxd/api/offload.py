"""Work that would hold up the event loop: on a thread beside it, where others have their turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import orjson

from emlxd.threads import run_in_thread

# Less takes the loop a few milliseconds at most, which a thread of its own is not worth.
LARGE_TEXT: Final = 32 * 1024  # bytes of JSON
LARGE_COUNT: Final = 1000  # messages or objects
LARGE_ARRAY: Final = 20_000  # numbers

T = TypeVar("T")


async def offload(work: Callable[[], T], *, large: bool) -> T:
    """What ``work`` gives; beside the event loop if it is ``large``."""
    return await run_in_thread(work) if large else work()


def dump_in_parts(value: Mapping[str, Any]) -> bytes:
    """``value`` as JSON, the objects and arrays in its arrays one by one: others wait for each call's end."""
    return orjson.dumps({name: _parts(inner) for name, inner in value.items()})


def _parts(value: Any) -> Any:
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return [orjson.Fragment(orjson.dumps(part)) for part in value]
    return value
