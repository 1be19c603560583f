"""What the engine counts is what happened."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from emlxd.core import Distribution, GenerateRequest
from emlxd.graph.batch import BLOCK_TOKENS
from emlxd.instruments import Histogram
from emlxd.worker.meters import BATCH_BOUNDS
from tests.worker.harness import Harness


@given(st.lists(st.floats(0, 100)))
def test_a_value_counts_in_the_first_bucket_that_holds_it(values: list[float]) -> None:
    bounds = (1.0, 2.5, 50.0)
    histogram = Histogram(bounds)
    for value in values:
        histogram.observe(value)
    read = histogram.read()
    cumulative = [sum(read.counts[: place + 1]) for place in range(3)]
    assert cumulative == [sum(value <= bound for value in values) for bound in bounds]
    assert (sum(read.counts), read.total) == (len(values), sum(values))


def test_distributions_add_up() -> None:
    one, more = Distribution((1.0,), (2, 3), 7.5), Distribution((1.0,), (10, 0), 1.5)
    assert one + more == Distribution((1.0,), (12, 3), 9.0)


def test_gaps_between_tokens_are_those_of_each_answer() -> None:
    """Time is counted in steps. The token of the prompt and the first of a decode step come in one."""
    harness = Harness(lambda tokens: 5)
    harness.submit(GenerateRequest("a", (1,), 6))
    harness.step()
    harness.step()
    harness.submit(GenerateRequest("b", (1,), 4))
    harness.run()
    gaps = harness.engine.meters.inter_token_seconds.read()
    assert (sum(gaps.counts), gaps.total) == (5 + 3, 4 + 2)


def test_batch_sizes_count_who_decodes() -> None:
    harness = Harness(lambda tokens: 5)
    harness.submit(GenerateRequest("a", (1,), 4))
    harness.submit(GenerateRequest("b", (1,), 2))
    harness.run()
    # The first token of both comes of the prompt: 3 and 1 decode steps, of which one is shared.
    sizes = harness.engine.meters.step_batch_size.read()
    assert (sizes.counts[0], sizes.counts[1], sizes.total) == (2, 1, 4)
    assert sizes.bounds == BATCH_BOUNDS


def test_written_positions_of_the_cache() -> None:
    harness = Harness(lambda tokens: 5)
    harness.submit(GenerateRequest("a", tuple(range(10)), 5))
    assert harness.engine.kv_tokens == 0
    harness.step()
    assert harness.engine.kv_tokens == len(harness.runner.cache[0]) == 10 + 1
    harness.run()
    assert harness.engine.kv_tokens == 0


def test_prefix_cache_hits_are_counted_in_tokens() -> None:
    harness = Harness(lambda tokens: 5, blocks=8)
    prompt = tuple(range(2 * BLOCK_TOKENS + 1))
    for name in "ab":
        harness.submit(GenerateRequest(name, prompt, 2))
        harness.run()
    prefixes = harness.engine.prefixes
    assert (prefixes.query_tokens, prefixes.hit_tokens) == (2 * len(prompt), 2 * BLOCK_TOKENS)
