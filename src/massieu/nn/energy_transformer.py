"""A layer whose forward pass walks down an energy of all tokens."""

import math
from collections.abc import Iterable
from typing import Literal, overload

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from massieu import energy
from massieu.nn.arguments import check_device
from massieu.nn.contraction import LayerNorm
from massieu.nn.heads import Number, register_number
from massieu.ops.shapes import without_autocast
from massieu.solve.arguments import floating

Tokens = Float[Tensor, "*lead n embed_dim"]


class EnergyTransformer(nn.Module):
    """Steps of x ← x − step_size·∂E/∂g, g = LayerNorm(x), on the energy of tokens that attend to each other and of memories.

    A block of the Energy Transformer (Hoover et al., arXiv 2302.07253; N1). Attention and feed-forward layer are gradients of
    the two terms of one E, `massieu.energy.TransformerEnergy`, which falls along the steps; so queries and keys, but no values
    and no output projection, and one weight matrix instead of two. Positions are the caller's to add to tokens or not.

    Gradients are those of the steps. Each costs one force, a closed form over fused attention in memory linear in the tokens.
    No fixed point is solved for: where a descent ends does not depend on where in its basin it began, so the tokens would get
    no gradient (B12). `energy().retrieve` has that fixed point, for analysis.
    """

    scale: Tensor | float | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        hidden_size: int | None = None,
        quantity: int | None = None,
        steps: int = 12,
        step_size: float | None = 0.1,
        scale: Number = None,
        eps: float = 1e-5,
    ) -> None:
        """A block of so many heads and memories.

        Args:
            embed_dim: Of a token.
            hidden_size: Of a head; embed_dim/num_heads by default.
            quantity: Of memories, at least 0; 4·embed_dim by default.
            steps: At least 1.
            step_size: Positive: the paper's α. With None every token's is the largest with which E falls for certain
                (`massieu.energy.EnergyTransformer.safe_step_size`): far smaller.
            scale: Inverse temperature; hidden_size^-½ by default. A number, a tensor or a Parameter, one or one a head.
            eps: Of the LayerNorm.

        Raises:
            ValueError, TypeError: numbers out of their range.
        """
        super().__init__()
        if num_heads < 1 or embed_dim < 1 or (hidden_size is None and embed_dim % num_heads):
            raise ValueError(f"embed_dim must be a positive multiple of num_heads, got {embed_dim} and {num_heads}")
        size = embed_dim // num_heads if hidden_size is None else hidden_size
        quantity = 4 * embed_dim if quantity is None else quantity
        if size < 1 or quantity < 0:
            raise ValueError(f"hidden_size must be at least 1 and quantity at least 0, got {size} and {quantity}")
        if not isinstance(steps, int) or steps < 1:
            raise ValueError(f"steps must be a whole number, at least 1, got {steps!r}")
        if step_size is not None and not 0 < step_size < math.inf:
            raise ValueError(f"step_size must be positive and finite, or None, got {step_size}")
        register_number(self, "scale", scale, num_heads)
        spread = embed_dim**-0.5
        self.key = nn.Parameter(spread * torch.randn(num_heads, size, embed_dim))
        self.query = nn.Parameter(spread * torch.randn(num_heads, size, embed_dim))
        self.memories = nn.Parameter(spread * torch.randn(quantity, embed_dim))
        self.normalisation = LayerNorm(embed_dim, eps=eps)
        self.steps, self.step_size = steps, step_size

    def energy(self, key_padding_mask: Bool[Tensor, "*lead n"] | None = None) -> energy.TransformerEnergy:
        """The energy at the current parameters: no training needed to call it.

        Raises:
            TypeError: the mask is not boolean.
        """
        if key_padding_mask is not None and (
            not isinstance(key_padding_mask, Tensor) or key_padding_mask.dtype != torch.bool
        ):
            kind = key_padding_mask.dtype if isinstance(key_padding_mask, Tensor) else type(key_padding_mask).__name__
            raise TypeError(f"key_padding_mask must be boolean (True hides a token), got {kind}")
        return energy.TransformerEnergy.create(
            self.key,
            self.query,
            self.memories,
            normalisation=self.normalisation.map(),
            scale=self.scale,
            keep=None if key_padding_mask is None else ~key_padding_mask,
        )

    @overload
    def forward(
        self, tokens: Tokens, key_padding_mask: Tensor | None = None, *, need_energies: Literal[False] = False
    ) -> Tokens: ...

    @overload
    def forward(
        self, tokens: Tokens, key_padding_mask: Tensor | None = None, *, need_energies: Literal[True]
    ) -> tuple[Tokens, Tensor]: ...

    def forward(
        self,
        tokens: Tokens,
        key_padding_mask: Bool[Tensor, "*lead n"] | None = None,
        *,
        need_energies: bool = False,
    ) -> Tokens | tuple[Tokens, Float[Tensor, "steps+1 *lead"]]:
        """The tokens after all steps, in their dtype; half precision is computed in float32.

        Args:
            tokens: x, any dimensions before the tokens'.
            key_padding_mask: True for padding, which comes out as it went in and is seen by no token.
            need_energies: Return E before the first and after every step as well, in nats/scale and at least float32.

        Raises:
            ValueError, TypeError: shapes or dtypes that do not fit.
        """
        check_device("tokens", floating("tokens", tokens), self.key)
        with without_autocast(tokens.device):
            function = self.energy(key_padding_mask)
            if need_energies:
                path = function.flow(tokens, steps=self.steps, step_size=self.step_size)
                return path.states[-1].to(tokens.dtype), path.energies
            moved = tokens
            for _ in range(self.steps):
                moved = function.move(moved, self.step_size)
        return moved.to(tokens.dtype)

    def extra_repr(self) -> str:
        heads, size, width = self.key.shape
        sizes = f"{width}, {heads}, hidden_size={size}, quantity={len(self.memories)}"
        return f"{sizes}, steps={self.steps}, step_size={self.step_size}"


