"""Everything the probe says about attention once more, in float64 from explicitly formed attention matrices.

Written from the formulas alone: the model is run with plain hooks in eager float64, attention matrices are formed in
full, and no function of the package is used.
"""

import numpy as np
import torch
from tests.support.probing import zoo


def attention_of(name: str, batch: dict[str, torch.Tensor], shift: float = 0.0) -> list[dict[str, torch.Tensor]]:
    """For each layer of a BERT, GPT-2 or Llama in float64: scores (hidden keys −inf), queries, keys, values.

    ``shift`` adds a constant vector to every key.
    """
    model = zoo.fresh(name).double()
    found: list[dict[str, torch.Tensor]] = []
    heads, size = 4, 12
    real = batch["attention_mask"].bool()
    length = real.shape[1]
    visible = real[:, None, None, :].expand(-1, 1, length, -1)
    if name != "bert":
        visible = visible & torch.ones(length, length, dtype=torch.bool).tril()

    def split(x: torch.Tensor, n: int) -> torch.Tensor:
        return x.unflatten(-1, (n, size)).transpose(1, 2)

    def record(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        k, v = (t.repeat_interleave(heads // t.shape[1], 1) for t in (k, v))
        scores = q @ (k + shift).mT / size**0.5
        found.append({"scores": scores.masked_fill(~visible, -torch.inf), "query": q, "key": k + shift, "value": v})

    def bert(module, arguments, output):
        x = arguments[0]
        record(*(split(m(x), heads) for m in (module.query, module.key, module.value)))

    def gpt2(module, arguments, output):
        record(*(split(t, heads) for t in module.c_attn(arguments[0]).split(48, dim=2)))

    def llama(module, arguments, keywords, output):
        x = keywords["hidden_states"]
        cos, sin = (t[:, None] for t in keywords["position_embeddings"])
        q, k, v = split(module.q_proj(x), 4), split(module.k_proj(x), 2), split(module.v_proj(x), 2)

        def turn(t):
            left, right = t[..., : size // 2], t[..., size // 2 :]
            return t * cos + torch.cat([-right, left], -1) * sin

        record(turn(q), turn(k), v)

    hook = {"bert": bert, "gpt2": gpt2, "llama": llama}[name]
    kind = {"bert": "BertSelfAttention", "gpt2": "GPT2Attention", "llama": "LlamaAttention"}[name]
    for module in model.modules():
        if type(module).__name__ == kind:
            module.register_forward_hook(hook, with_kwargs=name == "llama")
    with torch.no_grad():
        model(**batch)
    return found


def expected(
    layer: dict[str, torch.Tensor], batch: dict[str, torch.Tensor], special: torch.Tensor
) -> dict[str, np.ndarray]:
    """Means over all real queries of a batch, per head."""
    scores, real = layer["scores"], batch["attention_mask"].bool()
    length = scores.shape[-1]
    visible = scores > -torch.inf
    n = visible.sum(-1)
    weights = torch.exp(scores - torch.logsumexp(scores, -1, keepdim=True))
    log_z = torch.logsumexp(scores, -1)
    finite = torch.where(visible, scores, 0.0)
    mean = finite.sum(-1) / n
    under = (weights * finite).sum(-1)
    entropy = -(weights * torch.where(weights > 0, weights.log(), 0.0)).sum(-1)
    diagonal = weights.diagonal(dim1=-2, dim2=-1)
    previous = torch.zeros_like(diagonal)
    previous[..., 1:] = weights.diagonal(offset=-1, dim1=-2, dim2=-1)
    values = {
        "selective_log_partition": log_z - n.log() - mean,
        "log_partition": log_z,
        "entropy": entropy,
        "entropy_fraction": entropy / n.clamp_min(2).log(),
        "effective_keys": entropy.exp(),
        "effective_sample_size": 1 / weights.square().sum(-1),
        "largest_weight": weights.amax(-1),
        "largest_score_above_mean": scores.amax(-1) - mean,
        "largest_score": scores.amax(-1),
        "score_variance": (torch.where(visible, (scores - mean[..., None]) ** 2, 0.0)).sum(-1) / n,
        "score_variance_attended": (weights * torch.where(visible, (scores - under[..., None]) ** 2, 0.0)).sum(-1),
        "weight_first": weights[..., 0],
        "weight_special": (weights * special[:, None, None, :]).sum(-1),
        "weight_diagonal": diagonal,
        "weight_previous": previous,
    }
    valid = real[:, None].expand_as(log_z)
    later = torch.arange(length) > 0
    masks = {"entropy_fraction": valid & (n >= 2), "weight_previous": valid & later}
    means = {}
    for name, value in values.items():
        mask = masks.get(name, valid)
        means[name] = ((value * mask).sum((0, 2)) / mask.sum((0, 2))).numpy()
    norms = layer["value"].norm(dim=-1)
    mean_norm = (norms * real[:, None]).sum(-1) / real[:, None].sum(-1)
    means["first_value_norm_ratio"] = (norms[..., 0] / mean_norm).mean(0).numpy()
    return means
