"""Writes docs/models.md from the tables that the loader reads: ``python -m emlxd.graph.models_page``."""

from __future__ import annotations

from emlxd.graph.family_table import ALIASES, FAMILIES
from emlxd.graph.gguf import BLOCK_TYPES
from emlxd.graph.gguf_checkpoint import ROWS

_PAGE = """# Models

This page is written by `python -m emlxd.graph.models_page`, from the tables that the loader reads.

A model is a folder as Hugging Face and mlx-lm publish it, with `config.json` and `*.safetensors`, or one GGUF
file. Its architecture is `model_type` in `config.json` or `general.architecture` in GGUF. One that is not
listed gives an error that names it. Of a model that also sees or hears, the text part is served.

| `model_type` | Models | GGUF |
|-|-|-|
{rows}

## Number formats

- Folders: float32, bfloat16 and float16; MLX's quantisations `affine` (2, 3, 4, 5, 6 and 8 bits in groups of
  32, 64 or 128), `mxfp4`, `mxfp8` and `nvfp4`, with settings of their own for some layers; Hugging Face's fp8
  with a scale for each block, which becomes bfloat16; gpt-oss' mxfp4.
- GGUF: {blocks}.
  Q2_K, Q3_K and Q6_K have groups of 16, which MLX has not: unless they are made dense, they become 8-bit
  groups of 32.

`weights` in the YAML says whether quantised weights stay so; `quantize` quantises dense ones on load.

## Limits

- Layers with a sliding window keep rings as long as the window and what a step writes
  ([memory.md](memory.md)); those of other kinds keep the whole context.
- Of a recurrent model (one with convolution or other states) the prefix cache knows prompts and answers up to
  their last whole block of 64 tokens, and where prompts part from those before them, but nothing between.
- RoPE scaling `dynamic` has no effect, since no context is longer than `max_position_embeddings`. `longrope`
  takes its long factors if `max_context` is longer than the original context.
"""


def page() -> str:
    """The text of docs/models.md."""
    in_gguf = {kind: name for name, row in ROWS.items() for kind in (row.model_type, row.with_experts)}
    names = {name: [name, *(a for a, of in ALIASES.items() if of == name)] for name in FAMILIES}
    rows = [
        f"| {', '.join(f'`{name}`' for name in names[key])} | {family.title} | {_code(in_gguf.get(key))} |"
        for key, family in sorted(FAMILIES.items())
    ]
    return _PAGE.format(rows="\n".join(rows), blocks=", ".join(block.name for block in BLOCK_TYPES.values()))


def _code(name: str | None) -> str:
    return f"`{name}`" if name else ""


if __name__ == "__main__":
    print(page(), end="")
