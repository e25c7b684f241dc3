"""Claims of Shim, A Probabilistic Interpretation of Transformers: S1 to S25."""
