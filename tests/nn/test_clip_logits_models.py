"""`massieu.nn.clip_logits` of transformers' models: logits worked out again from queries and keys of the whole model."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from massieu.nn import clip_logits

pytestmark = pytest.mark.medium
TOKENS = torch.randint(0, 50, (2, 7), generator=torch.Generator().manual_seed(0))
SIZES = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
ENDS = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
GROUPED = {**SIZES, "num_key_value_heads": 2}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
SHORT = {"d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4, "vocab_size": 50}
MODELS: dict[str, tuple[dict, str]] = {
    "GPT2": ({"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 50}, "h.1.attn"),
    "Llama": (GROUPED, "layers.1.self_attn"),
    "Bert": (SIZES, "encoder.layer.1.attention.self"),
    "GPTNeoX": (SIZES, "layers.1.attention"),
    "Phi3": ({**GROUPED, "pad_token_id": 0}, "layers.1.self_attn"),
    "ModernBert": ({**SIZES, **ENDS}, "layers.1.attn"),
    "T5Encoder": (SHORT, "encoder.block.1.layer.0.SelfAttention"),
    "Gemma2": ({**GROUPED, "head_dim": 8}, "layers.1.self_attn"),
    "GptOss": (
        {**GROUPED, "head_dim": 8, "num_local_experts": 2, "experts_implementation": "eager", "num_experts_per_tok": 1},
        "layers.1.self_attn",
    ),
    "Olmo2": (SIZES, "layers.1.self_attn"),
    "Cohere": ({**SIZES, "use_qk_norm": True}, "layers.1.self_attn"),
    "Falcon": ({**SIZES, "multi_query": True}, "h.1.self_attention"),
    "DeepseekV3": ({**SIZES, **LATENT, "first_k_dense_replace": 2}, "layers.1.self_attn"),
}
REFUSED = {
    "Qwen3": ({**GROUPED, "head_dim": 8}, "layers.1.self_attn", "q_norm, whose numbers all heads share"),
    "Gemma3Text": ({**GROUPED, "head_dim": 8}, "layers.1.self_attn", "q_norm, whose numbers all heads share"),
    "Olmo": ({**SIZES, "clip_qkv": 3.0}, "layers.1.self_attn", "not in proportion to its weights"),
    "DiffLlama": (GROUPED, "layers.1.self_attn", "not in proportion to its weights"),
    "DebertaV2": (
        {**SIZES, "relative_attention": True},
        "encoder.layer.1.attention.self",
        "by itself produced no attention scores",
    ),
    "XLNet": ({"d_model": 32, "n_layer": 2, "n_head": 4, "vocab_size": 50}, "layer.1.rel_attn", "no linear layer"),
}


def transformers_model(name: str, options: dict) -> nn.Module:
    """A small model of transformers in float64, whose largest logits differ by head."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name.removesuffix('Encoder')}Config")(**options)
    model = getattr(transformers, f"{name}Model")(config).double().eval()
    for key, parameter in model.named_parameters():
        if parameter.ndim > 1 or key.endswith("bias"):
            nn.init.normal_(parameter, std=0.3)
        else:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model


