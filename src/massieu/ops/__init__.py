"""Attention's log-partition at hardware speed: plain functions on tensors.

- `attention`: output and log Z, differentiable in both;
- `log_partition`: log Z alone;
- `fisher_vp`: the covariance of the keys under the weights of each query, times a vector;
- `attention_moments`: what the weights of each query look like: entropy, largest weight, moments of the scores.
"""

from massieu.ops.attention import Attention, attention, log_partition
from massieu.ops.fisher import fisher_vp
from massieu.ops.moments import Moments, attention_moments, moments_backend

__all__ = [
    "Attention",
    "Moments",
    "attention",
    "attention_moments",
    "fisher_vp",
    "log_partition",
    "moments_backend",
]
