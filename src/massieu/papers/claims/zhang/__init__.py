"""Claims of Zhang et al., An Analysis of Attention via the Lens of Exchangeability and Latent Variable Models: Z1 to Z14."""
