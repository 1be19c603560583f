"""The engine on a real, tiny model: what it shares, moves and mixes never shows in an answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from emlxd.config import ModelSettings, PrefixCacheSettings, Source
from emlxd.core import GenerateRequest, PromptScored, SamplingParams, TextPiece, TokenLogprob
from emlxd.errors import ServerFault
from emlxd.graph.open import open_runner
from emlxd.graph.runner import MlxRunner
from emlxd.worker.disk_cache import DiskCache
from emlxd.worker.speculation import PromptLookup
from tests.agreement import GREEDY, assert_same, bound, oracle_logits
from tests.graph import tiny
from tests.graph.tiny_families import oracle_of
from tests.worker.harness import Drive, Listener

SLOTS = 4
END = 3
PROMPTS = [[(7 * i * i + 3 * i + seed) % 320 for i in range(20 + 37 * seed)] for seed in range(6)]
CREATIVE = SamplingParams(temperature=0.9, top_p=0.95, frequency_penalty=0.3, seed=5)


@pytest.fixture(scope="module", params=["llama", "mistral", "lfm2", "qwen3_next", "granitemoehybrid"])
def family(request: pytest.FixtureRequest) -> str:
    """Attention alone, with windows in rings, and each kind of recurrent state."""
    return str(request.param)


@pytest.fixture(scope="module")
def model(family: str) -> tuple[Any, dict[str, Any]]:
    """mlx-lm's, and its config.json."""
    return oracle_of(family, vocab_size=320, max_position_embeddings=512)


@pytest.fixture(scope="module")
def oracle(model: tuple[Any, dict[str, Any]]) -> Any:
    return model[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, model: tuple[Any, dict[str, Any]]) -> Path:
    return tiny.save(tmp_path_factory.mktemp("tiny"), *model)


def open_tiny(folder: Path, *, prefix_bytes: int = 1 << 20) -> MlxRunner:
    settings = ModelSettings(
        name="tiny",
        source=Source(path=folder),
        slots=SLOTS,
        dtype="float32",
        prefill_chunk=64,
        prefix_cache=PrefixCacheSettings(bytes=prefix_bytes),
    )
    return open_runner(folder, settings, [END])


@pytest.fixture(scope="module")
def runner(folder: Path) -> MlxRunner:
    return open_tiny(folder)


@pytest.fixture
def drive(runner: MlxRunner) -> Drive:
    runner.reset()
    return Drive(runner, slots=SLOTS)


def request(
    id: object, prompt: list[int], params: SamplingParams = GREEDY, **changes: object
) -> GenerateRequest:
    return GenerateRequest(str(id), tuple(prompt), 24, params, **changes)  # type: ignore[arg-type]


def solo(drive: Drive, prompt: list[int], params: SamplingParams = GREEDY, **changes: object) -> list[int]:
    listener = drive.submit(request("solo", prompt, params, **changes))
    drive.run()
    return listener.tokens


@pytest.mark.numeric
def test_answers_are_the_same_alone_and_among_strangers(drive: Drive, oracle: Any) -> None:
    params = [GREEDY, CREATIVE, SamplingParams(seed=1), SamplingParams(temperature=0.5, seed=2, logprobs=3)]
    jobs = [(prompt, params[number % 4]) for number, prompt in enumerate(PROMPTS)]
    together = [drive.submit(request(number, *job)) for number, job in enumerate(jobs)]
    drive.run()
    for (prompt, param), listener in zip(jobs, together, strict=True):
        assert_same(solo(drive, prompt, param), listener.tokens, oracle, prompt, param)


@pytest.mark.numeric
def test_a_hit_gives_the_answer_of_a_miss(drive: Drive, oracle: Any) -> None:
    prompt = PROMPTS[5][:194]  # two tokens after the hit: what was taken up shows
    miss = drive.submit(request(1, prompt))
    drive.run()
    hit = drive.submit(request(2, prompt))
    drive.run()
    assert hit.end and hit.end.usage.cached_tokens == 192  # type: ignore[union-attr]
    assert_same(hit.tokens, miss.tokens, oracle, prompt)


@pytest.mark.numeric
def test_an_answer_is_a_prefix_for_the_next_turn(drive: Drive, oracle: Any) -> None:
    prompt = PROMPTS[5][:175]
    first = drive.submit(request(1, prompt))
    drive.run()
    turn = [*prompt, *first.tokens, 7, 8, 9]
    second = drive.submit(request(2, turn))
    drive.run()
    assert second.end and second.end.usage.cached_tokens == 192  # type: ignore[union-attr]
    drive.engine.recover(ServerFault("forget the cache"), shed=False)
    assert_same(solo(drive, turn), second.tokens, oracle, turn)


@pytest.mark.numeric
def test_answers_to_one_prompt_are_those_of_their_seeds(drive: Drive, oracle: Any) -> None:
    many = drive.submit(request("many", PROMPTS[2], CREATIVE, n=6))
    drive.run()
    answers = [many.tokens_of(index) for index in range(6)]
    assert len(set(map(tuple, answers))) == 6
    for index, answer in enumerate(answers):
        params = SamplingParams(temperature=0.9, top_p=0.95, frequency_penalty=0.3, seed=5 + index)
        assert_same(solo(drive, PROMPTS[2], params), answer, oracle, PROMPTS[2], params)


@pytest.mark.numeric
def test_lost_memory_is_computed_again(drive: Drive, oracle: Any) -> None:
    listener = drive.submit(request("kept", PROMPTS[1], CREATIVE))
    for _ in range(6):
        drive.step()
    drive.submit(request("shed", PROMPTS[0]))
    drive.step()
    drive.engine.recover(ServerFault("full"), shed=True)
    drive.run()
    assert_same(listener.tokens, solo(drive, PROMPTS[1], CREATIVE), oracle, PROMPTS[1], CREATIVE)


