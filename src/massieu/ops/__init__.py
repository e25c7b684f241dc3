"""Attention's log-partition at hardware speed: plain functions on tensors.

- `attention`: output and log Z, differentiable in both;
- `log_partition`: log Z alone;
- `fisher_vp`: the covariance of the keys under the weights of each query, times a vector;
- `attention_moments`: what the weights of each query look like: entropy, largest weight, moments of the scores;
- `token_statistics`: log-probability, entropy and rank of each token under a vocabulary;
- `attention_received`: how much of the attention of all queries each key receives;
- `token_divergence`: KL of two models at each token, both ways;
- `linear_cross_entropy`, `info_nce`, `n_pairs`, `nca`: vocabulary, contrastive and metric losses as log Z − score;
- `binary_nce`: densities without their normaliser, learned beside known noise;
- `Documents`: where the documents of a packed row begin and end;
- `Partial`, `streaming`, `sharded`: results over blocks of keys, merged exactly; keys on disk, or on many processes;
- `random_feature_log_partition`, `resample_attention`: estimates of log Z and of attention, with their errors.
"""

from massieu.ops import sharded, streaming
from massieu.ops.attention import attention, log_partition
from massieu.ops.contrastive import FalseNegatives, info_nce, n_pairs, nca
from massieu.ops.documents import Documents
from massieu.ops.fisher import fisher_vp
from massieu.ops.moments import attention_moments, moments_backend
from massieu.ops.noise_contrastive import binary_nce
from massieu.ops.partial import Partial
from massieu.ops.random_features import random_feature_log_partition
from massieu.ops.received import attention_received
from massieu.ops.resampling import resample_attention
from massieu.ops.store import AtomBlock, AtomStore
from massieu.ops.token_divergence import token_divergence
from massieu.ops.token_statistics import token_statistics
from massieu.ops.vocabulary import linear_cross_entropy

__all__ = [
    "AtomBlock",
    "AtomStore",
    "Documents",
    "FalseNegatives",
    "Partial",
    "attention",
    "attention_moments",
    "attention_received",
    "binary_nce",
    "fisher_vp",
    "info_nce",
    "linear_cross_entropy",
    "log_partition",
    "moments_backend",
    "n_pairs",
    "nca",
    "random_feature_log_partition",
    "resample_attention",
    "sharded",
    "streaming",
    "token_divergence",
    "token_statistics",
]


def __dir__() -> list[str]:
    return __all__
