"""Shared parts of algorithms with clients of a server: local steps, capacity classes, blocks and slices of models."""
