"""The Energy Transformer's energy: tokens that attend to each other, and memories (Hoover et al., arXiv 2302.07253; N1)."""

from typing import Self

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from massieu.energy.activations import Activation, LayerNorm
from massieu.energy.base import DescentResult, Energy, promoted
from massieu.energy.mutual import mutual_attention, mutual_log_partition
from massieu.foundation.arguments import (
    as_tensor,
    boolean,
    check_range,
    check_shape,
    expanded,
    floating,
    instance,
    number,
    whole_number,
)
from massieu.foundation.values import align, need_batch, promoted_dtype

_LEAST = 1e-6
"""A smaller curvature is taken for this: what lies above a bound is a bound."""


class TransformerEnergy(Energy):
    """The energy of an Energy Transformer: tokens that attend to each other, and a memory with relu² (Hoover et al. 2023).

    E(g) = −β⁻¹ Σ_h Σ_C log Σ_{B≠C} exp(β K_hB·Q_hC) − ½ Σ_B Σ_μ relu(ξ_μ·g_B)², K = W_K g, Q = W_Q g. A state is what a
    LayerNorm makes of n tokens, g = ∇L(x): every g_B lies in the ball of radius gain·√d about the bias, where that
    meets the hyperplane Σ(g_B − bias) = 0; elsewhere E is +inf. No token attends to itself. Tokens are keys and
    queries, so the force has a term for either part (S3), beside that of a feed-forward layer with tied weights. Tokens
    that are not kept contribute nothing, neither as keys nor as queries, whatever is in them, and stay. Memory is
    linear in tokens.

    Two ways lead down:

    - `step`, in g, to the point of the range nearest to g − ∇E/`curvature`: as ∇²E ≤ curvature everywhere, E falls by at
      least ½·curvature·‖step‖². Where it ends, `retrieve` finds, with the derivatives of a fixed point.
    - `flow`, in x, the paper's x ← x − step_size·∂E/∂g: E(∇L(x)) falls in continuous time since ∇²L ⪰ 0. A step lowers it for
      certain up to `safe_step_size`; beyond, the energies that `flow` returns tell. x itself need not come to rest.

    Use `create`. A pure function of its tensors: gradients flow to all of them.

    Attributes:
        key_weight, query_weight: W_K and W_Q, shape (H, Z, d).
        memories: ξ, shape (M, d).
        normalisation: ∇L, of one gain and a bias.
        scale: β of each head, shape (H).
        keep: Which tokens there are, shape (*batch, n), or () for all.

    Example:
        >>> import torch
        >>> from massieu.energy import TransformerEnergy
        >>> network = TransformerEnergy.create(torch.eye(3)[None], torch.eye(3)[None], torch.eye(3))
        >>> state = network.normalise(torch.tensor([[2.0, 0.0, 1.0], [0.0, 1.0, 3.0]]))
        >>> bool(network(network.step(state)) < network(state))
        True
    """

    key_weight: Float[Tensor, "H Z d"]
    query_weight: Float[Tensor, "H Z d"]
    memories: Float[Tensor, "M d"]
    normalisation: LayerNorm
    scale: Float[Tensor, "H"]
    keep: Bool[Tensor, "*batch_n"]

    @classmethod
    def create(
        cls,
        key_weight: Float[Tensor, "H Z d"],
        query_weight: Float[Tensor, "H Z d"],
        memories: Float[Tensor, "M d"],
        *,
        normalisation: Activation | None = None,
        scale: Float[Tensor, "..."] | float | None = None,
        keep: Bool[Tensor, "*batch n"] | None = None,
    ) -> Self:
        """The energy of these weights.

        Args:
            key_weight, query_weight: Of at least one head.
            memories: Any number of them, none too.
            normalisation: A LayerNorm, by default of gain 1 and bias 0.
            scale: Positive: one number, or one a head; Z^-½ by default.
            keep: True for tokens that are there, False for padding.

        Raises:
            ValueError: shapes that do not fit, or a scale that is not positive and finite.
            TypeError: weights that are not floating-point, a `keep` that is not boolean, another normalisation.
        """
        for name, weight in (("key_weight", key_weight), ("query_weight", query_weight), ("memories", memories)):
            floating(name, weight)
        if key_weight.ndim != 3 or 0 in key_weight.shape or query_weight.shape != key_weight.shape:
            shapes = f"{tuple(key_weight.shape)} and {tuple(query_weight.shape)}"
            raise ValueError(f"key_weight and query_weight must have one shape (H, Z, d) without zeros, got {shapes}")
        heads, size, width = key_weight.shape
        check_shape("memories", memories, ("M", width))
        dtype = promoted_dtype(key_weight)
        if normalisation is None:
            normalisation = LayerNorm.create(torch.ones((), dtype=dtype, device=key_weight.device))
        normalisation = instance("normalisation", normalisation, LayerNorm, "a LayerNorm")
        if normalisation.gain.ndim or normalisation.bias.shape[-1] not in (1, width):
            shapes = f"{tuple(normalisation.gain.shape)} and {tuple(normalisation.bias.shape)}"
            raise ValueError(f"normalisation must have one gain and a bias of {width} numbers, got shapes {shapes}")
        if keep is None:
            keep = torch.ones((), dtype=torch.bool, device=key_weight.device)
        elif boolean("keep (True keeps a token)", keep).ndim == 0 or keep.shape[-1] == 0:
            raise ValueError(f"keep must have shape (*batch, n) with at least one token, got {tuple(keep.shape)}")
        scale = as_tensor("scale", size**-0.5 if scale is None else scale, key_weight, dtype)
        check_range("scale", scale, above=0)
        return cls(
            key_weight, query_weight, memories, normalisation, expanded("scale", scale, (heads,), "the heads"), keep
        )

    def normalise(self, tokens: Float[Tensor, "*lead n d"]) -> Float[Tensor, "*lead n d"]:
        """g = ∇L(tokens), the state that tokens stand for, at least float32."""
        x = self._present(tokens)
        # A large common part, to which a LayerNorm is blind, would leave its rounding in Σ(g − bias).
        return self.normalisation(x - x.mean(-1, keepdim=True))

    def curvature(self, state: Float[Tensor, "*lead n d"]) -> Float[Tensor, "*lead"]:
        """A bound of ∇²E at every g: 2√(n − 1) Σ_h ‖W_K‖‖W_Q‖, n the tokens kept, spectral norms; whatever the scale.

        The memories' part is concave, and so is −β times a variance in the attention's. What is left is, along v,
        −2 Σ_BC p_BC v_Bᵀ W_Kᵀ W_Q v_C; columns of p sum to 1, its rows to at most n − 1, so ‖p‖² ≤ n − 1 (Schur).
        """
        lead, dtype = self._check(state), self._dtype(state)
        size = (
            torch.linalg.svdvals(self.key_weight.to(dtype))[..., 0]
            * torch.linalg.svdvals(self.query_weight.to(dtype))[..., 0]
        )
        keep = self._kept(state)
        others = torch.full(lead, state.shape[-2], device=state.device) if keep is None else keep.sum(-1)
        return (2 * (others - 1).clamp_min(0).to(dtype).sqrt() * size.sum()).clamp_min(_LEAST)

    def safe_step_size(self, tokens: Float[Tensor, "*lead n d"]) -> Float[Tensor, "*lead n"]:
        """√(var + eps)/(gain·curvature), one for each token: up to these, or all their least, a step of `flow` lowers E.

        With ℓ = √(d·(var + eps)), r = gain·√d and (g, s) the point of the sphere of radius r in d + 1 dimensions that tokens
        of softening s are mapped to, (x⁺ − x)·(g⁺ − g) = (ℓ⁺ + ℓ)/(2r)·‖(g⁺, s⁺) − (g, s)‖². So E falls by at least
        Σ_B ((ℓ⁺ + ℓ)/(2r·step_size) − ½·curvature)‖g_B⁺ − g_B‖²: for any step size of at most (ℓ⁺ + ℓ)/(r·curvature).
        """
        x = self._present(tokens)
        spread = (x.var(-1, correction=0) + self.normalisation.eps).sqrt()
        return spread / (self.normalisation.gain.to(x) * self.curvature(tokens).unsqueeze(-1))

    def move(
        self, tokens: Float[Tensor, "*lead n d"], step_size: Float[Tensor, "..."] | float | None = None
    ) -> Float[Tensor, "*lead n d"]:
        """x − step_size·∂E/∂g at g = ∇L(x): one step of `flow`."""
        return self._moved(tokens, step_size)[0]

    def flow(
        self,
        tokens: Float[Tensor, "*lead n d"],
        *,
        steps: int,
        step_size: Float[Tensor, "..."] | float | None = None,
    ) -> DescentResult:
        """The tokens x and energies E(∇L(x)) along `steps` steps x ← x − step_size·∂E/∂g, the start included.

        Args:
            tokens: x at the start.
            steps: How many.
            step_size: A number, or a tensor that broadcasts to one for each token; None for `safe_step_size`, found anew in
                each step.

        Raises:
            ValueError: a negative number of steps, a step size that is negative or of another shape.
            TypeError: a step size that is not floating-point.
        """
        whole_number("steps", steps, least=0)
        self._check(tokens)
        states, energies = [tokens.to(self._dtype(tokens))], []
        for _ in range(steps):
            after, energy = self._moved(states[-1], step_size)
            states.append(after)
            energies.append(energy)
        energies.append(self._level(self.normalise(states[-1])))
        return DescentResult(torch.stack(states), torch.stack(energies))

    # What an energy is made of.

    @property
    def _event_dims(self) -> int:
        return 2

    def _energy(self, state: Tensor) -> Tensor:
        return self._level(state).masked_fill(self._outside(state), torch.inf)

    def _force(self, state: Tensor) -> Tensor:
        return self._energy_and_force(state)[1]

    def _step(self, state: Tensor) -> Tensor:
        start = self._present(state)
        energy = self._flat(state)[0]
        moved = start + self._force(state) / align(self.curvature(state), state.ndim)
        bias = energy.normalisation.bias
        deviation = moved - bias
        deviation = deviation - deviation.mean(-1, keepdim=True)
        radius = energy.normalisation.gain * state.shape[-1] ** 0.5
        length = torch.linalg.vector_norm(deviation, dim=-1, keepdim=True)
        nearest = bias + deviation * (radius / torch.maximum(length, radius))
        keep = self._kept(state)
        return nearest if keep is None else torch.where(keep.unsqueeze(-1), nearest, promoted(state))

    def _moved(self, tokens: Tensor, step_size: Tensor | float | None) -> tuple[Tensor, Tensor]:
        """Tokens after a step, and the energy before it."""
        energy, force = self._energy_and_force(self.normalise(tokens))
        size = self.safe_step_size(tokens) if step_size is None else _step_size(step_size, force)
        return tokens.to(force.dtype) + torch.as_tensor(size).unsqueeze(-1) * force, energy

    def _level(self, state: Tensor) -> Tensor:
        """E without its domain."""
        energy, g, keep = self._flat(state)
        query, key = energy._heads(g)
        value = energy._of_parts(mutual_log_partition(query, key, energy.scale, keep), energy._hidden(g))
        return value.reshape(state.shape[:-2])

    def _energy_and_force(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Both without the domain, and −∇E by its closed form, which is differentiated once where autograd's would be twice."""
        energy, g, keep = self._flat(state)
        query, key = energy._heads(g)
        found = mutual_attention(query, key, energy.scale, keep)
        hidden = energy._hidden(g)
        force = torch.einsum("bhnz,hzd->bnd", found.of_keys, energy.query_weight)
        force = force + torch.einsum("bhnz,hzd->bnd", found.of_queries, energy.key_weight) + hidden @ energy.memories
        if keep is not None:
            force = torch.where(keep.unsqueeze(-1), force, 0.0)
        value = energy._of_parts(found.log_partition, hidden)
        return value.reshape(state.shape[:-2]), force.reshape(state.shape)

    def _of_parts(self, log_partition: Tensor, hidden: Tensor) -> Tensor:
        attention = (log_partition.sum(-1) / self.scale).sum(-1)
        return -attention - 0.5 * hidden.square().sum((-2, -1))

    def _heads(self, g: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys, (B, H, n, Z)."""
        return torch.einsum("bnd,hzd->bhnz", g, self.query_weight), torch.einsum("bnd,hzd->bhnz", g, self.key_weight)

    def _hidden(self, g: Tensor) -> Tensor:
        return torch.relu(g @ self.memories.mT)

    # Shapes, dtypes, padding.

    def _flat(self, state: Tensor) -> tuple[Self, Tensor, Tensor | None]:
        """The energy and the state in one dtype, the state and what is kept with one batch dimension, padding 0."""
        g = self._present(state)
        keep = self._kept(state)
        return self.to(g.dtype), g.reshape(-1, *g.shape[-2:]), None if keep is None else keep.reshape(-1, g.shape[-2])

    def _present(self, state: Tensor) -> Tensor:
        """The state with zeros for padding, which may hold anything, NaN too."""
        self._check(state)
        state, keep = state.to(self._dtype(state)), self._kept(state)
        return state if keep is None else torch.where(keep.unsqueeze(-1), state, 0.0)

    def _kept(self, state: Tensor) -> Tensor | None:
        return align(self.keep, state.ndim - 1, 1).expand(state.shape[:-1]) if self.keep.ndim else None

    def _outside(self, state: Tensor) -> Tensor:
        """Whether a token that is kept lies outside the range, by more than roundings of the state's own dtype."""
        outside = self.normalisation.conjugate(state.detach()) == torch.inf
        keep = self._kept(state)
        return (outside if keep is None else outside & keep).any(-1)

    def _dtype(self, state: Tensor) -> torch.dtype:
        # The normalisation's own numbers have no say.
        return promoted_dtype(state, self.key_weight, self.query_weight, self.memories, self.scale)

    def _check(self, state: Tensor) -> tuple[int, ...]:
        """The dimensions before the tokens'."""
        self._check_device(state=floating("state", state))
        batch, count = self.keep.shape[:-1], self.keep.shape[-1] if self.keep.ndim else "n"
        need_batch("TransformerEnergy", "tokens", state.shape, batch, (count, self.key_weight.shape[-1]))
        if state.shape[-2] == 0:
            raise ValueError(f"TransformerEnergy needs at least one token, got shape {tuple(state.shape)}")
        return tuple(state.shape[:-2])


def _step_size(step_size: Tensor | float, force: Tensor) -> Tensor:
    """A given step size, as a tensor that broadcasts to one for each token."""
    if isinstance(step_size, Tensor):
        given = floating("step_size", step_size).to(force)
        return expanded("step_size", given, force.shape[:-1], "one for each token,")
    return force.new_full((), number("step_size", step_size, least=0))