def test_starting_anew_takes_no_more_memory_than_there_was(runner: MlxRunner) -> None:
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    runner.reset()
    assert mx.get_peak_memory() < before + runner.cache_bytes


class Everything:
    """A grammar that allows all tokens, so that only the way of computing differs."""

    finished = False

    def mask(self) -> bytes:
        return b"\xff" * 40

    def accept(self, token: int) -> None:
        pass


@pytest.mark.numeric
def test_a_masked_step_computes_what_a_plain_one_does(drive: Drive, oracle: Any) -> None:
    plain = [solo(drive, prompt, CREATIVE) for prompt in PROMPTS[:3]]
    masked = [
        drive.submit(request(number, prompt, CREATIVE), Everything() if number != 1 else None)
        for number, prompt in enumerate(PROMPTS[:3])
    ]
    drive.run()
    for prompt, listener, expected in zip(PROMPTS[:3], masked, plain, strict=True):
        assert_same(listener.tokens, expected, oracle, prompt, CREATIVE)


@pytest.mark.numeric
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.7, top_p=0.9, seed=3)])
def test_checked_drafts_give_the_tokens_of_plain_steps(
    drive: Drive, runner: MlxRunner, oracle: Any, params: SamplingParams
) -> None:
    prompts = [PROMPTS[0] * 3, PROMPTS[1] * 2]
    plain = [solo(drive, prompt, params) for prompt in prompts]
    # What is drafted is the answer itself, broken now and then, so that drafts are right and wrong in turn.
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, plain, strict=True)]
    drafting = Drive(runner, slots=SLOTS, max_draft=4)
    listeners = [drafting.submit(request(f"d{n}", prompt, params)) for n, prompt in enumerate(prompts)]
    drafting.step()
    for sequence, text in zip(drafting.scheduler.running, texts, strict=True):
        sequence.lookup = Scripted(text)
    drafting.run()
    for prompt, listener, expected in zip(prompts, listeners, plain, strict=True):
        assert_same(listener.tokens, expected, oracle, prompt, params)


class Scripted(PromptLookup):
    """Drafts the true text, with every third token wrong."""

    def __init__(self, text: list[int]) -> None:
        super().__init__(4)
        self._text = [token if place % 3 else 319 - token for place, token in enumerate(text)]

    def propose(self, tokens: Sequence[int]) -> list[int]:
        return self._text[len(tokens) : len(tokens) + 4]


def test_no_end_token_before_its_time(drive: Drive) -> None:
    wish = SamplingParams(temperature=0.0, logit_bias=((END, 100.0),), min_tokens=5)
    assert solo(drive, PROMPTS[0], wish).index(END) == 5


@pytest.mark.numeric
def test_log_probabilities_are_those_of_the_model(drive: Drive, oracle: Any) -> None:
    prompt = PROMPTS[3]
    listener = drive.submit(
        request(1, prompt, SamplingParams(temperature=0.0, logprobs=2), prompt_logprobs=2)
    )
    drive.run()
    tokens = listener.tokens
    logits = oracle_logits(oracle, [*prompt, *tokens])
    scale = float(mx.abs(logits).max())
    expected = (logits - mx.logsumexp(logits, axis=-1, keepdims=True)).tolist()
    scored = listener.events[0]
    assert isinstance(scored, PromptScored) and scored.logprobs[0] is None
    answered = [one for event in listener.events if isinstance(event, TextPiece) for one in event.logprobs]
    entries = [*scored.logprobs[1:], *answered]
    assert [entry.token for entry in entries if entry] == [*prompt[1:], *tokens]
    wrong = [place for place, entry in enumerate(entries) if not agrees(entry, expected[place], scale)]
    assert not wrong


def agrees(entry: TokenLogprob | None, expected: list[float], scale: float) -> bool:
    assert entry
    best = [expected[token] for token, _ in entry.top]
    near = abs(entry.logprob - expected[entry.token]) <= bound(scale, on_cpu=1e-3)
    return near and best == pytest.approx(sorted(expected, reverse=True)[:2], abs=2 * bound(scale))


def test_memory_and_traces_stay_flat(folder: Path) -> None:
    runner = open_tiny(folder)
    drive = Drive(runner, slots=SLOTS)

    def traffic(rounds: int) -> None:
        for round in range(rounds):
            listeners: list[Listener] = []
            for number, prompt in enumerate(PROMPTS):
                listeners.append(drive.submit(request(f"{round}-{number}", prompt, CREATIVE)))
            drive.run()

    traffic(2)
    traces, active = runner.traces, mx.get_active_memory()
    traffic(6)
    assert runner.traces == traces
    assert mx.get_active_memory() <= active + (64 << 10)


@pytest.mark.numeric
def test_blocks_come_back_from_the_disk_after_a_restart(folder: Path, oracle: Any, tmp_path: Path) -> None:
    answers, cached = [], []
    prompt = PROMPTS[5][:194]
    for _ in range(2):
        disk = DiskCache(tmp_path, "tiny", "v1", 1 << 20)
        drive = Drive(open_tiny(folder), slots=SLOTS, disk=disk)
        listener = drive.submit(request("r", prompt))
        drive.run()
        disk.close()
        answers.append(listener.tokens)
        cached.append(listener.end.usage.cached_tokens)  # type: ignore[union-attr]
    assert_same(*answers, oracle, prompt)
    assert cached == [0, 192]
