"""``python -m emlxd`` is the command line."""

from emlxd.cli import main

main()
