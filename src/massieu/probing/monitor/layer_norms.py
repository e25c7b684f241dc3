"""Norms of weights and of gradients, layer by layer, for those who plot them."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from massieu.probing.monitor.training import euclidean_norm, gradient_norm

OUTSIDE = "outside_layers"
"""The name of what is in no layer: embeddings, the last normalisation, the readout."""


class LayerNorms:
    """Euclidean norms of each layer's weights, and of its gradients as an optimiser's step begins.

    A weight that layers share counts in the first of them.

    Args:
        layers: the name of each block's layer in records, by the name of the block's module.
    """

    def __init__(self, model: nn.Module, layers: Mapping[str, str]) -> None:
        self.model, self.layers = model, layers
        self._taken: dict[int, dict[str, float]] = {}

    def parameters(self) -> dict[str, list[Tensor]]:
        """The parameters of each layer. They are looked up anew, since sharding and adapters put others in their place."""
        groups: dict[str, list[Tensor]] = defaultdict(list)
        for name, parameter in self.model.named_parameters():
            # Blocks may lie within one another: the innermost counts.
            blocks = [block for block in self.layers if not block or name.startswith(f"{block}.")]
            groups[self.layers[max(blocks, key=len)] if blocks else OUTSIDE].append(parameter)
        return groups

    @property
    def is_empty(self) -> bool:
        """Whether no gradients were taken since the latest record."""
        return not self._taken

    def take(self, trained: Iterable[Tensor], key: int = 0) -> None:
        """Keep the norms of the gradients that these parameters have now.

        Args:
            key: ``id`` of the optimiser that trains them. Several have a norm together; the latest of one optimiser counts.
        """
        chosen = set(trained)
        found = {
            layer: gradient_norm(parameter for parameter in parameters if parameter in chosen)
            for layer, parameters in self.parameters().items()
        }
        self._taken[key] = {layer: norm for layer, norm in found.items() if norm is not None}

    def clear(self) -> None:
        """Forget the gradients."""
        self._taken.clear()

    def of_gradients(self, before_clipping: float | None) -> dict[str, float]:
        """By name, what was taken since the latest call.

        Args:
            before_clipping: the norm of all gradients before they were clipped by it. Clipping has multiplied all of them by
                one factor, which is undone.
        """
        taken = list(self._taken.values())
        self.clear()
        layers = dict.fromkeys(layer for norms in taken for layer in norms)
        norms = {layer: math.hypot(*(each[layer] for each in taken if layer in each)) for layer in layers}
        whole = math.hypot(*norms.values())
        factor = before_clipping / whole if before_clipping is not None and whole > 0 else 1.0
        return {f"{layer}/gradient_norm": factor * norm for layer, norm in norms.items()}

    def of_weights(self) -> dict[str, float]:
        """By name, of each layer and of the model."""
        found = {layer: euclidean_norm(parameters) for layer, parameters in self.parameters().items()}
        norms = {layer: norm for layer, norm in found.items() if norm is not None}
        return {
            **{f"{layer}/weight_norm": norm for layer, norm in norms.items()},
            "weight_norm": math.hypot(*norms.values()),
        }
