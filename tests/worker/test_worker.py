"""A worker: one thread, spoken to from the event loop."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from emlxd.config import ModelSettings, Source
from emlxd.core import Failed, Finished, GenerateRequest, Shape, TextPiece
from emlxd.errors import ModelFormatError, QueueFull, RequestError, Unavailable
from emlxd.text.dialect import Dialect, Wishes
from emlxd.text.tokenizer import Tokenizer
from emlxd.worker.disk_cache import DiskCache
from emlxd.worker.engine import Engine
from emlxd.worker.gate import Gate
from emlxd.worker.load import Model
from emlxd.worker.model_thread import LONG_TEXT
from emlxd.worker.worker import Worker, WorkerOptions
from tests.worker.fakes import assert_freed_in_turn, end_as_it_is_asked
from tests.worker.gated import GatedRunner, begun, fake_model, read, request


@pytest.fixture
def runner() -> GatedRunner:
    return GatedRunner(2)


MakeWorker = Callable[..., Worker]


@pytest.fixture
async def make_worker(runner: GatedRunner) -> AsyncIterator[MakeWorker]:
    workers: list[Worker] = []

    def make(load: Callable[[], Model] | None = None, *, template: str | None = None) -> Worker:
        model = fake_model(runner, template)
        options = WorkerOptions("fake", max_queue=1, prefill_chunk=64, prefill_slice=0.25)
        workers.append(Worker(options, load or (lambda: model), Gate()))
        return workers[-1]

    yield make
    runner.steps.release(10_000)
    for worker in workers:
        await worker.close()


async def test_events_reach_the_loop_in_order(make_worker: MakeWorker, runner: GatedRunner) -> None:
    worker = make_worker()
    await worker.start()
    runner.steps.release(10)
    events = await read(worker.submit(request()))
    assert events[:-1] == [TextPiece(letter) for letter in "defg"]
    assert isinstance(events[-1], Finished)
    assert runner.threads == {"worker-fake"}


async def test_a_failed_load_is_raised_where_it_was_asked_for(make_worker: MakeWorker) -> None:
    def load() -> Model:
        raise ModelFormatError("model.gguf: is truncated")

    worker = make_worker(load)
    with pytest.raises(ModelFormatError, match="is truncated"):
        await worker.start()
    assert not worker.alive


async def test_a_model_is_freed_if_something_fails_after_it_was_loaded(
    make_worker: MakeWorker, runner: GatedRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no such folder")

    monkeypatch.setattr("emlxd.worker.worker.GrammarCompiler", fail)
    worker = make_worker()
    with pytest.raises(OSError, match="no such folder"):
        await worker.start()
    assert runner.closed


async def test_a_thread_that_cannot_be_started_can_be_closed(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    worker = make_worker()
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            await worker.start()
    await asyncio.wait_for(worker.close(), 20)


async def test_a_model_is_freed_also_if_nobody_waits_for_it_any_more(
    make_worker: MakeWorker, runner: GatedRunner
) -> None:
    loading = threading.Semaphore(0)
    worker = make_worker(lambda: loading.acquire(timeout=20) and fake_model(runner))
    for waiting in (worker.start, worker.close):
        task = asyncio.create_task(waiting())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    loading.release()
    await worker.close()
    assert runner.closed


async def test_a_model_that_was_idle_for_long_is_not_stuck_when_it_begins(
    make_worker: MakeWorker, runner: GatedRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make_worker()
    await worker.start()
    worker._heartbeat -= 1000
    ages: list[float] = []
    add = Engine.add

    def observed(engine: Engine, answers: list[Any]) -> None:
        add(engine, answers)
        ages.append(worker.heartbeat_age)

    monkeypatch.setattr(Engine, "add", observed)
    runner.steps.release(10)
    await read(worker.submit(request()))
    assert 0 < ages[0] < 500


async def test_a_worker_that_has_ended_is_not_stuck(
    make_worker: MakeWorker, runner: GatedRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a step that failed for good has left undone."""
    worker = make_worker()
    await worker.start()
    monkeypatch.setattr(Engine, "idle", False)
    worker._heartbeat -= 1000
    assert worker.heartbeat_age >= 1000
    runner.steps.release(10)
    await worker.close()
    assert worker.busy and worker.heartbeat_age == 0


