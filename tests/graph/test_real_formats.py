"""The default model through GGUF's types and a folder: the same answers, or next to the same."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import pytest

from emlxd.config import ModelSettings, Source
from emlxd.core import GenerateRequest, SamplingParams
from emlxd.graph.attention import Place
from emlxd.graph.checkpoint import open_checkpoint
from emlxd.graph.device import current_device
from emlxd.graph.gguf import GgufFile
from emlxd.graph.kv_cache import empty_layers
from emlxd.graph.loader import load_transformer
from emlxd.graph.open import open_runner
from emlxd.sources import locate
from emlxd.text.tokenizer import Tokenizer
from tests.daemon import DEFAULT_SOURCE
from tests.device import only_on_cpu
from tests.graph.real_formats import write_folder, write_gguf, write_gguf_with_llama_cpp
from tests.worker.harness import Drive

pytestmark = [
    only_on_cpu("a GPU answers in bfloat16, which may round to another token"),
    pytest.mark.model,
]

QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "List three primary colours.",
    "Explain in one sentence why the sky is blue.",
    "Translate 'good morning' into Spanish.",
    "What is 12 times 12?",
    "Name a mammal that lays eggs.",
    "Give me a Python function that adds two numbers.",
    "Who wrote Romeo and Juliet?",
    "What do bees make?",
)


@dataclass(frozen=True)
class Answers:
    """What the model in half precision answers, greedy, and the logits [prompt, token, V] of its answers."""

    prompts: list[list[int]]
    texts: list[list[int]]

    def logits(self, path: Path, weights: str = "dense") -> mx.array:
        """What the model at ``path`` would say at each token of these answers."""
        model = load_transformer(
            open_checkpoint(path), current_device(), max_context=256, dtype="float32", weights=weights
        )
        whole = [prompt + text for prompt, text in zip(self.prompts, self.texts, strict=True)]
        longest = max(map(len, whole))
        tokens = mx.array([text + [0] * (longest - len(text)) for text in whole])
        place = Place(slice(0, len(whole)), mx.zeros(len(whole), mx.int32), longest, longest)
        hidden = model.forward(tokens, place, empty_layers(model.spec, len(whole), longest, model.dtype))
        count = len(self.texts[0])
        starts = mx.array([len(prompt) - 1 for prompt in self.prompts])[:, None] + mx.arange(count)
        made = model.logits(mx.take_along_axis(hidden, starts[..., None], axis=1))
        mx.eval(made)
        return made


def answer(path: Path, questions: int, count: int) -> Answers:
    tokenizer = Tokenizer.from_gguf(GgufFile(path).metadata)
    turn = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    prompts = [tokenizer.encode(turn.format(question)) for question in QUESTIONS[:questions]]
    settings = ModelSettings(
        name="half", source=Source(path=path), slots=questions, max_context=256, compile=False
    )
    drive = Drive(open_runner(path, settings, []), slots=questions)
    greedy = SamplingParams(temperature=0.0)
    heard = [drive.submit(GenerateRequest(str(i), tuple(p), count, greedy)) for i, p in enumerate(prompts)]
    drive.run()
    return Answers(prompts, [[int(token) for token in listener.text.split()] for listener in heard])


def agreement(made: mx.array, expected: mx.array) -> tuple[float, float]:
    """The share of tokens that are the same, and the mean Kullback-Leibler divergence in nats."""
    same = (made.argmax(axis=-1) == expected.argmax(axis=-1)).mean()
    ours, theirs = (x - mx.logsumexp(x, axis=-1, keepdims=True) for x in (made, expected))
    return float(same), float((mx.exp(theirs) * (theirs - ours)).sum(axis=-1).mean())


@pytest.fixture(scope="module")
def source() -> Path:
    path = locate(Source(**DEFAULT_SOURCE))
    if path is None:
        pytest.skip("the default model is not in the cache; `emlxd pull` fetches it")
    return path


@pytest.fixture(scope="module")
def half(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(source, tmp_path_factory.mktemp("half") / "half.gguf", "F16")


@pytest.fixture(scope="module")
def answers(half: Path) -> Answers:
    return answer(half, len(QUESTIONS), 40)


# Of each mixture at least so many tokens are those of half precision, and so far are they apart in the mean.
BOUNDS = {"Q8_0": (0.94, 0.005), "Q6_K": (0.9, 0.02), "Q4_K_M": (0.75, 0.12), "Q4_1": (0.75, 0.12)}


@pytest.fixture(scope="module")
def few(half: Path) -> Answers:
    return answer(half, 4, 16)


def test_a_folder_answers_as_the_gguf_file_does(few: Answers, half: Path, tmp_path: Path) -> None:
    expected = few.logits(half)
    assert expected.argmax(axis=-1).tolist() == few.texts
    assert mx.array_equal(few.logits(write_folder(half, tmp_path / "folder")), expected)


def test_a_quantised_file_answers_nearly_the_same(
    few: Answers, source: Path, half: Path, tmp_path: Path
) -> None:
    check("Q4_K_M", write_gguf(source, tmp_path / "x.gguf", "Q4_K_M"), half, few)


def check(mixture: str, path: Path, half: Path, answers: Answers) -> None:
    share, divergence = agreement(answers.logits(path), answers.logits(half))
    least, most = BOUNDS[mixture]
    assert share >= least and divergence <= most


@pytest.mark.slow
def test_ten_answers_are_the_same_from_either_dense_form(
    answers: Answers, half: Path, tmp_path: Path
) -> None:
    folder = write_folder(half, tmp_path / "folder")
    assert answers.logits(folder).argmax(axis=-1).tolist() == answers.texts


@pytest.mark.slow
@pytest.mark.parametrize("mixture", BOUNDS)
def test_ten_answers_through_every_type(
    mixture: str, answers: Answers, source: Path, half: Path, tmp_path: Path
) -> None:
    check(mixture, write_gguf(source, tmp_path / "x.gguf", mixture), half, answers)


@pytest.mark.slow
@pytest.mark.parametrize("mixture", BOUNDS)
def test_ten_answers_through_llama_cpps_quantiser(
    mixture: str, answers: Answers, half: Path, tmp_path: Path
) -> None:
    if importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("llama-cpp-python is not installed")
    check(mixture, write_gguf_with_llama_cpp(half, tmp_path / "x.gguf", mixture), half, answers)
