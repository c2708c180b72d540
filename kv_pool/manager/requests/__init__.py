"""What is scheduled: a request's tokens and the hashes of its blocks, its state as bytes, its checks."""
