"""Generators of chat, agent and RAG workloads, as traces."""
