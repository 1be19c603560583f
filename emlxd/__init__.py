"""emlxd: a daemon that serves language models on Apple's MLX."""
