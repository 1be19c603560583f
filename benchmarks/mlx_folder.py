"""Writes the default model as a 4-bit MLX folder, the form in which mlx-lm's server runs it.

python benchmarks/mlx_folder.py FOLDER
mlx_lm.server --model FOLDER --port 8421
emlxd bench --url http://127.0.0.1:8421 --model FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from emlxd.config_file import load
from emlxd.graph.gguf import GgufFile
from emlxd.sources import fetch
from emlxd.text import gguf_vocabulary

# isort: split
import mlx.core as mx

NAMES = {
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
CONFIG = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "vocab_size": 49152,
    "rope_theta": 100000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "quantization": {"group_size": 32, "bits": 4, "model.embed_tokens": {"group_size": 32, "bits": 8}},
}


def main(folder: Path) -> None:
    gguf = fetch(load(Path("config/config.yaml")).models[0].source)
    tensors = mx.load(str(gguf))
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(
        str(folder / "model.safetensors"), {_name(n): _fixed(n, t) for n, t in tensors.items()}
    )
    (folder / "config.json").write_text(json.dumps(CONFIG))
    vocabulary = gguf_vocabulary.load(GgufFile(gguf).metadata)
    vocabulary.backend.save(str(folder / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "bos_token": "<|im_start|>",
        "chat_template": vocabulary.chat_templates["default"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def _name(name: str) -> str:
    parts = name.split(".")
    prefix = f"model.layers.{parts[1]}." if parts[0] == "blk" else ""
    return f"{prefix}{NAMES[parts[-2]]}.{parts[-1]}"


def _fixed(name: str, tensor: mx.array) -> mx.array:
    """Undoes llama.cpp's order of the rows of q and k."""
    heads = {"attn_q": 9, "attn_k": 3}.get(name.split(".")[-2])
    return tensor.reshape(heads, 32, 2, -1).swapaxes(1, 2).reshape(tensor.shape) if heads else tensor


main(Path(sys.argv[1]))
