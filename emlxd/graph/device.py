"""What the machine computes on, and every choice that depends on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import mlx.core as mx

from emlxd.graph import blas, cpu_math
from emlxd.graph.activations import Activation, Functions, make_activation, weigh
from emlxd.graph.attention import Attention, CpuAttention, FusedAttention
from emlxd.graph.cuda import fused_decoder
from emlxd.graph.cuda.fused_decoder import FusedDecoder
from emlxd.graph.rope import FusedRope, Rope, TableRope
from emlxd.graph.spec import RopeSpec
from emlxd.graph.transformer import Transformer
from emlxd.graph.weights import ExpandFrom

Kind = Literal["metal", "cuda", "cpu"]
MAX_LANES: Final = 8
_EXPAND_FROM: Final = ExpandFrom(matrix=128, expert=12)  # measured: docs/benchmarks.md
_DTYPES: Final = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}


@dataclass(frozen=True, slots=True)
class Device:
    """A device and how the decoder is computed there. Everything else in ``graph`` asks this object."""

    kind: Kind

    @property
    def gpu(self) -> bool:
        return self.kind != "cpu"

    def dtype(self, setting: str) -> mx.Dtype:
        """``auto`` is bfloat16 on a GPU, and float32 on a CPU, where it is the only fast one."""
        if setting == "auto":
            return mx.bfloat16 if self.gpu else mx.float32
        return _DTYPES[setting]

    def keeps_quantized(self, setting: str) -> bool:
        """Whether quantised weights stay so. MLX's quantised matmul on a CPU is slower than a dense one."""
        return setting == "keep" or (setting == "auto" and self.gpu)

    @property
    def expand_from(self) -> ExpandFrom | None:
        """When products expand quantised matrices; None is never.

        MLX's own products take as many times longer on CUDA as there are times more rows, nearly.
        """
        return _EXPAND_FROM if self.kind == "cuda" else None

    @property
    def prefills_by_layers(self) -> bool:
        """Whether ``Transformer.prefill`` waits: MLX for CUDA takes gigabytes for what is still to come."""
        return self.kind == "cuda"

    def attention(self, dtype: mx.Dtype, *, compile: bool) -> Attention:
        return CpuAttention(compile=compile) if self._plain(dtype) else FusedAttention()

    def activation(self, name: str, dtype: mx.Dtype, *, gated: bool, compile: bool) -> Activation:
        return make_activation(name, gated=gated, plain_cpu=self._plain(dtype), compile=compile)

    def functions(self, name: str, dtype: mx.Dtype, *, gated: bool, compile: bool) -> Functions:
        """``name`` is the activation of feed-forward layers. Recurrences are computed in float32."""
        on_cpu = not self.gpu

        def silu(*, gated: bool) -> Activation:
            return make_activation("silu", gated=gated, plain_cpu=on_cpu, compile=compile)

        return Functions(
            activation=self.activation(name, dtype, gated=gated, compile=compile),
            silu=silu(gated=False),
            swiglu=silu(gated=True),
            exp=mx.compile(cpu_math.exp) if on_cpu and compile else mx.exp,
            weigh=mx.compile(weigh) if compile else weigh,
        )

    def rope(self, spec: RopeSpec, max_context: int, dtype: mx.Dtype) -> Rope:
        return TableRope(spec, max_context) if self._plain(dtype) else FusedRope(spec, max_context)

    @property
    def decodes_fused(self) -> bool:
        """Whether some models decode in a kernel of their own, which has its own copy of their scales."""
        return self.kind == "cuda" and fused_decoder.on_hopper()

    def fused_decoder(self, model: Transformer, *, slots: int, max_context: int) -> FusedDecoder | None:
        """A decode step in one kernel, where there is one for this device and ``model``."""
        return FusedDecoder.of(model, slots=slots, max_context=max_context) if self.decodes_fused else None

    @property
    def lanes(self) -> int:
        """Independent batches that are best computed side by side: on a CPU one for each core."""
        return 1 if self.gpu else min(blas.threads(), MAX_LANES)

    def _plain(self, dtype: mx.Dtype) -> bool:
        return not self.gpu and dtype == mx.float32


def current_device() -> Device:
    """The device MLX computes on by default in this thread."""
    if mx.default_device() == mx.cpu:
        return Device("cpu")
    return Device("metal" if mx.metal.is_available() else "cuda")
