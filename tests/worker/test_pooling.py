"""Workers that read whole texts: one thread, requests packed together, each answered whole and in order."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from emlxd.config import ModelSettings, Source
from emlxd.core import GenerateRequest, ModelInfo, SamplingParams, TextBatch, TokenizedText
from emlxd.errors import ModelFormatError, QueueFull, RequestError, RequestTimedOut, ServerFault, Unavailable
from emlxd.worker.gate import Gate
from emlxd.worker.pooling import EmbeddingWorker, PoolingModel, RerankWorker
from emlxd.worker.pooling_jobs import ROUND, SHARE
from tests.worker.fakes import assert_freed_in_turn, end_as_it_is_asked, letters_tokenizer

PROMPTS = {"query": "q", "document": ""}


class StepRunner:
    """A text's vector is its first token and its length. Steps wait until the test lets them go."""

    traces = 1
    weight_bytes = 1000

    def __init__(self, *, lanes: int = 1, shares_rows: bool = False) -> None:
        self.lanes, self.shares_rows = lanes, shares_rows
        self.allowed = threading.Semaphore(1000)
        self.begun = threading.Semaphore(0)
        self.steps: list[list[TokenizedText]] = []
        self.turns: list[int] = []
        self.shapes: set[tuple[int, int]] = set()
        self.threads: set[str] = set()
        self.fails: Exception | None = None
        self.closed = False

    def hold(self) -> None:
        while self.allowed.acquire(blocking=False):
            pass

    def run(self, batches: Sequence[TextBatch]) -> list[list[list[float]]]:
        self.begun.release()
        assert self.allowed.acquire(timeout=20)
        self.threads.add(threading.current_thread().name)
        self.turns.append(len(batches))
        assert 0 < len(batches) <= self.lanes
        if self.fails is not None:
            error, self.fails = self.fails, None
            raise error
        return [self.read(batch) for batch in batches]

    def read(self, batch: TextBatch) -> list[list[float]]:
        assert len(batch.rows) <= batch.height
        assert all(sum(len(text.tokens) for text in row) <= batch.length for row in batch.rows)
        texts = [text for row in batch.rows for text in row]
        self.steps.append(texts)
        return [self.vector(text) for text in texts]

    def vector(self, text: TokenizedText) -> list[float]:
        return [float(text.tokens[0]), float(len(text.tokens))]

    def out_of_memory(self, error: Exception) -> bool:
        return isinstance(error, MemoryError)

    def close(self) -> None:
        self.closed = True


class ScoreRunner(StepRunner):
    """The score of a pair is where its second text begins."""

    def vector(self, text: TokenizedText) -> list[float]:
        return [float(text.second_at)]


def model(runner: StepRunner) -> PoolingModel:
    info = ModelInfo("fake", max_context=512, slots=1, vocab_size=27, sampling=SamplingParams())
    return PoolingModel(info, runner, letters_tokenizer(), PROMPTS, "document")


def settings(**more: Any) -> ModelSettings:
    return ModelSettings(name="pooling", source=Source(path=Path("unused")), **more)


@pytest.fixture
def runner() -> StepRunner:
    return StepRunner()


MakeWorker = Callable[..., EmbeddingWorker]


@pytest.fixture
async def make_worker(runner: StepRunner) -> AsyncIterator[MakeWorker]:
    workers: list[EmbeddingWorker] = []

    def make(**more: Any) -> EmbeddingWorker:
        workers.append(EmbeddingWorker(settings(**more), lambda: model(runner), Gate()))
        return workers[-1]

    yield make
    for worker in workers:
        runner.allowed.release(1000)
        await worker.close()


async def begun(runner: StepRunner) -> None:
    """Waits until the worker is inside of a step."""
    assert await asyncio.to_thread(runner.begun.acquire, timeout=20)


async def test_vectors_come_in_the_order_of_the_texts(make_worker: MakeWorker, runner: StepRunner) -> None:
    worker = make_worker()
    await worker.start()
    prompts = [[n % 27] * (1 + n * 37 % 300) for n in range(100)]
    assert await worker.embed(prompts) == [[float(p[0]), float(len(p))] for p in prompts]
    assert runner.threads == {"worker-pooling"}
    assert len(runner.steps) < 30
    assert await worker.embed([]) == []


async def test_batches_side_by_side_with_several_texts_in_a_row() -> None:
    runner = StepRunner(lanes=2, shares_rows=True)
    worker = EmbeddingWorker(settings(), lambda: model(runner), Gate())
    await worker.start()
    prompts = [[n % 27] * (1 + n * 37 % 100) for n in range(200)]
    assert await worker.embed(prompts) == [[float(p[0]), float(len(p))] for p in prompts]
    assert 2 in runner.turns
    assert max(map(len, runner.steps)) > 20
    await worker.close()


async def test_what_waits_is_packed_together(make_worker: MakeWorker, runner: StepRunner) -> None:
    worker = make_worker()
    await worker.start()
    runner.hold()
    first = asyncio.create_task(worker.embed([[1]]))
    await begun(runner)
    others = [asyncio.create_task(worker.embed([[n], [n, n]])) for n in range(2, 6)]
    await asyncio.sleep(0)
    assert worker.heartbeat_age > 0
    runner.allowed.release(1000)
    assert await first == [[1.0, 1.0]]
    assert await asyncio.gather(*others) == [[[float(n), 1.0], [float(n), 2.0]] for n in range(2, 6)]
    assert [len(step) for step in runner.steps] == [1, 8]
    assert worker.heartbeat_age == 0


