"""The decode kernel alone, on random weights: milliseconds from one step's logits to the next's.

python benchmarks/decode_kernel.py SHAPE[:BITS] ... [--rows 1,8,32] [--position 560]

Neither sampling nor the scheduler counts; ``emlxd bench --engine`` measures all of it. It takes a GPU that
the kernel runs on.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import mlx.core as mx

from emlxd.graph.checkpoint import open_checkpoint
from emlxd.graph.cuda.fused_decoder import FusedDecoder
from emlxd.graph.device import Device
from emlxd.graph.kv_cache import empty_layers
from emlxd.graph.loader import load_transformer
from emlxd.graph.random_model import SHAPES, copy_bandwidth, write_model
from emlxd.graph.transformer import Transformer

CONTEXT = 1024
STEPS = 20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shapes", nargs="+", metavar="SHAPE[:BITS]", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--rows", default="1,8,32", help="sequences that decode together (default: 1,8,32)")
    parser.add_argument("--position", type=int, default=560, help="how long they are (default: 560)")
    options = parser.parse_args()
    bandwidth, device = copy_bandwidth(), Device("cuda")
    for name in options.shapes:
        shape, _, bits = name.partition(":")
        with tempfile.TemporaryDirectory() as folder:
            write_model(Path(folder), shape, int(bits) if bits else None)
            model = load_transformer(open_checkpoint(Path(folder)), device, max_context=CONTEXT)
        rows = [int(one) for one in options.rows.split(",")]
        fused = device.fused_decoder(model, slots=max(rows), max_context=CONTEXT)
        if fused is None:
            sys.exit(f"{name}: no kernel for this model or this device")
        for count in rows:
            seconds = _step(fused, model, count, options.position)
            share = model.bytes_read(count) / bandwidth / seconds
            print(f"{name}, {count} rows: {seconds * 1000:.3f} ms, {share:.0%} of the ceiling", flush=True)


def _step(fused: FusedDecoder, model: Transformer, rows: int, position: int) -> float:
    """Seconds: the best of five times ``STEPS``, which are dispatched one after the other."""
    kept = empty_layers(model.spec, rows, CONTEXT, model.dtype)
    tokens, lengths = mx.zeros((rows,), mx.int32), mx.ones((rows,), mx.int32)
    positions = mx.full((rows,), position, dtype=mx.int32)
    mx.eval(kept, tokens, lengths, positions)
    best = float("inf")
    for _ in range(6):  # the first time is for warming up
        started = time.perf_counter()
        for _ in range(STEPS):
            logits = fused.logits(tokens, positions, lengths, CONTEXT, kept)
            mx.async_eval(logits)
        mx.eval(logits)
        best = min(best, (time.perf_counter() - started) / STEPS)
    return best


if __name__ == "__main__":
    main()
