"""What the registry tells of models from their files."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from emlxd.config import ModelSettings
from emlxd.core import ModelCard
from emlxd.registry import Registry
from tests.fakes import fake_card
from tests.residents import ON_DEMAND, House, model, use


def described(cards: dict[str, ModelCard]) -> tuple[Registry, list[list[str]]]:
    """A registry that finds ``cards``, and of whom it asked for them."""
    house, asked = House(), []

    async def describe(models: Sequence[ModelSettings]) -> dict[str, ModelCard]:
        asked.append([settings.name for settings in models])
        await asyncio.sleep(0)
        return {name: card for name, card in cards.items() if name in asked[-1]}

    registry = house.registry(model("a", **ON_DEMAND), model("b", kind="rerank", **ON_DEMAND))
    registry._describe = describe
    return registry, asked


async def test_files_are_read_once_for_all_who_ask() -> None:
    cards = {"a": fake_card(kind="embedding")}
    registry, asked = described(cards)
    assert [entry.kind for entry in registry.models] == [None, "rerank"]
    found = await asyncio.gather(registry.cards(), registry.cards())
    assert found == [cards, cards]
    assert asked == [["a", "b"]]
    assert [entry.kind for entry in registry.models] == ["embedding", "rerank"]
    cards["b"] = fake_card()
    assert await registry.cards() == cards
    assert asked[1:] == [["b"]]


async def test_files_are_read_again_when_the_model_is_loaded_again() -> None:
    cards = {"a": fake_card(), "b": fake_card()}
    registry, _ = described(cards)
    await registry.cards()
    cards["a"] = fake_card(nbytes=7)
    await use(registry, "a")
    assert (await registry.cards())["a"].nbytes == 7
