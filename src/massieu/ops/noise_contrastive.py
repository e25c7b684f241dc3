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
    data = _checked("data", data_log_density, data_log_noise)
    noise = _checked("noise", noise_log_density, noise_log_noise)
    if values_are_known(noise_log_noise) and bool((noise_log_noise == -torch.inf).any()):
        raise ValueError("noise_log_noise must be above −inf: the noise has no draw where its density is 0")
    dtype = working_dtype(data_log_density)
    level = one_number("log_partition", log_partition, dtype, data_log_density=data_log_density)
    with without_autocast(data_log_density.device):
        count, share = data_log_density.numel(), math.log(noise_log_density.numel() / data_log_density.numel())
        told, untold = (density.to(dtype) - level - known.to(dtype) - share for density, known in (data, noise))
        return (_surprise(told).sum() + _surprise(-untold).sum()) / count


def _surprise(logit: Tensor) -> Tensor:
    """−log σ(logit), with the digits of every derivative.

    PyTorch's softplus is linear beyond a threshold, which float64 notices; its logsigmoid has the second derivative
    σ·(σ − 1), of which nothing is left where σ rounds to 1. Each branch has a finite argument where the other is taken.
    """
    likely = logit > 0
    tail = torch.exp(-logit.where(likely, 0.0)).log1p()
    unlikely = logit.where(~likely, 0.0)
    return torch.where(likely, tail, unlikely.exp().log1p() - unlikely)


def _checked(name: str, density: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """Both log-densities of data or of noise."""
    given = {f"{name}_log_density": density, f"{name}_log_noise": known}
    for one, tensor in given.items():
        if tensor.numel() == 0:
            raise ValueError(f"{one} must have at least one number, got shape {tuple(tensor.shape)}")
        if values_are_known(tensor) and bool((tensor == torch.inf).any()):
            raise ValueError(f"{one} must be below +inf, got +inf among its numbers")
    if density.shape != known.shape:
        shapes = tuple(density.shape), tuple(known.shape)
        raise ValueError(f"{' and '.join(given)} must have one shape, got {shapes[0]} and {shapes[1]}")
    return density, known
