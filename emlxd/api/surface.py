"""What the API needs of the registry and of a worker, and what its routes share.

The registry and the worker fit these protocols; so do the fakes in the tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from emlxd.api.drain import Drain
from emlxd.api.response_store import ResponseStore
from emlxd.config import Settings
from emlxd.core import GenerateRequest, Kind, ModelCard, ModelInfo, Shape, TokenizedText
from emlxd.metrics import Metrics
from emlxd.text.dialect import Wishes
from emlxd.worker.mailbox import Generation


class Tokenizer(Protocol):
    """``text_bytes`` has, by id, what a token adds to an answer; ``token_bytes`` names special tokens too."""

    @property
    def text_bytes(self) -> Sequence[bytes]: ...
    @property
    def strips_leading_space(self) -> bool: ...
    def token_bytes(self, token_id: int, /) -> bytes: ...
    def decode(self, ids: Sequence[int], /, *, skip_special_tokens: bool = True) -> str: ...
    def truncate(self, ids: Sequence[int], limit: int, /) -> list[int]:
        """At most ``limit`` ids; what closes a text is kept."""


class Worker(Protocol):
    """A loaded model. ``name`` is its name in the registry or an adapter's, never an alias."""

    @property
    def name(self) -> str: ...
    @property
    def info(self) -> ModelInfo: ...
    @property
    def tokenizer(self) -> Tokenizer: ...

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> list[int]:
        """Raises RequestError when the model has no chat template or the template refuses."""

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    async def shape(self, prompt: Sequence[int], wishes: Wishes) -> Shape:
        """The shape of an answer to ``prompt``. Raises RequestError for one that cannot be enforced."""

    def admit(self, answers: int) -> None:
        """To be asked before a client's requests are submitted: all of their answers are taken, or none.

        Raises QueueFull and Unavailable.
        """

    def submit(self, request: GenerateRequest) -> Generation:
        """Raises Unavailable."""


@runtime_checkable
class Embedder(Worker, Protocol):
    """A worker whose model turns texts into vectors. ``prompts``, by name, go before texts of a kind."""

    @property
    def prompts(self) -> Mapping[str, str]: ...

    def prompt(self, name: str | None) -> str:
        """What goes before texts of the kind ``name``, or the usual kind. Raises RequestError."""

    async def embed(self, prompts: Sequence[Sequence[int]]) -> Sequence[Sequence[float]]:
        """A vector for each prompt. Raises QueueFull and Unavailable."""


@runtime_checkable
class Reranker(Worker, Protocol):
    """A worker whose model scores pairs of texts."""

    async def encode_pair(self, first: str, second: str) -> TokenizedText: ...

    async def score(self, pairs: Sequence[TokenizedText]) -> Sequence[float]:
        """From 0 to 1 for each pair. Raises QueueFull and Unavailable."""


class ModelEntry(Protocol):
    """A row of the registry, loaded or not. ``created`` is in Unix seconds."""

    @property
    def name(self) -> str: ...
    @property
    def aliases(self) -> Sequence[str]: ...
    @property
    def adapters(self) -> Sequence[str]:
        """Names of the model with one of its adapters each."""

    @property
    def created(self) -> int: ...
    @property
    def state(self) -> str: ...
    @property
    def kind(self) -> Kind | None:
        """None while only files would tell that are not here."""

    @property
    def nbytes(self) -> int:
        """What it takes of memory now."""

    def seconds_left(self, now: float, /) -> float:
        """Until it may be unloaded for idleness; infinite if it never is. ``now`` is monotonic time."""


class Registry(Protocol):
    @property
    def models(self) -> Sequence[ModelEntry]: ...
    @property
    def ready(self) -> bool:
        """Every model that should be loaded answers."""

    async def cards(self) -> Mapping[str, ModelCard]:
        """What the models' files say of them, by name, of those whose files are here."""

    def lease(self, name: str) -> AbstractAsyncContextManager[Worker]:
        """A worker that stays loaded while it is held. Raises ModelNotFound and Unavailable."""


class Operator(Protocol):
    """Sees and steers the daemon."""

    def status(self) -> dict[str, Any]: ...

    def config(self) -> dict[str, Any]:
        """The settings in force, without secrets."""

    async def reload(self, *, dry_run: bool) -> dict[str, list[str]]:
        """What changed, or would, by kind of change. Raises EmlxdError if the configuration is refused."""

    async def load(self, name: str) -> None:
        """Raises ModelNotFound and Unavailable."""

    def unload(self, name: str) -> None:
        """Raises ModelNotFound and Unavailable."""


@dataclass(frozen=True, slots=True)
class Services:
    """What a route works with."""

    registry: Registry
    settings: Settings
    metrics: Metrics
    drain: Drain
    responses: ResponseStore