async def test_a_newcomer_does_not_wait_for_a_long_request(
    make_worker: MakeWorker, runner: StepRunner
) -> None:
    worker = make_worker()
    await worker.start()
    runner.hold()
    long = asyncio.create_task(worker.embed([[1] * 8] * (ROUND + 3 * SHARE)))
    await begun(runner)
    short = asyncio.create_task(worker.embed([[2] * 8]))
    await asyncio.sleep(0)
    runner.allowed.release(2)  # the first round, and the one with the newcomer
    assert await short == [[2.0, 8.0]]
    assert not long.done()
    runner.allowed.release(1000)
    assert await long == [[1.0, 8.0]] * (ROUND + 3 * SHARE)


async def test_a_client_that_leaves_is_not_computed(make_worker: MakeWorker, runner: StepRunner) -> None:
    worker = make_worker()
    await worker.start()
    runner.hold()
    first = asyncio.create_task(worker.embed([[1]]))
    await begun(runner)
    left = asyncio.create_task(worker.embed([[2]] * 10))
    stays = asyncio.create_task(worker.embed([[3]]))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.sleep(0)
    runner.allowed.release(1000)
    await asyncio.gather(first, stays)
    assert [text.tokens for step in runner.steps for text in step] == [(1,), (3,)]


@pytest.mark.parametrize(
    ("error", "kind"), [(ValueError("broken"), ServerFault), (MemoryError(), Unavailable)]
)
async def test_a_failed_step_costs_its_requests_alone(
    make_worker: MakeWorker, runner: StepRunner, error: Exception, kind: type[Exception]
) -> None:
    worker = make_worker()
    await worker.start()
    runner.fails = error
    with pytest.raises(kind):
        await worker.embed([[1], [2]])
    assert await worker.embed([[3]]) == [[3.0, 1.0]]
    assert worker.alive


async def test_a_full_queue(make_worker: MakeWorker, runner: StepRunner) -> None:
    worker = make_worker(max_queue=1)
    await worker.start()
    runner.hold()
    running = asyncio.create_task(worker.embed([[1]]))
    await begun(runner)
    waiting = asyncio.create_task(worker.embed([[2]]))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await worker.embed([[3]])
    worker.retune(settings(max_queue=2))
    more = asyncio.create_task(worker.embed([[3]]))
    await asyncio.sleep(0)
    stats = worker.stats()
    assert stats is not None and (stats.running, stats.waiting) == (1, 2)
    runner.allowed.release(1000)
    await asyncio.gather(running, waiting, more)


async def test_texts_that_take_too_long(make_worker: MakeWorker, runner: StepRunner) -> None:
    worker = make_worker()
    await worker.start()
    runner.hold()
    worker.retune(settings(request_timeout=0.01))
    with pytest.raises(RequestTimedOut):
        await worker.embed([[1]])
    runner.allowed.release(1000)
    worker.retune(settings())
    assert await worker.embed([[2]]) == [[2.0, 1.0]]


async def test_closing_fails_what_waits_and_frees_the_model(
    make_worker: MakeWorker, runner: StepRunner
) -> None:
    worker = make_worker()
    await worker.start()
    runner.hold()
    running = asyncio.create_task(worker.embed([[1]]))
    await begun(runner)
    waiting = asyncio.create_task(worker.embed([[2]]))
    await asyncio.sleep(0)
    closing = asyncio.create_task(worker.close())
    await asyncio.sleep(0)
    assert not worker.alive
    runner.allowed.release(1000)
    await closing
    with pytest.raises(Unavailable):
        await waiting
    await asyncio.gather(running, return_exceptions=True)
    assert runner.closed
    with pytest.raises(Unavailable):
        await worker.embed([[1]])


async def test_texts_for_a_worker_that_ends_meanwhile(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make_worker()
    await worker.start()
    end_as_it_is_asked(worker, monkeypatch)
    with pytest.raises(Unavailable):
        await asyncio.wait_for(worker.embed([[1]]), 20)
    monkeypatch.undo()


async def test_a_model_is_freed_when_it_is_its_turn(make_worker: MakeWorker, runner: StepRunner) -> None:
    worker = make_worker()
    await worker.start()
    await assert_freed_in_turn(worker, runner)


async def test_a_model_that_cannot_be_loaded() -> None:
    def load() -> PoolingModel:
        raise ModelFormatError("no such thing")

    worker = EmbeddingWorker(settings(), load, Gate())
    with pytest.raises(ModelFormatError):
        await worker.start()
    assert worker.stats() is None
    await worker.close()


async def test_prompts(make_worker: MakeWorker) -> None:
    worker = make_worker()
    await worker.start()
    assert (worker.prompt("query"), worker.prompt(None)) == ("q", "")
    with pytest.raises(RequestError, match=r"no prompt 'passage'; it has: 'query', 'document'") as refused:
        worker.prompt("passage")
    assert refused.value.param == "prompt_name"


async def test_it_does_not_write(make_worker: MakeWorker) -> None:
    worker = make_worker()
    await worker.start()
    with pytest.raises(RequestError, match="does not write text; use it at /v1/embeddings"):
        worker.submit(GenerateRequest(id="r", prompt=(1,), max_tokens=1))
    with pytest.raises(RequestError, match="does not write text"):
        await worker.encode_chat([{"role": "user", "content": "hi"}])


async def test_pairs_are_scored() -> None:
    runner = ScoreRunner()
    worker = RerankWorker(settings(), lambda: model(runner), Gate())
    await worker.start()
    pairs = [await worker.encode_pair(first, "xyz") for first in ("a", "abcd")]
    assert [pair.tokens for pair in pairs] == [(0, 23, 24, 25), (0, 1, 2, 3, 23, 24, 25)]
    assert await worker.score(pairs) == [1.0, 4.0]
    await worker.close()
