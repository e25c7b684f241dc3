"""Claims that join the papers: X1 to X10."""