async def test_texts_do_not_wait_for_a_grammar(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiles, over = threading.Event(), threading.Event()

    def shape(*_: object) -> Shape:
        compiles.set()
        assert over.wait(timeout=20)
        return Shape()

    monkeypatch.setattr(Dialect, "shape", shape)
    worker = make_worker()
    await worker.start()
    shaping = asyncio.create_task(worker.shape([0], Wishes()))
    await asyncio.to_thread(compiles.wait, 20)
    assert await worker.encode("abc") == [0, 1, 2]
    over.set()
    assert await shaping == Shape()


async def test_a_full_queue_refuses(make_worker: MakeWorker) -> None:
    worker = make_worker()
    await worker.start()
    for number in range(3):
        worker.admit(1)
        worker.submit(request(f"r{number}"))
    with pytest.raises(QueueFull):
        worker.admit(1)


async def test_every_answer_waits_in_the_queue(make_worker: MakeWorker) -> None:
    worker = make_worker()
    await worker.start()
    worker.submit(replace(request("many"), n=3))
    stats = worker.stats()
    assert stats is not None and stats.running + stats.waiting == 3
    with pytest.raises(QueueFull):
        worker.admit(1)


async def test_a_request_may_be_larger_than_the_queue_if_nobody_waits(make_worker: MakeWorker) -> None:
    worker = make_worker()
    await worker.start()
    worker.admit(100)
    for number in range(3):
        worker.submit(request(f"r{number}"))
    worker.retune(ModelSettings(name="fake", source=Source(path=Path()), max_queue=3))
    worker.admit(2)
    with pytest.raises(QueueFull):
        worker.admit(3)


async def test_a_longer_queue_holds_at_once(make_worker: MakeWorker) -> None:
    worker = make_worker()
    await worker.start()
    for number in range(3):
        worker.submit(request(f"r{number}"))
    worker.retune(ModelSettings(name="fake", source=Source(path=Path()), max_queue=2))
    worker.admit(1)


async def test_a_time_limit_holds_from_the_next_request_on(
    make_worker: MakeWorker, runner: GatedRunner
) -> None:
    worker = make_worker()
    await worker.start()
    earlier = worker.submit(request("earlier"))
    worker.retune(ModelSettings(name="fake", source=Source(path=Path()), max_queue=1, request_timeout=1e-9))
    later = worker.submit(request("later"))
    runner.steps.release(10)
    assert isinstance((await read(earlier))[-1], Finished)
    (failed,) = await read(later)
    assert isinstance(failed, Failed) and failed.error.status == 408


async def test_a_failing_step_answers_and_the_worker_goes_on(
    make_worker: MakeWorker, runner: GatedRunner
) -> None:
    worker = make_worker()
    await worker.start()
    runner.fail_next = RuntimeError("device lost")
    (failed,) = await read(worker.submit(request("a")))
    assert isinstance(failed, Failed)
    assert failed.error.status == 500
    runner.steps.release(10)
    assert isinstance((await read(worker.submit(request("b"))))[-1], Finished)


async def test_nothing_of_a_failed_step_is_held_when_it_starts_anew(
    make_worker: MakeWorker, runner: GatedRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Cache:
        pass

    held: list[weakref.ref[Cache]] = []
    at_reset: list[Cache | None] = []

    def prefill(rows: object) -> None:
        cache = Cache()
        held.append(weakref.ref(cache))
        raise MemoryError

    monkeypatch.setattr(runner, "prefill", prefill)
    monkeypatch.setattr(runner, "reset", lambda: at_reset.append(held[0]()))
    worker = make_worker()
    await worker.start()
    (failed,) = await read(worker.submit(request()))
    assert isinstance(failed, Failed) and failed.error.status == 503
    assert at_reset == [None]


async def test_a_worker_that_cannot_start_anew_answers_and_frees_its_model(
    make_worker: MakeWorker, runner: GatedRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    for method in ("prefill", "reset", "move", "release"):
        monkeypatch.setattr(runner, method, broken)
    worker = make_worker()
    await worker.start()
    generations = [worker.submit(request(str(number))) for number in range(3)]
    for generation in generations:
        failed = (await read(generation))[-1]
        assert isinstance(failed, Failed)
        assert "is not available" in failed.error.message
    await worker.close()
    assert runner.closed


async def test_cancelling_frees_the_slot_for_the_next(make_worker: MakeWorker, runner: GatedRunner) -> None:
    worker = make_worker()
    await worker.start()
    endless = [worker.submit(request(f"endless-{n}", max_tokens=4000)) for n in range(2)]
    waiting = worker.submit(request("waiting"))
    runner.steps.release(3)
    await anext(endless[0])
    for generation in endless:
        generation.cancel()
        generation.cancel()
    runner.steps.release(10)
    assert isinstance((await read(waiting))[-1], Finished)


async def test_closing_fails_what_still_runs(make_worker: MakeWorker, runner: GatedRunner) -> None:
    worker = make_worker()
    await worker.start()
    generation = worker.submit(request(max_tokens=4000))
    closing = asyncio.create_task(worker.close())
    await asyncio.sleep(0)
    runner.steps.release(10_000)
    events = await read(generation)
    await closing
    assert isinstance(events[-1], Failed)
    assert events[-1].error.status == 503
    assert "is shutting down" in events[-1].error.message
    assert runner.closed
    with pytest.raises(Unavailable):
        worker.submit(request("late"))


async def test_a_model_is_freed_when_it_is_its_turn(make_worker: MakeWorker, runner: GatedRunner) -> None:
    worker = make_worker()
    await worker.start()
    await assert_freed_in_turn(worker, runner)


async def test_others_have_their_turns_while_a_worker_that_ends_waits_for_the_disk(
    runner: GatedRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner.blocks = 4
    options = WorkerOptions("fake", 1, prefill_chunk=64, prefill_slice=0.25, disk=tmp_path, disk_bytes=1)
    gate, turns = Gate(), []

    def close(disk: DiskCache) -> None:
        taken = threading.Event()

        def take_turn() -> None:
            with gate:
                taken.set()

        threading.Thread(target=take_turn).start()
        turns.append(taken.wait(timeout=5))

    monkeypatch.setattr(DiskCache, "close", close)
    worker = Worker(options, lambda: fake_model(runner), gate)
    await worker.start()
    await worker.close()
    assert turns == [True]


async def test_a_stop_keeps_what_the_disk_does_not_have_yet(
    runner: GatedRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_block(block: int) -> bytes:
        assert reads.acquire(timeout=20)
        return bytes([block])

    reads = threading.Semaphore(10)  # enough for the steps up to the end of the answer
    monkeypatch.setattr(runner, "read_block", read_block)
    runner.blocks = 64
    options = WorkerOptions("fake", 1, 64 * 40, prefill_slice=0.25, disk=tmp_path, disk_bytes=1 << 30)
    worker = Worker(options, lambda: fake_model(runner), Gate())
    await worker.start()
    runner.steps.release(10_000)
    prompt = tuple(number % 26 for number in range(64 * 30 + 1))
    await read(worker.submit(GenerateRequest("r", prompt, 1)))
    closing = asyncio.create_task(worker.close())
    await asyncio.sleep(0)
    reads.release(1000)
    await closing
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 30


async def test_a_request_that_comes_as_the_worker_ends_is_answered(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make_worker()
    await worker.start()
    end_as_it_is_asked(worker, monkeypatch)
    (failed,) = await read(worker.submit(request()))
    assert isinstance(failed, Failed) and failed.error.status == 503
    monkeypatch.undo()  # the worker is to be closed through its own


async def test_chats_are_encoded_by_the_template(make_worker: MakeWorker) -> None:
    worker = make_worker(template="{% for m in messages %}{{ m.content }}{% endfor %}")
    await worker.start()
    assert await worker.encode_chat([{"role": "user", "content": "abc"}]) == [0, 1, 2]
    assert await worker.encode("cab") == [2, 0, 1]


async def test_a_template_may_have_variables_of_any_name(make_worker: MakeWorker) -> None:
    """Clients name them, and must not get at the names of Python's parameters."""
    worker = make_worker(template="{{ source }}{{ messages[0].content }}")
    await worker.start()
    variables: dict[str, Any] = {"self": "c", "source": "b", "cls": "c"}
    messages = [{"role": "user", "content": "a"}]
    assert await worker.encode_chat(messages, **variables) == [1, 0]


@pytest.mark.parametrize("as_chat", [False, True])
async def test_short_texts_pass_a_long_one(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch, *, as_chat: bool
) -> None:
    worker = make_worker(template="{% for m in messages %}{{ m.content }}{% endfor %}")
    await worker.start()
    passed, begun, encode = threading.Event(), threading.Event(), Tokenizer.encode

    def slow(tokenizer: Tokenizer, text: str, **options: Any) -> list[int]:
        if len(text) > LONG_TEXT:
            begun.set()
            assert passed.wait(timeout=20)
        return encode(tokenizer, text, **options)

    async def encoded(text: str) -> list[int]:
        if as_chat:
            return await worker.encode_chat([{"role": "user", "content": text}])
        return await worker.encode(text)

    monkeypatch.setattr(Tokenizer, "encode", slow)
    long = asyncio.create_task(encoded("a" * (LONG_TEXT + 1)))
    assert await asyncio.to_thread(begun.wait, timeout=20)
    assert await asyncio.wait_for(encoded("abc"), 10) == [0, 1, 2]
    passed.set()
    assert len(await long) == LONG_TEXT + 1


async def test_a_model_without_a_template_says_so(make_worker: MakeWorker) -> None:
    worker = make_worker()
    await worker.start()
    with pytest.raises(RequestError, match="no chat template"):
        await worker.encode_chat([{"role": "user", "content": "abc"}])


async def test_stats_say_what_happens(make_worker: MakeWorker, runner: GatedRunner) -> None:
    worker = make_worker()
    assert worker.stats() is None
    await worker.start()
    generations = [worker.submit(request("r0"))]
    await begun(runner)  # with r0 alone: the others come with the next step
    generations += [worker.submit(request("r1")), worker.submit(request("r2"))]
    runner.steps.release(2)
    for _ in range(2):
        await begun(runner)
    stats = worker.stats()
    assert stats is not None
    assert (stats.running, stats.waiting, stats.slots) == (2, 1, 2)
    assert stats.kv_tokens == (3 + 3) + (3 + 2)  # of the prompt, and a token for each step that has begun
    assert stats.kv_capacity == 2 * 4096
    assert stats.memory == {"weights": 1000, "kv_cache": 200, "prefix_cache": 30}
    runner.steps.release(100)
    for generation in generations:
        await read(generation)
    await worker.close()
    counts = worker.stats().counts  # type: ignore[union-attr]
    assert counts.prefix_query_tokens == 3 * 3
    assert counts.traces == 1
    assert sum(counts.inter_token_seconds.counts) == 3 * 3
    assert counts.step_batch_size.total == 3 * 3
    assert sum(counts.step_seconds.counts) > sum(counts.step_batch_size.counts)
