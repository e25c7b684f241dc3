"""Random calls of every kernel of `massieu.ops`, held against float64 on explicit matrices: `scripts/fuzz_ops.py`."""