class Seen(TorchFunctionMode):
    """Scores of every `scaled_dot_product_attention`, by hand, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.scores: list[Tensor] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            query, key = args[:2]
            scale = query.shape[-1] ** -0.5 if kwargs.get("scale") is None else kwargs["scale"]
            key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
            self.scores.append(torch.einsum("bhld,bhnd->bhln", query.double(), key.double()) * scale)
        return func(*args, **kwargs)


def through_torch(module, query, key, value, mask, scaling=None, **_):
    """An attention function that transformers can be told to take, without caps and sinks."""
    options = {"is_causal": module.is_causal and mask is None, "scale": scaling, "enable_gqa": True}
    return F.scaled_dot_product_attention(query, key, value, mask, **options).transpose(1, 2), None


def scores_of(model: nn.Module, name: str) -> Tensor:
    """The raw scores (B, H, L, N) of one attention module."""
    transformers = pytest.importorskip("transformers")
    transformers.AttentionInterface.register("through_torch", through_torch)
    transformers.AttentionMaskInterface.register("through_torch", transformers.masking_utils.sdpa_mask)
    model.config._attn_implementation = "sdpa" if "Falcon" in type(model).__name__ else "through_torch"
    seen, found = Seen(), []
    before = model.get_submodule(name).register_forward_pre_hook(lambda *_: found.append(len(seen.scores)))
    try:
        with torch.no_grad(), seen:
            model(input_ids=TOKENS)
    finally:
        before.remove()
    return seen.scores[found[0]]


def clipped(model: nn.Module, name: str, logits: Tensor) -> tuple[float, Tensor]:
    """A threshold that two of four heads are above, and the factors that the definition gives."""
    threshold = float(logits.sort().values[1:3].mean())
    return threshold, torch.where(logits > threshold, threshold / logits, 1.0)


def check_model(model: nn.Module, name: str) -> None:
    before = scores_of(model, name)
    logits = before.amax((0, 2, 3))
    threshold, wanted = clipped(model, name, logits)
    assert threshold > 0
    state = copy.deepcopy(model.state_dict())
    modes, random = [part.training for part in model.modules()], torch.get_rng_state()
    factors = clip_logits(model, threshold, {name: logits})
    torch.testing.assert_close(factors[name], wanted, rtol=1e-12, atol=0)
    assert modes == [part.training for part in model.modules()]
    assert torch.equal(random, torch.get_rng_state())
    after = scores_of(model, name)
    torch.testing.assert_close(
        after, before * wanted.view(1, -1, 1, 1), rtol=1e-5, atol=1e-5 * float(before.abs().max())
    )
    torch.testing.assert_close(after.amax((0, 2, 3)), logits.clamp(max=threshold), rtol=1e-5, atol=0)
    changed = [key for key, tensor in model.state_dict().items() if not torch.equal(tensor, state[key])]
    assert changed and all(key.startswith(f"{name}.") for key in changed)
    for key in changed:
        check_rows(state[key], model.state_dict()[key], wanted)


def check_rows(before: Tensor, after: Tensor, wanted: Tensor) -> None:
    """Each number keeps its bits or is multiplied by a factor, or its root, of a head that was above the threshold."""
    ratio = torch.where(before == after, 1.0, after / before).unsqueeze(-1)
    allowed = torch.cat([torch.ones(1), wanted, wanted.sqrt()]).double()
    assert bool(((ratio - allowed).abs().amin(-1) < 1e-12).all())


@pytest.mark.parametrize("name", MODELS)
def test_the_largest_logit_of_transformers_models_is_the_threshold(name):
    options, module = MODELS[name]
    model = transformers_model(name, options)
    check_model(model, module)


def test_rows_that_a_softmax_of_their_own_hides():
    """Bloom: what goes into the softmax holds positions and the mask too."""
    model = transformers_model("Bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 50})
    name, projected = "h.1.self_attention", []
    layer = model.get_submodule(name).query_key_value
    layer.register_forward_hook(lambda *given: projected.append(given[-1].view(2, 7, 4, 3, 8).unbind(3)))
    scores = []
    for _ in range(2):
        model(input_ids=TOKENS)
        scores.append((torch.einsum("blhd,bnhd->bhln", *projected[-1][:2]) * 8**-0.5).detach())
        if len(scores) == 1:
            logits = scores[0].amax((0, 2, 3))
            threshold, wanted = clipped(model, name, logits)
            clip_logits(model, threshold, {name: logits})
    torch.testing.assert_close(scores[1], scores[0] * wanted.view(1, -1, 1, 1), rtol=1e-12, atol=1e-12)
    assert torch.equal(projected[0][2], projected[1][2])


@pytest.mark.parametrize("name", REFUSED)
def test_scores_that_weights_do_not_scale_are_refused_and_nothing_is_changed(name):
    options, module, reason = REFUSED[name]
    model = transformers_model(name, options)
    state = copy.deepcopy(model.state_dict())
    record = {module.replace("1", "0", 1): torch.full((4,), 1.0), module: torch.full((4,), 200.0)}
    with pytest.raises(ValueError, match=rf"cannot clip the logits of {module} \(\w+\): .*{reason}"):
        clip_logits(model, 100.0, record)
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())
