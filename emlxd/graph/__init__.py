"""The only modules that import MLX. Importing any of them first gives MLX a fast BLAS where it needs one."""

from typing import Final

from emlxd.graph import blas

BLAS: Final = blas.load()
