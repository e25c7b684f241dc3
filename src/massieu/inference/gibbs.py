"""Block Gibbs sampling of two groups of units, and contrastive divergence.

Given one group, the units of the other are independent: `sample_hidden(visible, generator)` and
`sample_visible(hidden, generator)` draw them exactly. Chains are the leading dimensions of what these take and return.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.foundation.arguments import check_values, floating, of_class, whole_number
from massieu.foundation.doors import count, door, function

Conditional = Callable[[Tensor, torch.Generator | None], Tensor]


class GibbsState(NamedTuple):
    """Both groups of every chain; `hidden` was drawn given `visible`."""

    visible: Float[Tensor, "*chains V"]
    hidden: Float[Tensor, "*chains H"]


@door(visible=floating)
def gibbs_init(
    visible: Float[Tensor, "*chains V"], sample_hidden: Conditional, generator: torch.Generator | None = None
) -> GibbsState:
    """Start Gibbs chains at `visible`, with hidden units drawn given it.

    Example:
        >>> import torch
        >>> from massieu.inference import gibbs_init
        >>> gibbs_init(torch.ones(2, 3), lambda visible, generator: visible.sum(-1, keepdim=True)).hidden.tolist()
        [[3.0], [3.0]]
    """
    return GibbsState(visible, _drawn("sample_hidden", sample_hidden, visible, generator))


@door(state=partial(of_class, kind="GibbsState"), steps=count)
@torch.no_grad()
def gibbs_step(
    state: GibbsState,
    sample_visible: Conditional,
    sample_hidden: Conditional,
    generator: torch.Generator | None = None,
    *,
    steps: int = 1,
) -> GibbsState:
    """Block Gibbs sampling, `steps` sweeps: visible units given the hidden ones, then hidden given visible (B8).

    The joint law that has these two conditionals is invariant; the chain of the visible units alone is reversible.

    Raises:
        TypeError, ValueError: `steps` is not a positive whole number.

    Example:
        >>> import torch
        >>> from massieu.inference import gibbs_init, gibbs_step
        >>> flip, same = (
        ...     lambda h, generator: -h,
        ...     lambda v, generator: v,
        ... )  # deterministic: three flips
        >>> gibbs_step(gibbs_init(torch.ones(1, 2), same), flip, same, steps=3).visible.tolist()
        [[-1.0, -1.0]]
    """
    visible = state.visible
    hidden = state.hidden
    for _ in range(whole_number("steps", steps, least=1)):
        visible = _drawn("sample_visible", sample_visible, hidden, generator)
        hidden = _drawn("sample_hidden", sample_hidden, visible, generator)
    return GibbsState(visible, hidden)


def _drawn(name: str, law: Conditional, others: Tensor, generator: torch.Generator | None) -> Tensor:
    """A draw of one group's units given the others'; a TypeError if the law of that name returns no floating-point tensor."""
    return floating(f"{name}(units, generator)", law(others, generator))


@door(energy=function)
def contrastive_divergence(
    energy: Callable[[Tensor], Tensor], data: Float[Tensor, "*items V"], sample: Float[Tensor, "*chains V"]
) -> Float[Tensor, ""]:
    """Contrastive-divergence loss mean E(data) − mean E(sample): the gradient of −log-likelihood if `sample` is the model's.

    With samples `k` sweeps away from the data it is CD-k, biased; with chains that are kept from one update to the next,
    persistent contrastive divergence. With the effective energy, hidden units summed out, it is Rao–Blackwellised (B8).
    Its value means nothing: only the gradient does.

    Raises:
        ValueError: there is no item or no sample, or they are not vectors of one length.

    Example:
        >>> import torch
        >>> from massieu.inference import contrastive_divergence
        >>> field = torch.zeros(1, requires_grad=True)
        >>> contrastive_divergence(lambda v: -v @ field, torch.ones(4, 1), -torch.ones(4, 1)).backward()
        >>> field.grad.tolist()  # downhill, the field grows towards the data
        [-2.0]
    """
    for name, units in (("data", data), ("sample", sample)):
        if floating(name, units).ndim == 0:
            raise ValueError(f"{name} must be visible units of shape (*items, V), got a number")
    check_values(data=data, sample=sample)
    if data.shape[-1:] != sample.shape[-1:] or 0 in (data.numel(), sample.numel()):
        raise ValueError(
            f"data and sample must be visible units of one number, of one item or more, got shapes {tuple(data.shape)} "
            f"and {tuple(sample.shape)}"
        )
    energy_of_data = floating("energy(units)", energy(data))
    # The sample is no function of the parameters that are trained.
    energy_of_sample = floating("energy(units)", energy(sample.detach()))
    return energy_of_data.mean() - energy_of_sample.mean()
