"""`python -m kv_pool`: the same as `kv-pool`, for an environment whose scripts are not on PATH."""

from kv_pool.cli.main import main

main()
