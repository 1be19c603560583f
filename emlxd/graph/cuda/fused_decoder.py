"""Decoding on an NVIDIA GPU with one kernel a step, for decoders of the common kind.

MLX spends 5 to 10 microseconds of the host on every kernel, and a layer has twenty: small models wait for
the host, not for memory. Here a step is a lookup of the embedding, one kernel for all layers and the head,
and the sampling. ``transformer.py`` computes the same from MLX's operations, also where this does not apply.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from typing import Any, Final, cast

import mlx.core as mx
import structlog

from emlxd.graph.cuda.shape import MAX_ROWS, THREADS, TILE, DecoderShape, Format, KernelShape, places_of
from emlxd.graph.cuda.support import Block, blocks_of
from emlxd.graph.kv_cache import LayerArrays
from emlxd.graph.layers import Linear, Norm
from emlxd.graph.transformer import Transformer

log = structlog.get_logger(__name__)

LOGGED: Final = 500  # characters of a compiler's complaint
_STORE, _ADD, _GATE, _LOGITS = range(4)  # ``Phase::Kind`` of decode.cuh
_PARTS: Final = ("common", "items", "matrix", "attention", "decode")  # each uses those before it
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
        self._table = _table(model, blocks, self._shape)
        self._blocks = blocks  # holds what the table points to
        self._scratch = mx.zeros((places_of(self._shape)[1],), mx.uint8)
        self._kernels: dict[KernelShape, Kernel] = {}
        mx.eval(self._table, self._scratch)

    @staticmethod
    def of(model: Transformer, *, slots: int, max_context: int) -> FusedDecoder | None:
        """For ``model``, compiled, which takes seconds; None if the kernel does not know it or the device."""
        blocks = blocks_of(model) if _on_hopper() else None
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
                *(self._table, self._scratch, *cached),
            ],
            grid=(self._shape.blocks * THREADS, 1, 1),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[(rows, self._shape.vocabulary)],
            output_dtypes=[mx.float32],
        )
        return logits

    def takes(self, rows: int) -> bool:
        return rows <= MAX_ROWS


def _on_hopper() -> bool:
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


def _table(model: Transformer, blocks: Sequence[Block], shape: DecoderShape) -> mx.array:
    """uint64: the words of ``Layer`` for each layer and of the head's ``Phase``, as decode.cuh has them."""
    places, _ = places_of(shape)
    words = [word for block in blocks for word in _layer(block, places)]
    words += _phase(model.head, model.norm, _LOGITS, places["X"], 0)
    packed = struct.pack(f"<{len(words)}Q", *words)
    return mx.array(memoryview(packed)).view(mx.uint64)  # type: ignore[arg-type]


def _layer(block: Block, places: Mapping[str, int]) -> list[int]:
    x, qkv, attended, hidden = (places[name] for name in ("X", "QKV", "ATTENDED", "HIDDEN"))
    return [
        *_phase(block.qkv, block.attention_norm, _STORE, x, qkv),
        *_phase(block.out, None, _ADD, attended, x),
        *_phase(block.gate_up, block.mlp_norm, _GATE, x, hidden),
        *_phase(block.down, None, _ADD, hidden, x),
        *_addresses([block.qk_norm.weight if block.qk_norm else None, block.turns]),
    ]


def _phase(linear: Linear, norm: Norm | None, kind: int, source: int, target: int) -> list[int]:
    weight = linear.weight
    rows, columns = weight.shape
    # A gate's row goes with the one of the linear part, which follow all gates.
    unit_rows, apart = (TILE, rows // 2) if kind == _GATE else (2 * TILE, TILE)
    arrays = [weight.data, weight.scales, weight.biases, linear.bias, norm.weight if norm else None]
    *matrix, bias, norm_weight = _addresses(arrays)
    units = rows // (2 * TILE)
    return [*matrix, columns, units, unit_rows, apart, bias, norm_weight, kind, source, target]


def _addresses(arrays: Sequence[mx.array | None]) -> list[int]:
    """Where arrays lie in device memory, 0 for None. They stay there while they are not read by the host."""
    there = [array for array in arrays if array is not None]
    names = [f"a{i}" for i in range(len(there))]
    kinds = "".join(str(array.dtype).rpartition(".")[2] for array in there)
    body = " ".join(
        f"out[{i}] = reinterpret_cast<unsigned long long>({name});" for i, name in enumerate(names)
    )
    kernel: Any = mx.fast.cuda_kernel(
        name=f"emlxd_addresses_{hashlib.sha256((kinds + body).encode()).hexdigest()[:16]}",
        input_names=names,
        output_names=["out"],
        source=body,
        ensure_row_contiguous=False,
    )
    (out,) = kernel(
        inputs=there,
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
        output_shapes=[(len(there),)],
        output_dtypes=[mx.uint64],
    )
    found = iter(cast("list[int]", out.tolist()))
    return [0 if array is None else next(found) for array in arrays]


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
