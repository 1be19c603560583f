"""The default model in mlx-lm, in the dtype that the daemon computes in."""

from __future__ import annotations

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import llama

from emlxd.config import Source
from emlxd.graph import BLAS  # noqa: F401  before MLX, or the oracle takes minutes
from emlxd.sources import fetch
from emlxd.text.tokenizer import Tokenizer
from tests.daemon import DEFAULT_SOURCE

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class Oracle:
    """mlx-lm's Llama with the weights that MLX's own GGUF reader gives, expanded to float32."""

    def __init__(self) -> None:
        tensors, metadata = mx.load(str(fetch(Source(**DEFAULT_SOURCE))), return_metadata=True)
        self.tokenizer = Tokenizer.from_gguf(_plain(metadata))
        self.model = llama.Model(
            llama.ModelArgs(
                model_type="llama",
                hidden_size=576,
                num_hidden_layers=30,
                intermediate_size=1536,
                num_attention_heads=9,
                num_key_value_heads=3,
                rms_norm_eps=1e-5,
                vocab_size=49152,
                rope_theta=100000.0,
                tie_word_embeddings=True,
            )
        )
        weights = {_hf_name(name): _dense(tensors, name) for name in tensors if name.endswith(".weight")}
        assert set(weights) == {name for name, _ in tree_flatten(self.model.parameters())}
        self.model.load_weights(list(weights.items()))
        mx.eval(self.model.parameters())
        self._ids = {self.tokenizer.token_bytes(id): id for id in range(self.tokenizer.vocab_size)}

    def greedy(self, prompt: list[int], count: int, guess: list[bytes]) -> list[int]:
        """The ``count`` likeliest tokens one after the other, up to an end token.

        ``guess``, as the bytes of tokens, only saves time: it is checked in one pass, and the first wrong
        token is replaced.
        """
        tokens: list[int] = []
        known = [self._ids[piece] for piece in guess]
        while len(tokens) < count and not (tokens and tokens[-1] in self.tokenizer.eos_ids):
            draft = [*tokens, *known[len(tokens) : count - 1]]
            logits = self.model(mx.array([[*prompt, *draft]]))[0, len(prompt) + len(tokens) - 1 :]
            for token in mx.argmax(logits, axis=-1).tolist():
                tokens.append(token)
                if draft[len(tokens) - 1 : len(tokens)] != [token] or token in self.tokenizer.eos_ids:
                    break
        return tokens


def _plain(metadata: dict[str, object]) -> dict[str, object]:
    return {key: value.tolist() if isinstance(value, mx.array) else value for key, value in metadata.items()}


def _hf_name(name: str) -> str:
    parts = name.removesuffix(".weight").split(".")
    prefix = f"model.layers.{parts[1]}." if parts[0] == "blk" else ""
    return f"{prefix}{_NAMES[parts[-1]]}.weight"


def _dense(tensors: dict[str, mx.array], name: str) -> mx.array:
    stem = name.removesuffix(".weight")
    weight = tensors[name]
    if f"{stem}.scales" in tensors:
        bits = 8 if stem == "token_embd" else 4
        # In float32: in the scales' own float16 the weights would be rounded.
        scales, biases = (tensors[f"{stem}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
        weight = mx.dequantize(weight, scales, biases, group_size=32, bits=bits)
    heads = {"attn_q": 9, "attn_k": 3}.get(stem.rpartition(".")[2])
    if heads:
        weight = weight.reshape(heads, 32, 2, 576).swapaxes(1, 2).reshape(weight.shape)
    return weight.astype(mx.float32)
