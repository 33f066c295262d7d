"""What algorithms with clients of a server share: local steps, capacity classes, blocks and slices of models."""
