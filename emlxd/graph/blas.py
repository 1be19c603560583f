"""Gives MLX's CPU backend on Linux a fast BLAS in place of the reference one that its wheel links.

Works only before ``mlx.core`` is imported: a library loaded RTLD_GLOBAL by then supplies the symbols
that MLX looks up. ``blas.c`` is that library, on top of an OpenBLAS; it is compiled once per machine,
as MLX compiles its own graphs on a CPU. ``EMLXD_BLAS`` chooses: ``off``, ``pypi``, ``system``, or the
path of a CBLAS library.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SOURCE: Final = Path(__file__).with_name("blas.c")
SYSTEM_LIBRARY: Final = "libopenblas.so.0"
# Optimised for this machine, so the key of the compiled file holds the machine's features too.
FLAGS: Final = ("-O3", "-march=native", "-shared", "-fPIC", "-pthread")
COMPILE_TIMEOUT: Final = 120  # seconds

INSTALL_BLAS: Final = (
    "Matrix products run on MLX's slow reference BLAS: "
    "install scipy-openblas32 (pip install 'emlxd[cpu]') or the system's libopenblas0."
)


@dataclass(frozen=True, slots=True)
class Blas:
    """What MLX multiplies with. ``library`` is None for its own; ``hint`` says how to get a faster one."""

    library: str | None = None
    narrow: bool = False
    hint: str | None = None


def load() -> Blas:
    """Load the best BLAS of this machine for MLX. Never raises; a second call changes nothing."""
    choice = os.environ.get("EMLXD_BLAS", "")
    if choice == "off" or not _mlx_uses_blas():
        return Blas()
    if "mlx.core" in sys.modules and not _loaded():
        return Blas(hint="mlx was imported before emlxd.graph, so it keeps its slow reference BLAS.")
    problems = []
    try:
        shim = _compiled(cache_folder())
    except (OSError, subprocess.SubprocessError) as error:
        shim = None
        fast = f"for faster matrix products ({_reason(error)})."
        if isinstance(error, OSError) and _compiler():
            problems.append(f"Set EMLXD_CACHE to a folder that can be written, {fast}")
        else:
            problems.append(f"Install a C compiler {fast}")
    for name in _candidates(choice):
        try:
            library = ctypes.CDLL(name, mode=os.RTLD_LOCAL if shim else os.RTLD_GLOBAL)
            if shim:
                _start(shim, library)
            elif not hasattr(library, "cblas_sgemm"):
                raise OSError(f"{name} needs a C compiler")
            return Blas(name, shim is not None, " ".join(problems) or None)
        except (OSError, AttributeError) as error:
            if choice:
                problems.append(f"EMLXD_BLAS={choice}: {_reason(error)}.")
    return Blas(hint=" ".join((*problems, INSTALL_BLAS)))


@contextmanager
def one_thread_each() -> Iterator[None]:
    """While it is open, each matrix product is computed on the thread of its stream, and not shared out."""
    share = getattr(ctypes.CDLL(None), "emlxd_blas_share", lambda _: None)
    share(0)
    try:
        yield
    finally:
        share(1)


def cache_folder() -> Path:
    return Path(os.environ.get("EMLXD_CACHE") or "~/.cache/emlxd").expanduser() / "blas"


def _mlx_uses_blas() -> bool:
    """Whether the installed MLX is its CPU build for Linux. Elsewhere it brings what it needs."""
    if sys.platform != "linux":
        return False
    try:
        importlib.metadata.distribution("mlx-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _loaded() -> bool:
    """Whether a library in reach of later imports has the symbols already."""
    return hasattr(ctypes.CDLL(None), "cblas_sgemm")


def _candidates(choice: str) -> list[str]:
    """The libraries to try, best first. A wheel's OpenBLAS is years newer than most systems' own."""
    if choice not in ("", "pypi", "system"):
        return [choice]
    found = []
    package = importlib.util.find_spec("scipy_openblas32")
    if package is not None and choice != "system":
        folders = [Path(folder) / "lib" for folder in package.submodule_search_locations or []]
        found += [str(path) for folder in folders for path in sorted(folder.glob("libscipy_openblas*.so"))]
    if choice != "pypi":
        found.append(SYSTEM_LIBRARY)
    return found


def _start(shim: Path, library: ctypes.CDLL) -> None:
    """Load the shim for MLX to find, calling ``library``. AttributeError if that is no CBLAS."""
    prefix = "scipy_" if hasattr(library, "scipy_cblas_sgemm") else ""
    functions = [
        ctypes.cast(getattr(library, f"{prefix}cblas_{kind}gemm"), ctypes.c_void_p) for kind in "sdc"
    ]
    if hasattr(library, f"{prefix}openblas_set_num_threads"):
        getattr(library, f"{prefix}openblas_set_num_threads")(1)  # blas.c shares the work out
    ctypes.CDLL(str(shim), mode=os.RTLD_GLOBAL).emlxd_blas_start(*functions, threads())


def threads() -> int:
    """How many threads share a product."""
    wanted = os.environ.get("OPENBLAS_NUM_THREADS", "") or os.environ.get("OMP_NUM_THREADS", "")
    return int(wanted) if wanted.isdecimal() else len(os.sched_getaffinity(0))


def _compiled(folder: Path) -> Path:
    """The shim as a shared library in ``folder``, compiled if need be. Raises OSError, SubprocessError."""
    key = hashlib.sha256(SOURCE.read_bytes() + " ".join(FLAGS).encode() + _cpu_features())
    target = folder / f"blas-{key.hexdigest()[:16]}.so"
    if target.exists():
        return target
    compiler = _compiler()
    if compiler is None:
        raise FileNotFoundError("none of cc, gcc and clang is there")
    folder.mkdir(parents=True, exist_ok=True)
    # Starts at the same time each compile their own and put it in place whole.
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / target.name
        command = [compiler, *FLAGS, "-o", str(made), str(SOURCE)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_TIMEOUT)
        made.replace(target)
    return target


def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


def _cpu_features() -> bytes:
    lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    return b"\n".join(
        sorted({line for line in lines if line.startswith((b"model name", b"flags", b"Features"))})
    )


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines: list[str] = error.stderr.strip().splitlines()
        return lines[-1] if lines else f"the compiler failed with status {error.returncode}"
    return str(error)
