"""`python -m kv_pool`: the same as the command `kv-pool`, for environments whose scripts are not on PATH."""

from kv_pool.cli.main import main

main()
