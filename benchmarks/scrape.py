"""How long a scrape of /metrics takes with fifty models in memory, idle and beside 32 streams.

python benchmarks/scrape.py

The daemon is a process of its own: the default model, which streams, and 49 tiny ones of random weights.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import daemon
import httpx
from tokenizers import Tokenizer, models, pre_tokenizers

from emlxd.config_file import load
from emlxd.sources import fetch

# isort: split
import mlx.core as mx

MODELS, STREAMS, SCRAPES = 50, 32, 30
HIDDEN, INNER, VOCAB = 32, 64, 256
OPENMETRICS = {"Accept": "application/openmetrics-text;version=1.0.0"}  # as Prometheus asks


def write_tiny_model(folder: Path) -> Path:
    """A Llama of one layer with random weights, in the format of Hugging Face."""
    config = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": 1,
        "intermediate_size": INNER,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    }
    layer = {f"self_attn.{part}_proj": (HIDDEN, HIDDEN) for part in "qkvo"}
    layer |= {"mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN)}
    layer |= {"mlp.down_proj": (HIDDEN, INNER)}
    shapes = {f"model.layers.0.{name}.weight": shape for name, shape in layer.items()}
    shapes["model.embed_tokens.weight"] = (VOCAB, HIDDEN)
    tensors = {name: mx.random.normal(shape) for name, shape in shapes.items()}
    norms = ("model.norm", "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm")
    tensors |= {f"{name}.weight": mx.ones(HIDDEN) for name in norms}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: id for id, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def config_of(tiny_model: Path) -> dict[str, Any]:
    tiny = {"path": str(tiny_model)}
    default = {"path": str(fetch(load(Path("config/config.yaml")).models[0].source))}
    entries = [{"name": f"tiny-{number:02}", "source": tiny, "slots": 1} for number in range(MODELS - 1)]
    entries.append({"name": "default", "source": default, "slots": STREAMS, "max_context": 1024})
    return {"models": entries}


async def complete(http: httpx.AsyncClient, model: str, tokens: int) -> None:
    body = {"model": model, "prompt": "abc", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        async for _ in answer.aiter_bytes():
            pass


async def scrapes(http: httpx.AsyncClient) -> str:
    """How long they took, as the daemon's own histogram of HTTP requests has it and as a client sees it."""
    times = []
    before = spent((await http.get("/metrics")).text)
    for _ in range(SCRAPES):
        await asyncio.sleep(0.2)
        started = time.perf_counter()
        answer = await http.get("/metrics", headers=OPENMETRICS)
        times.append(1000 * (time.perf_counter() - started))
    after = spent((await http.get("/metrics")).text)
    mean = 1000 * (after - before) / (SCRAPES + 1)
    lines = answer.content.count(b"\n")
    return f"{mean:.0f} ms in the daemon, {statistics.median(times):.0f} ms for the client, {lines} lines"


def spent(text: str) -> float:
    """Seconds that all scrapes before this one took the daemon."""
    name = "emlxd_http_request_duration_seconds_sum{"
    found = [line for line in text.splitlines() if line.startswith(name) and '"/metrics"' in line]
    return sum(float(line.split()[-1]) for line in found)


async def measure(port: int) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=None, limits=limits) as http:
        names = [model["id"] for model in (await http.get("/v1/models")).json()["data"]]
        for name in names:  # a series appears with its first value
            await complete(http, name, 4)
        print(f"{len(names)} models, idle: {await scrapes(http)}")
        streams = [asyncio.create_task(complete(http, "default", 900)) for _ in range(STREAMS)]
        await asyncio.sleep(5)
        print(f"{STREAMS} streams: {await scrapes(http)}")
        assert not any(stream.done() for stream in streams)
        for stream in streams:
            stream.cancel()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(write_tiny_model(Path(folder) / "tiny"))
        with daemon.running(config) as port:
            asyncio.run(measure(port))


main()
