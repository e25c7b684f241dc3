"""Claims of Bal, Transformer Attention as an Implicit Mixture of Effective Energy-Based Models: B1 to B22."""
