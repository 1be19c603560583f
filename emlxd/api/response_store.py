"""Responses that were kept, for the requests that go on from them. In memory, and not without bound."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from emlxd.api.json_values import Json
from emlxd.api.responses_schema import ITEMS, Item
from emlxd.errors import ResponseNotFound

MAX_RESPONSES = 1000
MAX_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Kept:
    """A response and the whole conversation up to its end, without instructions, as JSON.

    As objects they would take many times as much.
    """

    response_json: bytes
    items_json: bytes

    @property
    def response(self) -> Json:
        found: Json = orjson.loads(self.response_json)
        return found

    @property
    def items(self) -> Sequence[Item]:
        return ITEMS.validate_json(self.items_json)

    @property
    def nbytes(self) -> int:
        return len(self.response_json) + len(self.items_json)


class ResponseStore:
    """The newest responses; the oldest go when there are too many or they take too much.

    Each belongs to an ``owner``, and for others it is not there.
    """

    def __init__(self, *, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._kept: OrderedDict[tuple[bytes, str], Kept] = OrderedDict()
        self._bytes = 0

    def keep(self, owner: bytes, response: Json, items: Sequence[Item]) -> None:
        kept = Kept(orjson.dumps(response), ITEMS.dump_json(list(items), exclude_none=True))
        self._kept[owner, response["id"]] = kept
        self._bytes += kept.nbytes
        while self._bytes > self._max_bytes or len(self._kept) > self._max_responses:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= oldest.nbytes

    def get(self, owner: bytes, id: str) -> Kept:
        """Raises ResponseNotFound."""
        if (owner, id) not in self._kept:
            raise ResponseNotFound(id)
        return self._kept[owner, id]

    def delete(self, owner: bytes, id: str) -> None:
        """Raises ResponseNotFound."""
        self._bytes -= self.get(owner, id).nbytes
        del self._kept[owner, id]
