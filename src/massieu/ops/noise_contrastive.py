"""Binary noise-contrastive estimation: a density without its normaliser, learned by telling data from known noise."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.foundation.transforms import without_autocast
from massieu.ops.linear_scores import one_number, values_are_known
from massieu.ops.shapes import check_alike, working_dtype


def binary_nce(
    data_log_density: Float[Tensor, "*data"],
    data_log_noise: Float[Tensor, "*data"],
    noise_log_density: Float[Tensor, "*noise"],
    noise_log_noise: Float[Tensor, "*noise"],
    *,
    log_partition: float | Float[Tensor, ""] = 0.0,
) -> Float[Tensor, ""]:
    """The loss of binary noise-contrastive estimation: cross-entropy of telling data from noise, in nats per datum.

    With ν noise samples a datum the logit of "x is a datum" is G(x) = log f(x) − c − log n(x) − log ν. Here f is the
    model's density without its normaliser, n the noise's with it, and c the log-normaliser, which is learned as any other
    parameter. The loss is mean_data −log σ(G) + ν·mean_noise −log σ(−G) (Gutmann and Hyvärinen 2010, equation 3). Its
    minimiser is the data's density: at it c is log ∫ f. Its gradient tends to the likelihood's as ν grows.

    Args:
        data_log_density, data_log_noise: log f and log n at the data, of one shape.
        noise_log_density, noise_log_noise: the same at draws from the noise, of one shape, such as (B, ν). ν is their
            number over that of the data, a whole number or not.
        log_partition: c, a number or a tensor of one, which has its gradient. It may be a part of log f instead.

    Where f is 0 (log f = −∞) a draw of noise adds 0, and a datum makes the loss +∞; where n is 0 a datum adds 0. Results
    are float64 for float64 and float32 for every other dtype, under autocast too. Differentiable any number of times.

    Raises:
        TypeError: not a tensor, not floating-point, dtypes that differ.
        ValueError: shapes or devices that do not fit, no datum or no noise, a log-normaliser that is not finite; on the
            CPU a log-density of +∞, and noise where its own density is 0.

    Example:
        >>> import torch
        >>> from massieu import ops
        >>> one = torch.zeros(3)  # a model that equals its noise guesses: −log ½ for a datum, the same for its noise
        >>> round(float(ops.binary_nce(one, one, one, one) / torch.tensor(2.0).log()), 3)
        2.0
    """
    check_alike(
        data_log_density=data_log_density,
        data_log_noise=data_log_noise,
        noise_log_density=noise_log_density,
        noise_log_noise=noise_log_noise,
    )
    _check("data", data_log_density, data_log_noise)
    _check("noise", noise_log_density, noise_log_noise)
    if values_are_known(noise_log_noise) and bool((noise_log_noise == -torch.inf).any()):
        raise ValueError("noise_log_noise must be above −inf: the noise has no draw where its density is 0")
    dtype = working_dtype(data_log_density)
    level = one_number("log_partition", log_partition, dtype, data_log_density=data_log_density)
    count = data_log_density.numel()
    log_ratio = math.log(noise_log_density.numel() / count)

    def logit(log_density: Tensor, log_noise: Tensor) -> Tensor:
        """G: log-odds that a point is a datum."""
        return log_density.to(dtype) - level - log_noise.to(dtype) - log_ratio

    with without_autocast(data_log_density.device):
        data_logit = logit(data_log_density, data_log_noise)
        noise_logit = logit(noise_log_density, noise_log_noise)
        return (_minus_log_sigmoid(data_logit).sum() + _minus_log_sigmoid(-noise_logit).sum()) / count


def _minus_log_sigmoid(logit: Tensor) -> Tensor:
    """−log σ(logit), with the digits of every derivative.

    PyTorch's softplus is linear beyond a threshold, which float64 notices; its logsigmoid has the second derivative
    σ·(σ − 1), of which nothing is left where σ rounds to 1. Each branch has a finite argument where the other is taken.
    """
    is_positive = logit > 0
    of_positive = torch.exp(-logit.where(is_positive, 0.0)).log1p()
    negative = logit.where(~is_positive, 0.0)
    return torch.where(is_positive, of_positive, negative.exp().log1p() - negative)


def _check(name: str, log_density: Tensor, log_noise: Tensor) -> None:
    """Check both log-densities of the data or of the noise, by the beginning of their names."""
    tensors = {f"{name}_log_density": log_density, f"{name}_log_noise": log_noise}
    for argument, tensor in tensors.items():
        if tensor.numel() == 0:
            raise ValueError(f"{argument} must have at least one number, got shape {tuple(tensor.shape)}")
        if values_are_known(tensor) and bool((tensor == torch.inf).any()):
            raise ValueError(f"{argument} must be below +inf, got +inf among its numbers")
    if log_density.shape != log_noise.shape:
        raise ValueError(
            f"{' and '.join(tensors)} must have one shape, got {tuple(log_density.shape)} and {tuple(log_noise.shape)}"
        )
