"""What a reload would do, as data."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emlxd.config import ModelSettings, Settings
from emlxd.reload.plan import NEEDS_RESTART, RETUNABLE, Plan, plan
from tests.residents import model


def settings(*models: ModelSettings, **sections: Any) -> Settings:
    return Settings(models=models, **sections)


def test_equal_is_nothing_to_do() -> None:
    one = settings(model("a"), model("b"), server={"heartbeat": 3})
    other = settings(model("a"), model("b"), server={"heartbeat": 3})
    assert plan(one, other) == Plan(keep=("a", "b"))
    assert plan(one, other).empty


def test_each_kind_of_change() -> None:
    old = settings(model("kept"), model("tuned"), model("other"), model("gone"))
    new = settings(
        model("other", slots=9),
        model("kept"),
        model("tuned", sampling={"temperature": 0}, priority=3),
        model("fresh"),
        server={"port": 9000, "heartbeat": 1},
        log={"level": "debug"},
    )
    assert plan(old, new) == Plan(
        keep=("kept",),
        retune=("tuned",),
        replace=("other",),
        add=("fresh",),
        drop=("gone",),
        settings=("server.heartbeat", "log.level"),
        needs_restart=("server.port",),
    )


OTHER: dict[str, Any] = {
    "adapters": ({"name": "x", "source": {"path": "/x"}},),
    "aliases": ("x",),
    "max_queue": 1,
    "stream_chunks": "token",
    "sampling": {"top_k": 3},
    "load": "on_demand",
    "required": False,
    "idle_unload": 9,
    "pinned": True,
    "priority": 4,
    "load_timeout": 8,
    "request_timeout": 7,
    "slots": 7,
    "max_context": 99,
    "dtype": "float16",
    "weights": "keep",
    "compile": False,
    "prefill_chunk": 64,
    "prefill_slice": 2,
    "source": {"path": "y.gguf"},
}


@pytest.mark.parametrize("name", sorted(set(OTHER)))
def test_a_model_is_loaded_anew_only_if_it_must(name: str) -> None:
    found = plan(settings(model("a")), settings(model("a", **{name: OTHER[name]})))
    assert (found.retune, found.replace) == ((("a",), ()) if name in RETUNABLE else ((), ("a",)))


def test_what_may_change_in_place_exists() -> None:
    assert ModelSettings.model_fields.keys() >= RETUNABLE
    for name in NEEDS_RESTART:
        section, field = name.split(".")
        assert field in type(getattr(Settings(), section)).model_fields


NAMES = st.lists(st.sampled_from("abcdef"), unique=True)


@given(NAMES, NAMES, st.sets(st.sampled_from("abcdef")), st.sets(st.sampled_from("abcdef")))
def test_every_model_has_one_fate(
    old: list[str], new: list[str], retuned: set[str], replaced: set[str]
) -> None:
    changes: dict[str, Any] = {n: {"slots": 9} for n in replaced} | {n: {"priority": 1} for n in retuned}
    found = plan(settings(*map(model, old)), settings(*(model(n, **changes.get(n, {})) for n in new)))
    after = [*found.keep, *found.retune, *found.replace, *found.add]
    assert sorted(after) == sorted(new)
    assert set(found.drop) == set(old) - set(new)
    assert set(found.add) == set(new) - set(old)
    assert set(found.retune) == set(old) & set(new) & retuned
