"""Vision models of timm are read as they are, with fused attention and without; what is no attention over tokens is refused."""

import pytest
import torch
from tests.probing.capture.test_fused import check
from torch import nn

from massieu.probing.capture.routes import capturing

pytestmark = pytest.mark.slow
SHAPE = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
READ = {
    "VisionTransformer": (SHAPE, 2),
    "Eva": (SHAPE | {"use_rot_pos_emb": True, "ref_feat_shape": (4, 4)}, 2),
    "SwinTransformer": ({"patch_size": 2, "window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4)}, 4),
}
REFUSED = {"Cait": "its attention weights go through linear", "Xcit": "it attends over channels, not over tokens"}


@pytest.fixture(scope="module")
def operators():
    """Names of torchvision's operators, where its compiled part is not there: timm imports them."""
    try:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    except RuntimeError:  # they are defined
        library = None
    return library


@pytest.fixture(params=[True, False], ids=["fused", "written out"])
def timm(request, operators):
    package = pytest.importorskip("timm")
    package.layers.set_fused_attn(request.param)
    yield package
    package.layers.set_fused_attn(True)


def made(timm, name: str, options: dict) -> nn.Module:
    torch.manual_seed(0)
    return getattr(timm.models, name)(img_size=32, **options).eval()


@pytest.mark.parametrize("name", READ)
def test_models_of_images_are_read(timm, name):
    options, sites = READ[name]
    assert len(check(made(timm, name, options), torch.randn(2, 3, 32, 32))) == sites


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_attention_over_tokens_is_refused(timm, name):
    module, calls = made(timm, name, SHAPE), []
    with torch.no_grad(), capturing(module, calls.append) as capture:
        module(torch.randn(2, 3, 32, 32))
    assert capture.refused == {f"blocks.{n}.attn": REFUSED[name] for n in range(2)}
    assert not {call.site.module_name for call in calls} & set(capture.refused)