class EnergyTransformerStack(nn.Module):
    """Blocks one after the other, each with an energy of its own; the tokens of one go into the next."""

    def __init__(self, blocks: Iterable[EnergyTransformer]) -> None:
        """A stack of these blocks; one of them given several times shares its weights.

        Raises:
            ValueError: no block, or blocks for tokens of different sizes.
            TypeError: something else than a block.
        """
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        if any(not isinstance(block, EnergyTransformer) for block in self.blocks):
            kinds = ", ".join(sorted({type(block).__name__ for block in self.blocks}))
            raise TypeError(f"blocks must be EnergyTransformer modules, got {kinds}")
        sizes = sorted({block.key.shape[-1] for block in self._all()})
        if len(sizes) != 1:
            raise ValueError(f"blocks must take tokens of one size, got {sizes or 'no block'}")

    def _all(self) -> list[EnergyTransformer]:
        return [block for block in self.blocks if isinstance(block, EnergyTransformer)]

    @overload
    def forward(
        self, tokens: Tokens, key_padding_mask: Tensor | None = None, *, need_energies: Literal[False] = False
    ) -> Tokens: ...

    @overload
    def forward(
        self, tokens: Tokens, key_padding_mask: Tensor | None = None, *, need_energies: Literal[True]
    ) -> tuple[Tokens, list[Tensor]]: ...

    def forward(
        self,
        tokens: Tokens,
        key_padding_mask: Bool[Tensor, "*lead n"] | None = None,
        *,
        need_energies: bool = False,
    ) -> Tokens | tuple[Tokens, list[Float[Tensor, "steps+1 *lead"]]]:
        """The tokens after all blocks. Arguments as for a block.

        With `need_energies`, also each block's energies; between blocks they do not compare.

        Raises:
            ValueError, TypeError: as a block.
        """
        energies = []
        for block in self._all():
            if need_energies:
                tokens, path = block(tokens, key_padding_mask, need_energies=True)
                energies.append(path)
            else:
                tokens = block(tokens, key_padding_mask)
        return (tokens, energies) if need_energies else tokens
