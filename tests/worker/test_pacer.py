"""How large a slice of a prompt is, from what was observed."""

from __future__ import annotations

from emlxd.worker.pacer import MIN_TOKENS, PrefillPacer


def test_a_device_of_even_speed_gets_what_fits_the_slice() -> None:
    pacer = PrefillPacer(0.25)
    assert pacer.tokens == MIN_TOKENS
    tokens = []
    for _ in range(12):
        tokens.append(pacer.tokens)
        pacer.observe(tokens[-1], tokens[-1] / 2000)
    assert tokens[:4] == [16, 32, 64, 128]
    assert tokens[-1] in (499, 500)


def test_what_a_chunk_costs_by_itself_is_part_of_the_slice() -> None:
    pacer = PrefillPacer(0.25)
    for _ in range(40):
        pacer.observe(pacer.tokens, 0.05 + pacer.tokens / 1000)
    assert abs(pacer.tokens - 200) <= 2


def test_a_time_that_is_seen_in_the_next_chunk_misleads_little() -> None:
    pacer = PrefillPacer(0.25)
    for _ in range(10):
        pacer.observe(100, 0.4)
        pacer.observe(100, 0.0)
    assert 100 <= pacer.tokens <= 200  # 500 tokens a second, and not without bound


def test_after_a_short_prompt_no_long_chunk_follows_at_once() -> None:
    pacer = PrefillPacer(0.25)
    for _ in range(5):
        pacer.observe(512, 0.1)
    pacer.observe(20, 0.01)
    assert pacer.tokens == 40
