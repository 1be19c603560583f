"""The prefix cache's index."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from emlxd.worker.prefix_cache import BLOCK_TOKENS, BlockKeys, Checkpoints, PrefixCache, Saving

A = list(range(BLOCK_TOKENS))
B = list(range(100, 100 + BLOCK_TOKENS))
C = list(range(200, 200 + BLOCK_TOKENS))


def insert(cache: PrefixCache, tokens: list[int]) -> Saving | None:
    return cache.insert(BlockKeys().of(tokens))


def match(cache: PrefixCache, tokens: list[int]) -> list[int]:
    return cache.match(BlockKeys().of(tokens), len(tokens))


def test_only_whole_blocks_are_kept() -> None:
    cache = PrefixCache(8)
    saving = insert(cache, [*A, *B, 1, 2])
    assert saving and saving.first == 0
    assert match(cache, [*A, *B, 9]) == saving.blocks
    assert match(cache, [*A, *B[:-1]]) == saving.blocks[:1]
    assert match(cache, [*A, 5]) == saving.blocks[:1]
    assert match(cache, [*B, *A, 9]) == []


def test_a_continuation_adds_only_what_is_new() -> None:
    cache = PrefixCache(8)
    first = insert(cache, A)
    saving = insert(cache, [*A, *B, *C])
    assert first and saving and saving.first == 1 and len(saving.blocks) == 2
    assert insert(cache, [*A, *B]) is None
    assert match(cache, [*A, *B, *C, 0]) == first.blocks + saving.blocks


def test_a_hit_keeps_a_block_and_the_oldest_goes() -> None:
    cache = PrefixCache(2)
    insert(cache, A)
    insert(cache, B)
    assert match(cache, [*A, 0])
    insert(cache, C)
    assert match(cache, [*A, 0])
    assert not match(cache, [*B, 0])


def test_a_prompt_longer_than_the_cache_keeps_its_beginning() -> None:
    cache = PrefixCache(2)
    saving = insert(cache, [*A, *B, *C])
    assert saving and len(saving.blocks) == 2
    assert match(cache, [*A, *B, *C, 0]) == saving.blocks


def test_no_room_at_all_is_no_cache() -> None:
    cache = PrefixCache(0)
    assert insert(cache, [*A, *B]) is None
    assert match(cache, [*A, 0]) == []


def test_tokens_are_counted() -> None:
    cache = PrefixCache(4)
    insert(cache, [*A, *B])
    match(cache, [*A, *C, 0])
    assert (cache.query_tokens, cache.hit_tokens) == (2 * BLOCK_TOKENS + 1, BLOCK_TOKENS)


blocks_of_tokens = st.lists(st.sampled_from([A, B, C]), max_size=6).map(
    lambda parts: [t for part in parts for t in part]
)


@given(st.lists(st.tuples(st.booleans(), blocks_of_tokens), max_size=40), st.integers(0, 5))
def test_what_is_found_is_what_was_saved(steps: list[tuple[bool, list[int]]], size: int) -> None:
    cache = PrefixCache(size)
    content: dict[int, tuple[int, ...]] = {}
    for is_new, tokens in steps:
        if is_new:
            saving = insert(cache, tokens)
            for number, block in enumerate(saving.blocks if saving else []):
                assert saving
                content[block] = tuple(tokens[: (saving.first + number + 1) * BLOCK_TOKENS])
        for number, block in enumerate(match(cache, [*tokens, 0])):
            assert content[block] == tuple(tokens[: (number + 1) * BLOCK_TOKENS])
        assert len(cache) <= size


@given(st.lists(st.integers(0, 400), max_size=12), st.binary(max_size=4))
def test_keys_are_the_same_however_a_text_comes(lengths: list[int], seed: bytes) -> None:
    text, keys = [n * n % 97 for n in range(400)], BlockKeys(seed)
    for length in lengths:
        assert keys.of(text[:length]) == BlockKeys(seed).of(text[:length])
        assert len(keys.of(text[:length])) == length // BLOCK_TOKENS


def test_a_key_tells_of_all_before_it() -> None:
    texts = ([*A, *C], [*B, *C], [*A[:-1], 7, *C])
    last = {BlockKeys(seed).of(text)[-1] for text in texts for seed in (b"", b"adapter")}
    assert len(last) == 6


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
