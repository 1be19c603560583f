"""``mx.fast.cuda_kernel`` on a CPU, for the decode kernel: compiled by g++, on the arrays where they lie."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np

AVAILABLE: Final = sys.platform == "linux" and shutil.which("g++") is not None
HERE: Final = Path(__file__).parent
PTX: Final = (files("emlxd.graph.cuda") / "ptx.cuh").read_text()
SHARED: Final = "extern __shared__ __align__(16) unsigned char shared[];"
TYPES: Final = {
    mx.bfloat16: "__nv_bfloat16",
    mx.float32: "float",
    mx.int32: "int",
    mx.uint64: "unsigned long long",
    mx.uint8: "unsigned char",
}

FRAME: Final = """
#include "device.h"
{header}
static void** arguments;
static unsigned long long shared_bytes;
static void kernel() {{
  unsigned char* const shared = cpu::shared_memory(shared_bytes);
{parameters}
{body}
}}
extern "C" void run(unsigned blocks, unsigned threads, unsigned long long bytes, void** given) {{
  arguments = given;
  shared_bytes = bytes;
  cpu::launch(blocks, threads, kernel);
}}
"""


def cuda_kernel(
    *,
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    shared_memory: int = 0,
) -> Callable[..., list[mx.array]]:
    """As MLX's."""

    def run(
        *,
        inputs: Sequence[mx.array],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]:
        mx.eval(inputs)
        types = [f"const {TYPES[array.dtype]}*" for array in inputs]
        types += [f"{TYPES[dtype]}*" for dtype in output_dtypes]
        parameters = [
            f"  const auto {name} = static_cast<{type}>(arguments[{place}]);"
            for place, (name, type) in enumerate(zip([*input_names, *output_names], types, strict=True))
        ]
        body = source.replace(SHARED, "")
        text = FRAME.format(header=header.replace(PTX, ""), parameters="\n".join(parameters), body=body)
        made = [mx.zeros(*each) for each in zip(output_shapes, output_dtypes, strict=True)]
        given = (ctypes.c_void_p * len(types))(*map(address, [*inputs, *made]))
        _compiled(text).run(
            grid[0] // threadgroup[0], threadgroup[0], ctypes.c_ulonglong(shared_memory), given
        )
        return made

    return run


def address(array: mx.array) -> int:
    """Where it lies, as long as it is there."""
    mx.eval(array)
    as_bytes = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}[array.dtype.size]
    return np.asarray(memoryview(array.view(as_bytes))).ctypes.data  # type: ignore[arg-type]


def addresses(arrays: Sequence[mx.array | None]) -> list[int]:
    """In place of ``table._addresses``."""
    return [0 if array is None else address(array) for array in arrays]


@cache
def _compiled(text: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
        source.write_text(text)
        options = ["-std=c++20", "-O2", "-shared", "-fPIC", "-pthread", "-w", "-U_FORTIFY_SOURCE"]
        subprocess.run(["g++", *options, f"-I{HERE}", str(source), "-o", str(library)], check=True)
        return ctypes.CDLL(str(library))  # which is still there when its file is gone
