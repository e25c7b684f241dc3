"""The patch of TRL on the page about policies, against TRL's own function, where TRL is installed."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "policy_optimisation.md"


def _patch():
    (block,) = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return block


def test_the_patch_is_python():
    compile(_patch(), str(PAGE), "exec")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed: pip install trl==1.16.0")
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.6, "softcap": 4.0, "logit_scale": 0.5}], ids=["plain", "all"]
)
def test_the_patched_function_is_trls(options, monkeypatch):
    import trl.trainer.utils  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    tensors = [torch.randn(shape, requires_grad=True) for shape in ((9, 16), (70, 16), (70,))]
    target, outputs = torch.randint(70, (9,)), ("log_probs", "entropy", "is_top1")
    given = [options.get(name, default) for name, default in (("temperature", 1.0), ("chunk", 32), ("softcap", None))]

    def run():
        found = trl.trainer.utils._ChunkedLogProbFunction.apply(
            *tensors, target, *given, options.get("logit_scale", 1.0), outputs
        )
        loss = (found[0] * torch.arange(9)).sum() + found[1].square().sum()
        return found, torch.autograd.grad(loss, tensors)

    own, own_gradients = run()
    monkeypatch.setattr(trl.trainer.utils, "_ChunkedLogProbFunction", None)
    exec(compile(_patch(), str(PAGE), "exec"), {})
    assert trl.trainer.utils._ChunkedLogProbFunction.__name__ == "LogProbabilities"
    ours, gradients = run()
    for place in (0, 1):
        torch.testing.assert_close(ours[place], own[place], rtol=1e-5, atol=1e-5)
    assert torch.equal(ours[4], own[4].bool())
    for one, other in zip(gradients, own_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed: pip install trl==1.16.0")
def test_a_patched_model_is_trls(monkeypatch):
    import trl.trainer.utils  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=90, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
    )
    torch.manual_seed(0)
    tokens = torch.randint(90, (2, 10))
    labels = tokens.masked_fill(torch.arange(10) < 3, -100)
    results = []
    monkeypatch.setattr(trl.trainer.utils, "_ChunkedLogProbFunction", trl.trainer.utils._ChunkedLogProbFunction)
    for patched in (False, True):
        if patched:
            exec(compile(_patch(), str(PAGE), "exec"), {})
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config)
        trl.trainer.utils.add_fused_lm_head(model, temperature=0.8, outputs=("log_probs", "entropy"))
        found = model(tokens, labels=labels, fused_lm_head=True)
        found.loss.backward()
        results.append((found.log_probs, found.entropy, found.loss, model.lm_head.weight.grad))
    for own, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, own, rtol=1e-5, atol=1e-6)
