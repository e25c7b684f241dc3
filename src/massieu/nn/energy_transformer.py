"""A layer whose forward pass descends an energy of all tokens."""

from collections.abc import Iterable
from typing import Any, Literal, overload

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from massieu import energy
from massieu.energy.activations import LayerNorm
from massieu.foundation.arguments import boolean, number, whole_number
from massieu.foundation.doors import sequence
from massieu.foundation.transforms import without_autocast
from massieu.nn.activation import Activation
from massieu.nn.modules import Device, Number, Resettable, check_heads, check_input, register_number, settings

_Tokens = Float[Tensor, "*lead n embed_dim"]


class EnergyTransformer(Resettable):
    """An Energy Transformer block: gradient steps on an energy of attention between tokens and of a memory.

    x ← x − step_size·∂E/∂g with g = LayerNorm(x) (Hoover et al., arXiv 2302.07253; N1). Attention and feed-forward
    layer are gradients of the two terms of one E, `massieu.energy.TransformerEnergy`, which falls along the steps; so
    queries and keys, but no values and no output projection, and one weight matrix instead of two. Positions are the
    caller's to add to tokens or not.

    Gradients are those of the steps. Each costs one force, a closed form over fused attention in memory linear in the tokens.
    No fixed point is solved for: where a descent ends does not depend on where in its basin it began, so the tokens would get
    no gradient (B12). `energy().retrieve` has that fixed point, for analysis.

    Example:
        >>> import torch
        >>> from massieu import nn
        >>> block = nn.EnergyTransformer(8, num_heads=2, steps=3, step_size=None)
        >>> moved, energies = block(torch.randn(5, 10, 8), need_energies=True)
        >>> moved.shape, bool((energies.diff(dim=0) < 0).all())  # each of three steps goes down
        (torch.Size([5, 10, 8]), True)
    """

    scale: Tensor | float | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        hidden_size: int | None = None,
        num_memories: int | None = None,
        steps: int = 12,
        step_size: float | None = 0.1,
        scale: Number = None,
        eps: float = 1e-5,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """A block with random weights and memories.

        Args:
            embed_dim: Size of a token.
            num_heads: Number of heads.
            hidden_size: Size of a head's queries and keys; embed_dim/num_heads by default.
            num_memories: Number of memories, at least 0; 4·embed_dim by default.
            steps: Number of gradient steps, at least 1.
            step_size: Positive: the paper's α. None gives each token the largest step with which E falls for certain
                (`massieu.energy.TransformerEnergy.safe_step_size`), which is far smaller.
            scale: Inverse temperature, above 0: number, tensor or Parameter, one or one a head; hidden_size^-½ by default.
            eps: Added to the variance in the LayerNorm.
        """
        super().__init__()
        if hidden_size is None:
            check_heads(embed_dim, num_heads)
            hidden_size = embed_dim // num_heads
        if num_memories is None:
            num_memories = 4 * embed_dim
        whole_number("embed_dim", embed_dim, least=1)
        whole_number("num_heads", num_heads, least=1)
        whole_number("hidden_size", hidden_size, least=1)
        whole_number("num_memories", num_memories, least=0)
        whole_number("steps", steps, least=1)
        self.steps = steps
        self.step_size = None if step_size is None else number("step_size", step_size, above=0)
        place: dict[str, Any] = {"device": device or torch.get_default_device(), "dtype": dtype}
        register_number(self, "scale", scale, num_heads, above=0, **place)
        self.key_weight = nn.Parameter(torch.empty(num_heads, hidden_size, embed_dim, **place))
        self.query_weight = nn.Parameter(torch.empty(num_heads, hidden_size, embed_dim, **place))
        self.memories = nn.Parameter(torch.empty(num_memories, embed_dim, **place))
        with torch.device("cpu"):
            # On the CPU, so that the numbers to start from have values even if the module is made on meta.
            start = LayerNorm.create(1.0, torch.zeros(embed_dim), eps=eps)
        self.normalisation = Activation(start, **place)
        self._draw()

    def reset_parameters(self) -> None:
        """Draw weights and memories with variance 1/embed_dim; restore the normalisation and the numbers passed at creation."""
        super().reset_parameters()
        self._draw()

    def _draw(self) -> None:
        for weight in (self.key_weight, self.query_weight, self.memories):
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)

    def energy(self, key_padding_mask: Bool[Tensor, "*lead n"] | None = None) -> energy.TransformerEnergy:
        """The energy at the current parameters, trained or not. True in the mask hides a token."""
        keep = None
        if key_padding_mask is not None:
            keep = ~boolean("key_padding_mask (True hides a token)", key_padding_mask)
        return energy.TransformerEnergy.create(
            self.key_weight,
            self.query_weight,
            self.memories,
            normalisation=self.normalisation.activation(),
            scale=self.scale,
            keep=keep,
        )

    @overload
    def forward(
        self, tokens: _Tokens, key_padding_mask: Tensor | None = None, *, need_energies: Literal[False] = False
    ) -> _Tokens: ...

    @overload
    def forward(
        self, tokens: _Tokens, key_padding_mask: Tensor | None = None, *, need_energies: Literal[True]
    ) -> tuple[_Tokens, Tensor]: ...

    def forward(
        self,
        tokens: _Tokens,
        key_padding_mask: Bool[Tensor, "*lead n"] | None = None,
        *,
        need_energies: bool = False,
    ) -> _Tokens | tuple[_Tokens, Float[Tensor, "steps+1 *lead"]]:
        """The tokens after all steps, in their dtype; half precision is computed in float32.

        Args:
            tokens: The tokens x; dimensions before the tokens' are batch dimensions.
            key_padding_mask: True for padding, which is returned unchanged and which no token sees.
            need_energies: Also return E before the first step and after each, in nats/scale and at least float32.
        """
        check_input("tokens", tokens, self, or_half=True)
        with without_autocast(tokens.device):
            tokens_energy = self.energy(key_padding_mask)
            if need_energies:
                path = tokens_energy.flow(tokens, steps=self.steps, step_size=self.step_size)
                return path.states[-1].to(tokens.dtype), path.energies
            # Step by step, since `flow` computes an energy for each state as well.
            state = tokens
            for _ in range(self.steps):
                state = tokens_energy.move(state, self.step_size)
        return state.to(tokens.dtype)

    def extra_repr(self) -> str:
        num_heads, hidden_size, embed_dim = self.key_weight.shape
        sizes = f"embed_dim={embed_dim}, num_heads={num_heads}, hidden_size={hidden_size}"
        steps = f"steps={self.steps}, step_size={self.step_size}"
        parts = [sizes, f"num_memories={len(self.memories)}", steps, settings(self, "scale")]
        return ", ".join(part for part in parts if part)


