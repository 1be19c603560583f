"""What checkpoints call the tensors: the names in the code, and what families call otherwise.

A name may be renamed as a whole or by its first parts; ``*`` stands for a number. Several stored names are
alternatives: families are published in more than one layout.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

Names = Mapping[str, str | tuple[str, ...]]

COMMON: Final[Names] = {
    "attention_in": "input_layernorm",
    "attention_out": "post_attention_layernorm",
    "mlp_in": "post_attention_layernorm",
    "mlp_out": "post_feedforward_layernorm",
    "mlp.router": "mlp.gate",
    "mlp.correction": "mlp.gate",
    "mlp.stacked": ("mlp.switch_mlp", "mlp.experts"),
}
SANDWICH: Final[Names] = {"mlp_in": "pre_feedforward_layernorm"}
BLOCK_SPARSE: Final[Names] = {
    "mlp.router": "block_sparse_moe.gate",
    "mlp.stacked": "block_sparse_moe.switch_mlp",
    "mlp.experts.*.gate_proj": "block_sparse_moe.experts.*.w1",
    "mlp.experts.*.up_proj": "block_sparse_moe.experts.*.w3",
    "mlp.experts.*.down_proj": "block_sparse_moe.experts.*.w2",
}
GRANITE_EXPERTS: Final[Names] = {
    "mlp.router": "block_sparse_moe.router.layer",
    "mlp.stacked": "block_sparse_moe.switch_mlp",
    "mlp.stacked.gate_up_proj": "block_sparse_moe.input_linear",
    "mlp.stacked.down_proj": (
        "block_sparse_moe.switch_mlp.down_proj",
        "block_sparse_moe.output_linear",
    ),
}
GGUF: Final[Names] = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "attention_in": "attn_norm",
    "attention_out": "post_attention_norm",
    "mlp_in": "ffn_norm",
    "mlp_out": "post_ffw_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.router": "ffn_gate_inp",
    "mlp.stacked.gate_proj": "ffn_gate_exps",
    "mlp.stacked.up_proj": "ffn_up_exps",
    "mlp.stacked.down_proj": "ffn_down_exps",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}

_LAYER: Final = re.compile(r"(model\.layers\.\d+)\.(.+)")
_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.)")


def stored_stems(stem: str, names: Names) -> list[str]:
    """What ``stem``, such as ``model.layers.0.mlp.router``, may be stored under; or the name of a tensor."""
    match = _LAYER.fullmatch(stem)
    layer, rest = (match[1] + ".", match[2]) if match else ("", stem)
    number = _NUMBER.search(rest)
    parts = _NUMBER.sub("*", rest, count=1).split(".")
    for count in range(len(parts), 0, -1):
        if found := names.get(".".join(parts[:count])):
            renamed = (found,) if isinstance(found, str) else found
            tails = [".".join([name, *parts[count:]]) for name in renamed]
            return [layer + (tail.replace("*", number[0], 1) if number else tail) for tail in tails]
    return [stem]
