"""The prefix cache's index."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from emlxd.worker.prefix_cache import BLOCK_TOKENS, Checkpoints, PrefixCache

A = list(range(BLOCK_TOKENS))
B = list(range(100, 100 + BLOCK_TOKENS))
C = list(range(200, 200 + BLOCK_TOKENS))


def test_only_whole_blocks_are_kept_and_one_token_is_left_to_compute() -> None:
    cache = PrefixCache(8)
    saving = cache.insert([*A, *B, 1, 2])
    assert saving and saving.first == 0
    assert cache.match([*A, *B, 9]) == saving.blocks
    assert cache.match([*A, *B]) == saving.blocks[:1]
    assert cache.match([*A, 5]) == saving.blocks[:1]
    assert cache.match([*B, *A, 9]) == []


def test_a_continuation_adds_only_what_is_new() -> None:
    cache = PrefixCache(8)
    first = cache.insert(A)
    saving = cache.insert([*A, *B, *C])
    assert first and saving and saving.first == 1 and len(saving.blocks) == 2
    assert cache.insert([*A, *B]) is None
    assert cache.match([*A, *B, *C, 0]) == first.blocks + saving.blocks


def test_a_hit_keeps_a_block_and_the_oldest_goes() -> None:
    cache = PrefixCache(2)
    cache.insert(A)
    cache.insert(B)
    assert cache.match([*A, 0])
    cache.insert(C)
    assert cache.match([*A, 0])
    assert not cache.match([*B, 0])


def test_a_prompt_longer_than_the_cache_keeps_its_beginning() -> None:
    cache = PrefixCache(2)
    saving = cache.insert([*A, *B, *C])
    assert saving and len(saving.blocks) == 2
    assert cache.match([*A, *B, *C, 0]) == saving.blocks


def test_no_room_at_all_is_no_cache() -> None:
    cache = PrefixCache(0)
    assert cache.insert([*A, *B]) is None
    assert cache.match([*A, 0]) == []


def test_tokens_are_counted() -> None:
    cache = PrefixCache(4)
    cache.insert([*A, *B])
    cache.match([*A, *C, 0])
    assert (cache.query_tokens, cache.hit_tokens) == (2 * BLOCK_TOKENS + 1, BLOCK_TOKENS)


blocks_of_tokens = st.lists(st.sampled_from([A, B, C]), max_size=6).map(
    lambda parts: [t for part in parts for t in part]
)


@given(st.lists(st.tuples(st.booleans(), blocks_of_tokens), max_size=40), st.integers(0, 5))
def test_what_is_found_is_what_was_saved(steps: list[tuple[bool, list[int]]], size: int) -> None:
    cache = PrefixCache(size)
    content: dict[int, tuple[int, ...]] = {}
    for insert, tokens in steps:
        if insert:
            saving = cache.insert(tokens)
            for number, block in enumerate(saving.blocks if saving else []):
                assert saving
                content[block] = tuple(tokens[: (saving.first + number + 1) * BLOCK_TOKENS])
        for number, block in enumerate(cache.match([*tokens, 0])):
            assert content[block] == tuple(tokens[: (number + 1) * BLOCK_TOKENS])
        assert len(cache) <= size


def test_states_make_room_for_each_other() -> None:
    states = Checkpoints(2)
    first, second = states.add(b"a"), states.add(b"b")
    assert {first, second} == {0, 1} and states.add(b"a") is None
    assert states.add(b"c") == second
    assert (states.find(b"a"), states.find(b"b"), states.find(b"c")) == (first, None, second)
    assert Checkpoints(0).add(b"a") is None


def test_a_lent_place_is_named_or_taken_back() -> None:
    states = Checkpoints(4)
    first, second = states.lend(), states.lend()
    assert first is not None and second is not None and states.lend() is None
    assert states.keep(first, b"a") and states.find(b"a") == first
    third = states.lend()
    assert third is not None and not states.keep(third, b"a")
    states.take_back(second)
    states.take_back(second)
    assert not states.lent
    assert {states.add(key) for key in (b"b", b"c", b"d")} == {0, 1, 2, 3} - {first}


def test_what_is_lent_is_not_evicted() -> None:
    states = Checkpoints(2)
    lent = states.lend()
    for number in range(4):
        assert states.add(bytes([number])) == 1 - (lent or 0)