class EnergyTransformerStack(Resettable):
    """Several Energy Transformer blocks in sequence, each with its own energy.

    Example:
        >>> import torch
        >>> from massieu import nn
        >>> stack = nn.EnergyTransformerStack(nn.EnergyTransformer(8, num_heads=2, steps=3) for _ in range(2))
        >>> tokens, energies = stack(torch.randn(5, 10, 8), need_energies=True)
        >>> tokens.shape, [path.shape for path in energies]  # before the first and after each of three steps
        (torch.Size([5, 10, 8]), [torch.Size([4, 5]), torch.Size([4, 5])])
    """

    def __init__(self, blocks: Iterable[EnergyTransformer]) -> None:
        """A stack of these blocks; a block that occurs several times shares its weights.

        Raises:
            ValueError: no block, or blocks for tokens of different sizes.
            TypeError: an entry that is no `EnergyTransformer`.
        """
        super().__init__()
        blocks = tuple(sequence("blocks", blocks))
        if any(not isinstance(block, EnergyTransformer) for block in blocks):
            kinds = ", ".join(sorted({type(block).__name__ for block in blocks}))
            raise TypeError(f"blocks must be EnergyTransformer modules, got {kinds}")
        self.blocks = nn.ModuleList(blocks)
        sizes = sorted({block.key_weight.shape[-1] for block in blocks})
        if len(sizes) != 1:
            raise ValueError(f"blocks must take tokens of one size, got {sizes or 'no block'}")

    @overload
    def forward(
        self, tokens: _Tokens, key_padding_mask: Tensor | None = None, *, need_energies: Literal[False] = False
    ) -> _Tokens: ...

    @overload
    def forward(
        self, tokens: _Tokens, key_padding_mask: Tensor | None = None, *, need_energies: Literal[True]
    ) -> tuple[_Tokens, list[Tensor]]: ...

    def forward(
        self,
        tokens: _Tokens,
        key_padding_mask: Bool[Tensor, "*lead n"] | None = None,
        *,
        need_energies: bool = False,
    ) -> _Tokens | tuple[_Tokens, list[Float[Tensor, "steps+1 *lead"]]]:
        """The tokens after all blocks. Arguments as for a block.

        With `need_energies`, also each block's energies, which cannot be compared between blocks.
        """
        energies = []
        for block in self.blocks:
            if need_energies:
                tokens, path = block(tokens, key_padding_mask, need_energies=True)
                energies.append(path)
            else:
                tokens = block(tokens, key_padding_mask)
        return (tokens, energies) if need_energies else tokens
