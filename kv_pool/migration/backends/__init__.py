"""Ways to get at the blocks of another node; `transfer_backend` says what each of them promises."""
