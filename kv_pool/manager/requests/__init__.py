"""The scheduled object: a request's tokens and block hashes, its serialized state, its checks."""
