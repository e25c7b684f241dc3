"""Norms of weights and of gradients, layer by layer, for those who plot them."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from massieu.probing.monitor.norms import euclidean_norm, gradient_norm

OUTSIDE = "outside_layers"
"""The name of what is in no layer: embeddings, the last normalisation, the readout."""


class LayerNorms:
    """Euclidean norms of each layer's weights, and of its gradients as an optimiser's step begins.

    A weight that layers share counts in the first of them.

    Args:
        layers: the name of each block's layer in records, by the name of the block's module.
    """

    def __init__(self, model: nn.Module, layers: Mapping[str, str]) -> None:
        self.model = model
        self.layers = layers
        self._gradient_norms: dict[int, dict[str, float]] = {}  # by optimiser, then by layer

    def parameters(self) -> dict[str, list[Tensor]]:
        """The parameters of each layer. They are looked up anew, since sharding and adapters put others in their place."""
        parameters: dict[str, list[Tensor]] = defaultdict(list)
        for name, parameter in self.model.named_parameters():
            parameters[self._layer_of(name)].append(parameter)
        return parameters

    def _layer_of(self, parameter_name: str) -> str:
        blocks = [block for block in self.layers if not block or parameter_name.startswith(f"{block}.")]
        if not blocks:
            return OUTSIDE
        # Blocks may lie within one another: the innermost counts.
        return self.layers[max(blocks, key=len)]

    @property
    def is_empty(self) -> bool:
        """Whether no gradients were taken since the latest record."""
        return not self._gradient_norms

    def take(self, trained: Iterable[Tensor], key: int = 0) -> None:
        """Keep the norms of the gradients that these parameters have now.

        Args:
            key: ``id`` of the optimiser that trains them. Several have a norm together; the latest of one optimiser counts.
        """
        trained_parameters = set(trained)
        norms: dict[str, float] = {}
        for layer, parameters in self.parameters().items():
            norm = gradient_norm(parameter for parameter in parameters if parameter in trained_parameters)
            if norm is not None:
                norms[layer] = norm
        self._gradient_norms[key] = norms

    def clear(self) -> None:
        """Forget the gradients."""
        self._gradient_norms.clear()

    def of_gradients(self, before_clipping: float | None) -> dict[str, float]:
        """Norms of the gradients that were taken since the latest call, by name.

        Args:
            before_clipping: the norm of all gradients before they were clipped by it. Clipping has multiplied all of them by
                one factor, which is undone.
        """
        norms_of_optimizers = list(self._gradient_norms.values())
        self.clear()
        norms: dict[str, float] = {}
        for layer in dict.fromkeys(layer for each in norms_of_optimizers for layer in each):
            norms[layer] = math.hypot(*(each[layer] for each in norms_of_optimizers if layer in each))
        whole = math.hypot(*norms.values())
        factor = before_clipping / whole if before_clipping is not None and whole > 0 else 1.0
        return {f"{layer}/gradient_norm": factor * norm for layer, norm in norms.items()}

    def of_weights(self) -> dict[str, float]:
        """Norms of the weights of each layer, and of the model, by name."""
        norms: dict[str, float] = {}
        for layer, parameters in self.parameters().items():
            norm = euclidean_norm(parameters)
            if norm is not None:
                norms[layer] = norm
        named = {f"{layer}/weight_norm": norm for layer, norm in norms.items()}
        named["weight_norm"] = math.hypot(*norms.values())
        return named
