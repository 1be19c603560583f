"""MLX gets its fast BLAS if ``emlxd.graph`` is imported first, whichever test comes first."""

import emlxd.graph  # noqa: F401
