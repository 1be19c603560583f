"""Which greedy answers are mlx-lm's, token for token: alone and in batches of 8, on whatever device MLX has.

python benchmarks/same_text.py FOLDER [--dense] [--dtype float32|bfloat16|float16] [--tokens 64]

FOLDER is a model with its tokenizer that mlx-lm reads (`benchmarks/mlx_folder.py` writes one of the default
model, in 4 bits); --dense expands its matrices on both sides. mlx-lm alone is what all others are compared
with, mlx-lm in batches among them: where its own texts differ, so does arithmetic with the number of rows.

Where two texts part, both tokens follow the same ones, so the distance of their logits says by how much the
choice hung: it is that of mlx-lm's logits, in one pass over the text.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from emlxd.config import ModelSettings, PrefixCacheSettings, Source
from emlxd.core import SamplingParams
from emlxd.graph.batch import Begin, PrefillRow
from emlxd.graph.device import current_device
from emlxd.graph.open import open_runner
from emlxd.graph.runner import MlxRunner

# isort: split
import mlx.core as mx
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.utils import dequantize_model, load_model
from tokenizers import Tokenizer

ROWS = 8
CONTEXT = 512
GREEDY = SamplingParams(temperature=0.0)
TOPICS = (
    *("the history of bread", "how a bicycle stays upright", "the capital of France", "why the sky is blue"),
    *("a walk in the mountains", "the rules of chess", "how bees make honey", "a recipe for soup"),
    *("the first computers", "what makes music sad", "a letter to a friend", "the water cycle"),
    *("a story about a fox", "how to plant a tree", "the number zero", "what a lighthouse is for"),
    *("a poem about rain", "the great explorers", "why we sleep", "how glass is made"),
)
BEGINNINGS = (
    "Write a few sentences about {}.",
    "Here is what I know about {}, and why it matters to the people around me: ",
    "Question: what should a child be told about {}? Answer:",
)

Answers = list[list[int]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dense", action="store_true", help="expand quantised matrices")
    parser.add_argument("--dtype", help="what is computed in (default: what emlxd takes on this device)")
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    dtype = current_device().dtype(options.dtype or "auto")
    prompts = _prompts(options.folder)
    peer: Any = load_model(options.folder)[0]
    if options.dense:
        peer = dequantize_model(peer)
    peer.set_dtype(dtype)
    reference = [_alone(peer, prompt, options.tokens) for prompt in prompts]
    report = Report(peer, prompts, reference)
    report("mlx-lm, in batches", _in_batches(peer, prompts, options.tokens))
    for name, compile in (("emlxd", True), ("emlxd, not compiled", False)):
        runner = open_runner(
            options.folder,
            ModelSettings(
                name="text",
                source=Source(path=options.folder),
                slots=ROWS,
                max_context=CONTEXT,
                dtype=str(dtype).removeprefix("mlx.core."),
                weights="dense" if options.dense else "keep",
                compile=compile,
                prefix_cache=PrefixCacheSettings(bytes=0),
            ),
        )
        for rows in (1, ROWS):
            answers = [
                answer
                for start in range(0, len(prompts), rows)
                for answer in _together(runner, prompts[start : start + rows], options.tokens)
            ]
            report(f"{name}, {'alone' if rows == 1 else 'in batches'}", answers)
    runner.close()  # once: it takes MLX's streams of this thread with it


def _prompts(folder: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [BEGINNINGS[index % len(BEGINNINGS)].format(topic) for index, topic in enumerate(TOPICS)]
    return [tokenizer.encode(text).ids for text in texts]


def _alone(model: Any, prompt: list[int], count: int) -> list[int]:
    return [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=count)]


def _in_batches(model: Any, prompts: Sequence[list[int]], count: int) -> Answers:
    answers: Answers = []
    for start in range(0, len(prompts), ROWS):
        generator = BatchGenerator(model, max_tokens=count, completion_batch_size=ROWS)
        ids = generator.insert([list(prompt) for prompt in prompts[start : start + ROWS]])
        tokens: dict[int, list[int]] = {uid: [] for uid in ids}
        while any(len(answer) < count for answer in tokens.values()):
            for response in generator.next_generated():
                tokens[response.uid].append(response.token)
        generator.close()
        answers += tokens.values()
    return answers


def _together(runner: MlxRunner, prompts: Sequence[list[int]], count: int) -> Answers:
    answers: Answers = []
    for slot, prompt in enumerate(prompts):
        begin = Begin(GREEDY, tuple(prompt))
        answers.append(list(runner.prefill([PrefillRow(slot, 0, tuple(prompt), begin)]).read().tokens))
    for step in range(count - 1):
        tokens = runner.decode([len(prompt) + step for prompt in prompts]).read().tokens
        for answer, token in zip(answers, tokens, strict=True):
            answer.append(token)
    return answers


class Report:
    """Prints how many answers are the reference, and how near to it the others were where they part."""

    def __init__(self, model: Any, prompts: Sequence[list[int]], reference: Answers) -> None:
        self._model = model
        self._prompts = prompts
        self._reference = reference

    def __call__(self, name: str, answers: Answers) -> None:
        same, gaps = 0, []
        for prompt, expected, answer in zip(self._prompts, self._reference, answers, strict=True):
            if answer == expected:
                same += 1
            else:
                gaps.append(self._gap(prompt, expected, answer))
        apart = f"; where others part, logits are {min(gaps):.3g} to {max(gaps):.3g} apart" if gaps else ""
        print(f"{name}: {same} of {len(answers)} are mlx-lm's{apart}", flush=True)

    def _gap(self, prompt: list[int], expected: list[int], answer: list[int]) -> float:
        at = next(i for i, pair in enumerate(zip(expected, answer, strict=True)) if pair[0] != pair[1])
        logits = self._model(mx.array([prompt + expected[:at]]))[0, -1].astype(mx.float32)
        return abs(float(logits[expected[at]] - logits[answer[at]]))


if __name__ == "__main__":
    main()
