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

_LEAST_CURVATURE = 1e-6
"""A smaller bound on the curvature is raised to this, so that steps stay finite; a larger bound still holds."""


class TransformerEnergy(Energy):
    """The energy of an Energy Transformer: tokens that attend to each other, and a memory with relu² (Hoover et al. 2023).

    E(g) = −β⁻¹ Σ_h Σ_C log Σ_{B≠C} exp(β K_hB·Q_hC) − ½ Σ_B Σ_μ relu(ξ_μ·g_B)², K = W_K g, Q = W_Q g. A state is what a
    LayerNorm makes of n tokens, g = ∇L(x): every g_B lies in the ball of radius gain·√d about the bias, where that
    meets the hyperplane Σ(g_B − bias) = 0; elsewhere E is +inf. No token attends to itself. Tokens are keys and
    queries, so the force has a term for either part (S3), and one of a feed-forward layer with tied weights. Padding
    contributes nothing, neither as keys nor as queries, whatever it holds, and does not move. Memory is linear in tokens.

    Two ways lead down:

    - `step`, in g, to the point of the range nearest to g − ∇E/`curvature`: as ∇²E ≤ curvature everywhere, E falls by at
      least ½·curvature·‖step‖². Where it ends, `retrieve` finds, with the derivatives of a fixed point.
    - `flow`, in x, the paper's x ← x − step_size·∂E/∂g: E(∇L(x)) falls in continuous time since ∇²L ⪰ 0. A step lowers it for
      certain up to `safe_step_size`; beyond that, check the energies that `flow` returns. x itself need not come to rest.

    Use `create`. A pure function of its tensors: gradients flow to all of them.

    Attributes:
        key_weight, query_weight: W_K and W_Q, shape (H, Z, d).
        memories: ξ, shape (M, d).
        normalisation: ∇L, of one gain and a bias.
        scale: β of each head, shape (H).
        keep: True for tokens, False for padding, shape (*batch, n); shape () if no token is padding.

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
            memories: Any number of them, also 0.
            normalisation: A LayerNorm, by default of gain 1 and bias 0.
            scale: Positive: one number, or one for each head; Z^-½ by default.
            keep: True for tokens, False for padding.

        Raises:
            ValueError: shapes that do not fit, or a scale that is not positive and finite.
            TypeError: weights are not floating-point, `keep` is not boolean, or the normalisation is not a LayerNorm.
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
        if scale is None:
            scale = size**-0.5
        scale = as_tensor("scale", scale, key_weight, dtype)
        check_range("scale", scale, above=0)
        scale = expanded("scale", scale, (heads,), "the heads")
        return cls(key_weight, query_weight, memories, normalisation, scale, keep)

    def normalise(self, tokens: Float[Tensor, "*lead n d"]) -> Float[Tensor, "*lead n d"]:
        """g = ∇L(tokens), the state that tokens stand for, at least float32."""
        x = self._without_padding(tokens)
        # A large common part, to which a LayerNorm is blind, would leave its rounding in Σ(g − bias).
        return self.normalisation(x - x.mean(-1, keepdim=True))

    def curvature(self, state: Float[Tensor, "*lead n d"]) -> Float[Tensor, "*lead"]:
        """Upper bound on ∇²E at every g and every scale: 2√(n − 1) Σ_h ‖W_K‖‖W_Q‖, n tokens without padding, spectral norms.

        The memories' part is concave, and so is −β times a variance in the attention's. What is left is, along v,
        −2 Σ_BC p_BC v_Bᵀ W_Kᵀ W_Q v_C; columns of p sum to 1, its rows to at most n − 1, so ‖p‖² ≤ n − 1 (Schur).
        """
        lead = self._check(state)
        dtype = self._dtype(state)
        # Singular values come in descending order: the first is the spectral norm of each head, shape (H).
        key_norm = torch.linalg.svdvals(self.key_weight.to(dtype))[..., 0]
        query_norm = torch.linalg.svdvals(self.query_weight.to(dtype))[..., 0]
        norms = key_norm * query_norm
        keep = self._token_mask(state)
        if keep is None:
            num_tokens = torch.full(lead, state.shape[-2], device=state.device)
        else:
            num_tokens = keep.sum(-1)
        # An item of padding alone has −1 other tokens, of which no root can be taken.
        others = (num_tokens - 1).clamp_min(0).to(dtype)
        return (2 * others.sqrt() * norms.sum()).clamp_min(_LEAST_CURVATURE)

    def safe_step_size(self, tokens: Float[Tensor, "*lead n d"]) -> Float[Tensor, "*lead n"]:
        """√(var + eps)/(gain·curvature) of each token. A step of `flow` lowers E up to these sizes, or up to their minimum.

        With ℓ = √(d·(var + eps)), r = gain·√d and (g, s) the point of the sphere of radius r in d + 1 dimensions that tokens
        of softening s are mapped to, (x⁺ − x)·(g⁺ − g) = (ℓ⁺ + ℓ)/(2r)·‖(g⁺, s⁺) − (g, s)‖². So E falls by at least
        Σ_B ((ℓ⁺ + ℓ)/(2r·step_size) − ½·curvature)‖g_B⁺ − g_B‖²: for any step size of at most (ℓ⁺ + ℓ)/(r·curvature).
        """
        x = self._without_padding(tokens)
        deviation = (x.var(-1, correction=0) + self.normalisation.eps).sqrt()
        return deviation / (self.normalisation.gain.to(x) * self.curvature(tokens).unsqueeze(-1))

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
            steps: Number of steps.
            step_size: A number, or a tensor that broadcasts to one for each token. None takes `safe_step_size` of the tokens
                before each step.

        Raises:
            ValueError: a negative number of steps, a step size that is negative or of another shape.
            TypeError: a step size that is not floating-point.
        """
        whole_number("steps", steps, least=0)
        self._check(tokens)
        states = [tokens.to(self._dtype(tokens))]
        energies = []
        for _ in range(steps):
            after, energy = self._moved(states[-1], step_size)
            states.append(after)
            energies.append(energy)
        energies.append(self._energy_in_range(self.normalise(states[-1])))
        return DescentResult(torch.stack(states), torch.stack(energies))

    # What an energy is made of.

    @property
    def _event_dims(self) -> int:
        return 2

    def _energy(self, state: Tensor) -> Tensor:
        return self._energy_in_range(state).masked_fill(self._outside(state), torch.inf)

    def _force(self, state: Tensor) -> Tensor:
        return self._energy_and_force(state)[1]

    def _step(self, state: Tensor) -> Tensor:
        start = self._without_padding(state)
        normalisation = self.to(start.dtype).normalisation
        # A gradient step of 1/curvature minimises the quadratic upper bound of E (majorisation).
        moved = start + self._force(state) / align(self.curvature(state), state.ndim)
        # The nearest point of the range: first onto the hyperplane Σ(g − bias) = 0, then into the ball in it.
        deviation = moved - normalisation.bias
        deviation = deviation - deviation.mean(-1, keepdim=True)
        radius = normalisation.gain * state.shape[-1] ** 0.5
        length = torch.linalg.vector_norm(deviation, dim=-1, keepdim=True)
        nearest = normalisation.bias + deviation * (radius / torch.maximum(length, radius))
        keep = self._token_mask(state)
        if keep is None:
            return nearest
        return torch.where(keep.unsqueeze(-1), nearest, promoted(state))

    def _moved(self, tokens: Tensor, step_size: Tensor | float | None) -> tuple[Tensor, Tensor]:
        """Tokens after a step, and the energy before it."""
        energy, force = self._energy_and_force(self.normalise(tokens))
        if step_size is None:
            size = self.safe_step_size(tokens)
        else:
            size = _checked_step_size(step_size, force)
        return tokens.to(force.dtype) + torch.as_tensor(size).unsqueeze(-1) * force, energy

    def _energy_in_range(self, state: Tensor) -> Tensor:
        """E of a state that lies in the range of the normalisation, which is not checked."""
        model, g, keep = self._flat(state)
        query = model._queries(g)
        key = model._keys(g)
        log_partition = mutual_log_partition(query, key, model.scale, keep)
        energy = model._energy_of_parts(log_partition, model._hidden(g))
        return energy.reshape(state.shape[:-2])

    def _energy_and_force(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """E and −∇E of a state in the range, which is not checked.

        The force is a closed form, which a gradient differentiates once; that of autograd would be differentiated twice.
        """
        model, g, keep = self._flat(state)
        attention = mutual_attention(model._queries(g), model._keys(g), model.scale, keep)
        hidden = model._hidden(g)
        # A token moves E as a query, through the keys it attends to, and as a key, through the queries that attend to it.
        force = torch.einsum("bhnz,hzd->bnd", attention.of_keys, model.query_weight)
        force = force + torch.einsum("bhnz,hzd->bnd", attention.of_queries, model.key_weight) + hidden @ model.memories
        if keep is not None:
            force = torch.where(keep.unsqueeze(-1), force, 0.0)
        energy = model._energy_of_parts(attention.log_partition, hidden)
        return energy.reshape(state.shape[:-2]), force.reshape(state.shape)

    def _energy_of_parts(self, log_partition: Tensor, hidden: Tensor) -> Tensor:
        """−Σ_h β_h⁻¹ Σ_C log Z_hC − ½ Σ hidden², shape (B), from log Z (B, H, n) and hidden units (B, n, M)."""
        attention = (log_partition.sum(-1) / self.scale).sum(-1)
        return -attention - 0.5 * hidden.square().sum((-2, -1))

    def _queries(self, g: Tensor) -> Tensor:
        """W_Q g, (B, H, n, Z)."""
        return torch.einsum("bnd,hzd->bhnz", g, self.query_weight)

    def _keys(self, g: Tensor) -> Tensor:
        """W_K g, (B, H, n, Z)."""
        return torch.einsum("bnd,hzd->bhnz", g, self.key_weight)

    def _hidden(self, g: Tensor) -> Tensor:
        """relu(ξ_μ·g_B), (B, n, M)."""
        return torch.relu(g @ self.memories.mT)

    # Shapes, dtypes, padding.

    def _flat(self, state: Tensor) -> tuple[Self, Tensor, Tensor | None]:
        """The energy in the state's dtype, the state (B, n, d) with zeros for padding, and the mask of tokens (B, n)."""
        g = self._without_padding(state)
        keep = self._token_mask(state)
        if keep is not None:
            keep = keep.reshape(-1, g.shape[-2])
        return self.to(g.dtype), g.reshape(-1, *g.shape[-2:]), keep

    def _without_padding(self, state: Tensor) -> Tensor:
        """The state with zeros for padding, which may hold anything, also NaN."""
        self._check(state)
        state = state.to(self._dtype(state))
        keep = self._token_mask(state)
        if keep is None:
            return state
        return torch.where(keep.unsqueeze(-1), state, 0.0)

    def _token_mask(self, state: Tensor) -> Tensor | None:
        """True for tokens, False for padding, in the shape of the state without its last dimension; None without padding."""
        if self.keep.ndim == 0:
            return None
        return align(self.keep, state.ndim - 1, 1).expand(state.shape[:-1])

    def _outside(self, state: Tensor) -> Tensor:
        """Whether a token, padding apart, lies outside the range by more than roundings of the state's own dtype."""
        outside = self.normalisation.conjugate(state.detach()) == torch.inf
        keep = self._token_mask(state)
        if keep is not None:
            outside = outside & keep
        return outside.any(-1)

    def _dtype(self, state: Tensor) -> torch.dtype:
        # The normalisation is left out: like those of every activation, its numbers take the dtype of the state.
        return promoted_dtype(state, self.key_weight, self.query_weight, self.memories, self.scale)

    def _check(self, state: Tensor) -> tuple[int, ...]:
        """The dimensions before the tokens'."""
        self._check_device(state=floating("state", state))
        batch = self.keep.shape[:-1]
        num_tokens = self.keep.shape[-1] if self.keep.ndim else "n"
        need_batch("TransformerEnergy", "tokens", state.shape, batch, (num_tokens, self.key_weight.shape[-1]))
        if state.shape[-2] == 0:
            raise ValueError(f"TransformerEnergy needs at least one token, got shape {tuple(state.shape)}")
        return tuple(state.shape[:-2])


def _checked_step_size(step_size: Tensor | float, force: Tensor) -> Tensor:
    """The step size as a tensor that broadcasts to one for each token; or an error."""
    if isinstance(step_size, Tensor):
        sizes = floating("step_size", step_size).to(force)
        return expanded("step_size", sizes, force.shape[:-1], "one for each token,")
    return force.new_full((), number("step_size", step_size, least=0))
