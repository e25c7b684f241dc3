"""One window of made-up attention, for groups that are measured head by head."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import massieu
from massieu.probing.capture.attention_call import AttentionCall, AttentionSite
from massieu.probing.statistics.head_window import HeadSums, HeadWindow

SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
IDS = torch.randint(1, 40, (4, 40), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[2, 30:] = 0


def window(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool = False, real: int | None = None, scale: float = 0.4
) -> HeadWindow:
    """Queries (H, L, D), keys (Hk, N, D), values (Hk, N, Dv); keys from ``real`` on are padding."""
    number = key.shape[1]
    real = number if real is None else real
    mask = None
    if not causal and real < number:
        mask = (torch.arange(number) < real)[None, None, None].expand(1, 1, query.shape[1], number)
    output = torch.zeros(1, query.shape[1], query.shape[0], value.shape[2])
    given = query[None], key[None], value[None]
    call = AttentionCall(AttentionSite("site"), nn.Identity(), *given, mask, causal, scale, None, None, output)
    return HeadWindow(call, torch.arange(number) < real, torch.arange(min(3, real - 1), real), 7)


def drawn(heads: int, number: int, size: int, seed: int = 0) -> Tensor:
    return torch.randn(heads, number, size, generator=torch.Generator().manual_seed(seed))


def weights_of(given: HeadWindow, head: int, place: int) -> np.ndarray:
    """Explicitly, in float64, of the keys that are no padding."""
    call, real = given.call, int(given.real.sum())
    key = call.key[0].double().numpy()
    keys = key[head * len(key) // call.query.shape[1], : place + 1 if call.is_causal else real]
    scores = call.scale * keys @ call.query[0, head, place].double().numpy()
    weights = np.exp(scores - scores.max())
    return np.pad(weights / weights.sum(), (0, real - len(keys)))


def mean(found: HeadSums) -> np.ndarray:
    return (found[0] / found[1]).numpy()


def model(kind: str, seed: int = 0, size: float = 8) -> Any:
    """A BERT or a Llama with random weights, matrices `size` times as large as usual: attention is far from uniform."""
    from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel

    torch.manual_seed(seed)
    if kind == "llama":
        made: Any = LlamaModel(LlamaConfig(**SIZES, vocab_size=40, num_key_value_heads=2))
    else:
        made = BertModel(BertConfig(**SIZES, vocab_size=40))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(size) if parameter.dim() == 2 else None
    return made.eval()


def check_batches_change_nothing(kind: str, names: Sequence[str], controls: dict[str, str]) -> None:
    """By `massieu.probe`: the batches' sizes change no number, and every control stands beside; a padded row is among them."""
    whole = [{"input_ids": IDS, "attention_mask": MASK}]
    apart = [{"input_ids": IDS[i : i + 2], "attention_mask": MASK[i : i + 2]} for i in (0, 2)]
    one, other = (massieu.probe(model(kind), given, statistics=names) for given in (whole, apart))
    found = {*one.heads["statistic"]}
    assert {*names, *(f"{name}/{control}" for name, control in controls.items())} <= found
    assert {f"{name}/q_value" for name in controls} <= found
    left, right = (result.heads.sort("site", "head", "statistic") for result in (one, other))
    assert left["statistic"].to_list() == right["statistic"].to_list()
    np.testing.assert_allclose(left["value"].to_numpy(), right["value"].to_numpy(), rtol=1e-3, atol=1e-4)
    counts = one.heads.filter(one.heads["statistic"].is_in(list(names)))
    assert counts["count"].min() > 0
