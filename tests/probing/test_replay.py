"""Maps read off an attention module are the module's own weights."""

import torch
from tests.probing import zoo

from massieu.probing.model import model_inputs
from massieu.probing.replay import Replay, affine_projections
from massieu.probing.routes import capturing
from massieu.probing.sites import find_sites, first_pass
from massieu.probing.wiring import StreamTracer


def test_affine_maps_are_the_weights_and_biases_of_the_module():
    model = zoo.fresh("bert")
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    prepared = model_inputs(model, zoo.inputs("bert"))
    steps = []
    tracer = StreamTracer(model, find_sites(model, first_pass(model, prepared)), steps.append)
    with torch.no_grad():
        with capturing(model, tracer.attention), tracer.watching():
            model(**prepared)
        read = next(step.read for step in steps if step.read is not None)
        with capturing(model, lambda call: None) as capture:
            found = affine_projections(capture, read)
            query_map = Replay(capture, read).query_map(torch.arange(5))
    module, heads = read.call.module, read.call.query.shape[1]
    for (weight, bias), linear in zip(found, (module.query, module.key, module.value), strict=True):
        torch.testing.assert_close(weight.flatten(0, 1).float(), linear.weight.detach(), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(bias.flatten().float(), linear.bias.detach(), atol=1e-5, rtol=1e-4)
    assert query_map is not None
    torch.testing.assert_close(query_map[0], found[0][0].float(), atol=1e-5, rtol=1e-4)
    assert query_map[1].shape == (heads, module.query.out_features // heads)
