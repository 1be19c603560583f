"""The BLAS under MLX on a Linux CPU: right for every shape, and the same bits whatever the batch."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emlxd.graph import BLAS, blas
from tests.daemon import running
from tests.device import only_on_cpu

pytestmark = [
    only_on_cpu("a GPU has a BLAS of its own"),
    pytest.mark.skipif(not BLAS.narrow, reason="only MLX's CPU build for Linux, with a C compiler"),
]

ROW_MAJOR, NO_TRANS, TRANS = 101, 111, 112
PROBE = """
import dataclasses, json
from emlxd.graph import BLAS
import mlx.core as mx
y = mx.ones((64, 32)) @ mx.ones((32, 48))
print(json.dumps([dataclasses.asdict(BLAS), y[0, 0].item()]))
"""


def gemm(a, b, *, ta=False, tb=False, alpha=1.0, beta=0.0, c=None):
    """alpha * op(a) @ op(b) + beta * c by the function that MLX calls."""
    m, k = a.shape[::-1] if ta else a.shape
    n = b.shape[0] if tb else b.shape[1]
    out = np.full((m, n), np.nan, np.float32) if c is None else c.copy()
    function = ctypes.CDLL(None).cblas_sgemm
    function.argtypes = [
        *[ctypes.c_int] * 6,
        ctypes.c_float,
        *[ctypes.c_void_p, ctypes.c_int] * 2,
        ctypes.c_float,
        ctypes.c_void_p,
        ctypes.c_int,
    ]
    function.restype = None
    # A matrix of one row has no stride in NumPy's eyes, so the row length is taken from the base.
    lda, ldb = (x.strides[0] // 4 if x.shape[0] > 1 else x.shape[1] for x in (a, b))
    function(
        ROW_MAJOR, TRANS if ta else NO_TRANS, TRANS if tb else NO_TRANS, m, n, k,
        alpha, a.ctypes.data, lda, b.ctypes.data, ldb, beta, out.ctypes.data, n,
    )  # fmt: skip
    return out


def matrix(rng, rows, columns, padding=0):
    """Rows with a gap after each, as in a cache that is longer than its window."""
    return rng.standard_normal((rows, columns + padding), dtype=np.float32)[:, :columns]


@given(
    m=st.integers(1, 40),
    n=st.sampled_from([1, 3, 16, 24, 64, 200, 576]),
    k=st.sampled_from([1, 8, 16, 48, 64, 100, 576]),
    ta=st.booleans(),
    tb=st.booleans(),
    scale=st.sampled_from([(1.0, 0.0), (0.5, 0.0), (2.0, -1.5)]),
    padding=st.sampled_from([0, 5]),
)
def test_products_are_those_of_numpy(m, n, k, ta, tb, scale, padding):
    rng = np.random.default_rng(0)
    a = matrix(rng, *((k, m) if ta else (m, k)), padding)
    b = matrix(rng, *((n, k) if tb else (k, n)), padding)
    alpha, beta = scale
    c = matrix(rng, m, n)
    expected = alpha * (a.T if ta else a).astype(float) @ (b.T if tb else b) + (beta * c if beta else 0)
    got = gemm(a, b, ta=ta, tb=tb, alpha=alpha, beta=beta, c=c if beta else None)
    np.testing.assert_allclose(got, expected, atol=2e-4)


@pytest.mark.parametrize("tb", [True, False], ids=["weights", "attention values"])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(tb):
    rng = np.random.default_rng(1)
    a = matrix(rng, 16, 576)
    b = matrix(rng, 1536, 576) if tb else matrix(rng, 576, 1536)
    alone = np.concatenate([gemm(a[i : i + 1], b, tb=tb) for i in range(16)])
    for rows in (2, 3, 4, 7, 8, 16):
        np.testing.assert_array_equal(gemm(a[:rows], b, tb=tb), alone[:rows])


def test_a_longer_window_of_masked_positions_changes_no_bit():
    rng = np.random.default_rng(2)
    weights, values = np.zeros((1, 512), np.float32), matrix(rng, 512, 64)
    weights[:, :100] = rng.random((1, 100), dtype=np.float32)
    np.testing.assert_array_equal(gemm(weights[:, :128], values[:128]), gemm(weights, values))


@pytest.mark.parametrize("form", [nullcontext, blas.one_thread_each])
def test_calls_from_several_threads_at_once_do_not_mix(form):
    rng = np.random.default_rng(3)
    weights = matrix(rng, 4096, 256)
    inputs = [matrix(rng, rows, 256) for rows in (1, 4, 20, 64)]
    expected = [gemm(x, weights, tb=True) for x in inputs]

    def repeat(index):
        return [gemm(inputs[index], weights, tb=True) for _ in range(50)]

    with form(), ThreadPoolExecutor(4) as pool:
        for index, results in enumerate(pool.map(repeat, range(4))):
            for result in results:
                np.testing.assert_array_equal(result, expected[index])


def start(cache: Path, **env: str) -> subprocess.Popen[str]:
    environment = {"PATH": os.environ["PATH"], "EMLXD_CACHE": str(cache)} | env
    return subprocess.Popen(
        [sys.executable, "-c", PROBE],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def result(process: subprocess.Popen[str]) -> tuple[blas.Blas, float]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    fields, product = json.loads(out)
    return blas.Blas(**fields), product


def compile_library(folder: Path, name: str, code: str) -> Path:
    path = folder / name
    source = path.with_suffix(".c")
    source.write_text(code)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, source], check=True)
    return path


def test_starts_at_the_same_time_leave_one_whole_file(tmp_path):
    processes = [start(tmp_path) for _ in range(3)]
    for loaded, product in map(result, processes):
        assert (loaded.narrow, loaded.hint, product) == (True, None, 32)
    assert [path.suffix for path in (tmp_path / "blas").iterdir()] == [".so"]


def test_a_compiled_file_is_used_again(tmp_path):
    result(start(tmp_path))
    loaded, product = result(start(tmp_path, PATH=""))
    assert (loaded.narrow, loaded.hint, product) == (True, None, 32)


def test_mlx_multiplies_with_the_library_that_the_environment_names(tmp_path):
    code = """
    void cblas_sgemm(int o, int ta, int tb, int m, int n, int k, float al, const float *a, int lda,
                     const float *b, int ldb, float be, float *c, int ldc)
    { for (int i = 0; i < m; i++) for (int j = 0; j < n; j++) c[i * ldc + j] = 42; }
    void cblas_dgemm(void) {} void cblas_cgemm(void) {}
    """
    library = compile_library(tmp_path, "answer.so", code)
    loaded, product = result(start(tmp_path, EMLXD_BLAS=str(library)))
    assert (loaded.library, product) == (str(library), 42)


def test_off_leaves_mlx_alone(tmp_path):
    assert result(start(tmp_path, EMLXD_BLAS="off")) == (blas.Blas(), 32)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("code", [None, "int nothing;"], ids=["missing", "not a BLAS"])
def test_a_library_that_cannot_serve_is_named_and_stops_nothing(tmp_path, code):
    library = compile_library(tmp_path, "wrong.so", code) if code else tmp_path / "wrong.so"
    loaded, product = result(start(tmp_path, EMLXD_BLAS=str(library)))
    assert (loaded.library, product) == (None, 32)
    assert f"EMLXD_BLAS={library}" in loaded.hint
    assert "pip install" in loaded.hint


def test_without_a_compiler_the_hint_asks_for_one(tmp_path):
    loaded, product = result(start(tmp_path, PATH=""))
    assert (loaded.narrow, product) == (False, 32)
    assert "C compiler" in loaded.hint


def test_a_compiler_that_fails_is_quoted(tmp_path):
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'no such flag' >&2\nexit 1\n")
    compiler.chmod(0o755)
    loaded, product = result(start(tmp_path, PATH=str(tmp_path)))
    assert product == 32
    assert "no such flag" in loaded.hint


def test_a_cache_folder_that_cannot_be_made_stops_nothing(tmp_path):
    blocked = tmp_path / "file"
    blocked.touch()
    loaded, product = result(start(blocked))
    assert (loaded.narrow, product) == (False, 32)
    assert "EMLXD_CACHE" in loaded.hint and "C compiler" not in loaded.hint


def test_after_mlx_it_is_too_late_and_said_so(tmp_path):
    code = "import mlx.core\nfrom emlxd.graph import BLAS\nprint(BLAS.hint)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "imported before" in out


def test_the_daemon_says_once_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("EMLXD_BLAS", "/nowhere.so")
    with running(tmp_path, {"models": []}) as daemon:
        assert daemon.log.read_text().count("install scipy-openblas32") == 1


def test_loading_twice_is_loading_once():
    assert blas.load() == BLAS
