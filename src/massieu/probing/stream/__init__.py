"""The residual stream: its steps, queries replayed from it, and weights read off modules."""
