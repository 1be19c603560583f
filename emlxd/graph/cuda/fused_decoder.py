"""Decoding on an NVIDIA GPU with one kernel a step, for decoders of the common kind.

MLX spends 5 to 10 microseconds of the host on every kernel, and a layer has twenty: small models wait for
the host, not for memory. Here a step is a lookup of the embedding, one kernel for all layers and the head,
and the sampling. ``transformer.py`` computes the same from MLX's operations, also where this does not apply.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any, Final, cast

import mlx.core as mx
import structlog

from emlxd.graph.cuda.shape import MAX_ROWS, THREADS, DecoderShape, Format, KernelShape, places_of
from emlxd.graph.cuda.support import Block, blocks_of
from emlxd.graph.cuda.table import Table
from emlxd.graph.kv_cache import LayerArrays
from emlxd.graph.layers import Linear
from emlxd.graph.transformer import Transformer

log = structlog.get_logger(__name__)

LOGGED: Final = 500  # characters of a compiler's complaint
_PARTS: Final = ("ptx", "common", "items", "matrix", "attention", "decode")  # each uses those before it
_HOPPER: Final = 9  # compute capability of the devices that the kernel has run on
_MULTIPROCESSORS: Final = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT

Kernel = Callable[..., list[mx.array]]


class FusedDecoder:
    """The forward pass of one token a row, for up to ``MAX_ROWS`` rows.

    The kernel writes into the cache's arrays as they are, which MLX does not know of: they stay the same
    arrays, and what reads them later must come after a result of the step, as all of ``MlxRunner`` does.
    """

    def __init__(self, model: Transformer, blocks: Sequence[Block], shape: DecoderShape) -> None:
        self._model = model
        self._shape = shape
        places, size = places_of(shape)
        self._table = Table(model, blocks, places)
        self._scratch = mx.zeros((size,), mx.uint8)
        self._kernels: dict[KernelShape, Kernel] = {}
        mx.eval(self._table.words, self._scratch)

    @staticmethod
    def of(model: Transformer, *, slots: int, max_context: int) -> FusedDecoder | None:
        """For ``model``, compiled, which takes seconds; None if the kernel does not know it."""
        blocks = blocks_of(model)
        if blocks is None:
            return None
        try:
            shape = _shape_of(model, blocks, max_context)
            if not shape.fits:
                return None
            fused = FusedDecoder(model, blocks, shape)
            fused.prepare(slots)
        except RuntimeError as error:  # MLX compiles with headers of CUDA that may be missing or others
            log.warning("decoding without the fused kernel", error=str(error)[:LOGGED])
            return None
        return fused

    def prepare(self, rows: int) -> None:
        """Compiles the kernels for up to ``rows`` rows. Raises RuntimeError."""
        nobody = [[mx.zeros((1,), mx.bfloat16)] * 2] * self._shape.layers
        for some in {KernelShape.of(self._shape, n + 1): n + 1 for n in range(min(rows, MAX_ROWS))}.values():
            nothing = mx.zeros((some,), mx.int32)
            mx.eval(self.logits(nothing, nothing, nothing, 1, nobody))

    def logits(
        self, tokens: mx.array, positions: mx.array, lengths: mx.array, window: int, kept: LayerArrays
    ) -> mx.array:
        """int32 [b] each, positions below ``window`` -> float32 [b, vocab], before ``Transformer.scaled``.

        Rows whose length is 0 neither write nor look: their logits mean nothing.
        """
        rows = positions.shape[0]
        shape = KernelShape.of(self._shape, rows)
        if shape not in self._kernels:
            self._kernels[shape] = _kernel(shape)
        extent = mx.array([rows, self._shape.splits(rows, window)], dtype=mx.int32)
        cached = [array for index in range(2) for array in (layer[index] for layer in kept)]
        (logits,) = self._kernels[shape](
            inputs=[
                *(self._model.embedded(tokens), positions, lengths, extent),
                *(self._table.words, self._scratch, *cached),
            ],
            grid=(self._shape.blocks * THREADS, 1, 1),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[(rows, self._shape.vocabulary)],
            output_dtypes=[mx.float32],
        )
        return logits

    @property
    def nbytes(self) -> int:
        """Of device memory, beside the model's."""
        return self._table.nbytes + self._scratch.nbytes

    def takes(self, rows: int) -> bool:
        return rows <= MAX_ROWS


def on_hopper() -> bool:
    """Whether MLX's device is one that the kernel has run on."""
    return mx.device_info().get("compute_capability_major") == _HOPPER


def _shape_of(model: Transformer, blocks: Sequence[Block], max_context: int) -> DecoderShape:
    spec, first = model.spec, blocks[0]
    return DecoderShape(
        layers=len(blocks),
        width=spec.hidden_size,
        hidden=spec.intermediate_size,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        vocabulary=spec.vocab_size,
        max_context=max_context,
        format=_format(first.qkv),
        eps=spec.norm.eps,
        qk_eps=(spec.qk_norm_spec or spec.norm).eps,
        scale=spec.attention_scale,
        magnitude=first.magnitude,
        residual_scale=spec.residual_scale,
        blocks=_multiprocessors(),
    )


def _format(linear: Linear) -> Format:
    q = linear.weight.quantization
    return Format(q.bits, q.group_size) if q else Format(16)


def _kernel(shape: KernelShape) -> Kernel:
    layers = range(shape.decoder.layers)
    folder = files("emlxd.graph.cuda")
    pointers = [
        f"{name}[{i}] = const_cast<__nv_bfloat16*>({name}_{i});"
        for name in ("keys", "values")
        for i in layers
    ]
    body = (folder / "decode.cu").read_text().replace("LIST_CACHE", " ".join(pointers))
    parts = [(folder / f"{name}.cuh").read_text() for name in _PARTS]
    header = "".join(parts) + shape.constants() + f"constexpr int LAYERS = {len(layers)};\n"
    # MLX keeps compiled kernels by name, for the whole process.
    name = f"emlxd_decode_{hashlib.sha256((header + body).encode()).hexdigest()[:16]}"
    # It writes the signature itself: the number of threads, which decides on registers, slips in by a macro.
    function = f"custom_kernel_{name}"
    kernel: Any = mx.fast.cuda_kernel(
        name=name,
        input_names=["embedded", "positions", "lengths", "extent", "table", "scratch"]
        + [f"{name}_{i}" for name in ("keys", "values") for i in layers],
        output_names=["logits"],
        source=f"#undef {function}\n{body}",
        header=f"{header}#define {function} __launch_bounds__({THREADS}, 1) {function}\n",
        ensure_row_contiguous=False,
        shared_memory=shape.shared_bytes,
    )
    return cast("Kernel", kernel)


def _multiprocessors() -> int:
    driver = ctypes.CDLL("libcuda.so.1")
    count, device = ctypes.c_int(), ctypes.c_int()
    calls = (
        driver.cuInit(0),
        driver.cuDeviceGet(ctypes.byref(device), 0),
        driver.cuDeviceGetAttribute(ctypes.byref(count), _MULTIPROCESSORS, device),
    )
    if any(calls):
        raise RuntimeError("the CUDA driver does not say how many multiprocessors the device has")
    return count.value
