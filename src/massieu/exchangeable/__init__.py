"""Exchangeable tokens: their latent posterior, the conditional mean that attention estimates, and what transfers.

Tokens that may be permuted are draws from a law that depends on a latent z (de Finetti, Z1). What they say of any label is
said by the posterior of z (Z2), whose mean is attention in conjugate families (Z3), and the conditional mean of a value given
a key is kernel ridge regression over the tokens (Z4). Zhang, Liu, Cai, Wang and Wang (arXiv 2212.14852).
"""

__all__: list[str] = []
