"""Two published detectors of trouble in training, as numbers beside a monitor's record.

Both were written from descriptions of the papers, not from their code. What was filled in is said at each.
"""

from typing import Any

import torch
from torch import Tensor, nn

LEAST = 1e-12
"""Added to singular values, so that a matrix of zeros has a distribution too."""


def spectral_alignment(model: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, float]:
    """Sign diversity of each linear map's inputs along its leading right singular vector (Spectral Alignment).

    arXiv 2510.04202: while training goes well, inputs of a layer have alignments of both signs with the leading singular
    vector of its weights; before a loss explodes, all have one sign. Reconstructed: the diversity is
    1 − \\|mean of the signs\\|, over all tokens of the fixed batch, 1 where signs are even and 0 where all agree; every
    linear layer with at least eight inputs is looked at.
    """
    numbers: dict[str, float] = {}
    leading = {
        name: torch.linalg.svd(module.weight.float(), full_matrices=False).Vh[0]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module.in_features >= 8 and bool(module.weight.isfinite().all())
    }

    def look(name: str) -> Any:
        def hook(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            signs = (arguments[0].float() @ leading[name]).sign()
            numbers[f"alignment/{name}"] = 1 - abs(float(signs.mean()))

        return hook

    hooks = [model.get_submodule(name).register_forward_pre_hook(look(name)) for name in leading]
    try:
        model(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return numbers


def spectral_entropy(model: nn.Module, heads: int) -> dict[str, float]:
    """Entropy of the singular values of each head's query-key bilinear form, in nats.

    arXiv 2606.28116. Reconstructed: the form of a head is B = W_qᵀ W_k (d × d, of rank at most d/H); the distribution is
    that of its squared singular values divided by their sum.
    """
    numbers: dict[str, float] = {}
    for name, module in model.named_modules():
        query, key = getattr(module, "query", None), getattr(module, "key", None)
        if not isinstance(query, nn.Linear) or not isinstance(key, nn.Linear):
            continue
        # The singular values of W_qᵀ W_k are those of R_q R_kᵀ, with R of the QR decompositions of the transposed weights.
        factors = [linear.weight.float().unflatten(0, (heads, -1)).mT for linear in (query, key)]
        if not all(bool(factor.isfinite().all()) for factor in factors):
            continue
        small = torch.linalg.qr(factors[0]).R @ torch.linalg.qr(factors[1]).R.mT
        power = torch.linalg.svdvals(small).square() + LEAST
        shares = power / power.sum(-1, keepdim=True)
        for head, value in enumerate(torch.special.entr(shares).sum(-1).tolist()):
            numbers[f"bilinear/{name}/head{head}"] = value
    return numbers
