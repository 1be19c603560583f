"""Recurrent families against mlx-lm, on random models of some 10 M parameters, in one run.

python benchmarks/recurrent.py [ROUNDS]
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from emlxd.config import ModelSettings, Source
from emlxd.core import SamplingParams
from emlxd.graph import cpu_math
from emlxd.graph.batch import Begin, PrefillRow
from emlxd.graph.linear_scan import Tokens, scan
from emlxd.graph.open import open_runner
from emlxd.graph.runner import MlxRunner

# isort: split
import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.gated_delta import gated_delta_ops

PROMPT = [(7 * i * i + 3 * i) % 4096 for i in range(512)]
DECODED = 64
BASE: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "vocab_size": 4096,
    "rope_theta": 1e6,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {
        "attention_bias": False,
        "attention_multiplier": 0.125,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
        "layer_types": ["mamba", "mamba", "mamba", "attention"] * 2,
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "mamba_d_state": 64,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "position_embedding_type": "nope",
    },
    "lfm2": {
        "norm_eps": 1e-6,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 256,
        "block_ff_dim": 768,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "conv", "full_attention", "conv"] * 2,
    },
    "qwen3_next": {
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "num_experts": 0,
        "num_experts_per_tok": 0,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 0,
        "mlp_only_layers": [],
        "moe_intermediate_size": 0,
        "partial_rotary_factor": 0.25,
    },
}


def main(rounds: int) -> None:
    print(f"{'family':16} {'prefill, tok/s':>24} {'decode, tok/s':>24}")
    for family, own in FAMILIES.items():
        config = {"model_type": family} | BASE | own
        module = importlib.import_module(f"mlx_lm.models.{family}")
        model = module.Model(module.ModelArgs.from_dict(config))
        mx.eval(model.parameters())
        with tempfile.TemporaryDirectory() as folder:
            runner = _open(Path(folder), model, config)
        times = [(_emlxd(runner), _mlx_lm(model)) for _ in range(rounds)]
        cells = []
        for part, tokens in ((0, len(PROMPT)), (1, DECODED)):
            ours, theirs = (min(time[side][part] for time in times) for side in (0, 1))
            cells.append(f"{tokens / ours:8.0f} / {tokens / theirs:5.0f} = {theirs / ours:5.2f}")
        print(f"{family:16} {cells[0]:>24} {cells[1]:>24}")


def recurrence() -> None:
    """The recurrence alone, with the heads of Qwen 3 Next: one layer, 512 tokens and 1."""
    heads, dim = {"q": 16, "k": 16, "v": 32}, 128
    parts = {name: mx.random.normal((1, 512, count, dim)) for name, count in heads.items()}
    parts["k"] = parts["k"] / mx.linalg.norm(parts["k"], axis=-1, keepdims=True)
    decay, beta = (mx.random.uniform(0.8, 1, (1, 512, 32)) for _ in range(2))
    state = mx.random.normal((1, 32, dim, dim))
    mx.eval(parts, decay, beta, state)
    exp = mx.compile(cpu_math.exp)
    for length in (512, 1):
        q, k, v, g, b = (x[:, :length] for x in (*parts.values(), decay, beta))
        tokens = Tokens(q, k, v, mx.log(g), b)
        ours, theirs = (
            min(_timed(lambda work=work: mx.eval(*work())) for _ in range(5)) * 1e3
            for work in (
                lambda t=tokens: scan(t, state, exp),
                lambda a=(q, k, v, g, b): gated_delta_ops(*a, state),
            )
        )
        print(f"{length} tokens: {ours:.2f} ms / {theirs:.2f} ms = {theirs / ours:.1f}")


def _open(folder: Path, model: Any, config: dict[str, Any]) -> MlxRunner:
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    return open_runner(folder, ModelSettings(name="m", source=Source(path=folder), slots=4))


def _emlxd(runner: MlxRunner) -> tuple[float, float]:
    begin = Begin(SamplingParams(temperature=0.0), tuple(PROMPT))
    row = PrefillRow(0, 0, tuple(PROMPT), begin)
    prefill = _timed(lambda: runner.prefill([row]).read())

    def decode() -> None:
        pending = runner.decode([len(PROMPT)])
        for position in range(len(PROMPT) + 1, len(PROMPT) + DECODED):
            following = runner.decode([position])
            pending.read()
            pending = following
        pending.read()

    return prefill, _timed(decode)


def _mlx_lm(model: Any) -> tuple[float, float]:
    cache = make_prompt_cache(model)

    def step(tokens: mx.array) -> mx.array:
        token = mx.argmax(model(tokens[None], cache=cache)[0, -1:], axis=-1)
        mx.async_eval(token)
        return token

    last: list[mx.array] = []
    prefill = _timed(lambda: last.append(step(mx.array(PROMPT))) or mx.eval(last[0]))

    def decode() -> None:
        token = last[0]
        for _ in range(DECODED):
            following = step(token)
            token.item()
            token = following
        token.item()

    return prefill, _timed(decode)


def _timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
    recurrence()
