"""What two processes of a group do for `test_processes`, all in one start: each function returns what it has to show."""

import datetime
import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tests.support.probing.plain import gpt
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from massieu import Monitor
from massieu.probing.monitor import measured_stream, processes
from massieu.probing.monitor.norms import gradient_norm
from massieu.probing.monitor.outlets import Outlets

SETTINGS = {"every": 100, "prefix": "massieu", "model": "Model", "layers": 2, "heads": [4, 4]}
IDS = torch.arange(48).reshape(4, 12) * 7 % 31
MANY_IDS = torch.arange(276).reshape(23, 12) ** 2 % 31
"""So many rows that some of either process are sampled: the first four of all, and every tenth."""
LOSSES = (4.896, 4.991)


def plain() -> nn.Module:
    return gpt(fused=False)


def llama() -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
        vocab_size=31, max_position_embeddings=32,
    )  # fmt: skip
    model = transformers.LlamaModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5.0)
    return model.eval()


def one_process() -> dict[str, float]:
    return dict(found(Monitor(plain(), IDS, per_head=True)))


def one_process_of_llama() -> dict[str, float]:
    return dict(found(Monitor(llama(), {"input_ids": MANY_IDS}, per_head=True)))


def found(monitor: Monitor) -> dict[str, float]:
    return found_at(monitor, 0)


def found_at(monitor: Monitor, step: int) -> dict[str, float]:
    record = monitor(step)
    assert record is not None
    return record


def share(rank: int, size: int) -> torch.Tensor:
    return IDS.chunk(size)[rank]


def data_parallel(rank: int, size: int) -> Any:
    model = DistributedDataParallel(plain())
    monitor = Monitor(model, share(rank, size), every=100, per_head=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    for step in range(3):  # the wrapper's own forward and backward go on beside it
        model(share(rank, size)).logsumexp(-1).mean().backward()
        optimizer.step()
        record = monitor(step * 100)
    assert record is not None
    return dict(record)


def fully_sharded(rank: int, size: int) -> Any:
    from torch.distributed.fsdp import fully_shard

    model: Any = plain()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = Monitor(model, share(rank, size), per_head=True)
    by_layer = Monitor(model, share(rank, size), norms=True)
    first = dict(found(monitor))
    # Between the backward pass and the step: what the forward pass gathered must not be what the next one computes with.
    model(share(rank, size)).logsumexp(-1).mean().backward()
    monitor(100)
    norms = layer_norms(by_layer(100))
    optimizer.step()
    trained = model(share(rank, size)).detach()
    return first, trained, norms


def layer_norms(record: Any) -> dict[str, float]:
    return {key: value for key, value in record.items() if key.endswith("_norm")}


def layer_norms_of_one() -> dict[str, float]:
    model = plain()
    model(IDS).logsumexp(-1).mean().backward()
    return layer_norms(Monitor(model, IDS, norms=True)(100))


def fully_sharded_alone(rank: int, size: int) -> torch.Tensor:
    """The same without a monitor."""
    from torch.distributed.fsdp import fully_shard

    model: Any = plain()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(share(rank, size)).logsumexp(-1).mean().backward()
    optimizer.step()
    return model(share(rank, size)).detach()


def tensor_parallel(rank: int, size: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model: Any = llama()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    for layer in model.layers:
        columns = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
        parallelize_module(layer.self_attn, mesh, {**columns, "o_proj": RowwiseParallel()})
    return dict(found(Monitor(model, {"input_ids": MANY_IDS}, per_head=True)))


def many_rows(ids: torch.Tensor, loss: float) -> dict[str, float]:
    """A record in float64, of fewer tokens than a row has, so that which ones are drawn matters."""
    model: Any = plain().double()
    with torch.no_grad():
        model.tokens.weight[7, 0] = 1e4  # one token has an extreme activation
    with mock.patch.object(measured_stream, "CLOUD", 6):
        record = Monitor(model, ids, per_head=True, top_k=1, extreme_activations=True, norms=True)(0, loss=loss)
    assert record is not None
    return dict(record)


def uneven_shares(rank: int, size: int) -> dict[str, float]:
    return many_rows(MANY_IDS.split([15, 8])[rank], LOSSES[rank])


def many_rows_of_one() -> dict[str, float]:
    return many_rows(MANY_IDS, sum(LOSSES) / 2)


def at_different_steps(rank: int, size: int) -> str:
    monitor = Monitor(plain(), share(rank, size), every=1)
    try:
        monitor(rank)
    except ValueError as error:
        return str(error)
    return "nothing was said"


def in_one_process_alone(rank: int, size: int) -> tuple[str, list[str]]:
    """What is raised and what is warned of where the other process trains on without a monitor."""
    if rank:
        time.sleep(1.5)  # at work on something else, longer than the group's time
        return "", []
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=0.5), dist.group.WORLD)
    processes.PATIENCE = 0.1
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            Monitor(plain(), IDS)(0)
        except ValueError as error:
            return str(error), [str(each.message) for each in said]
    return "nothing was raised", []


def watched_by_some(rank: int, size: int) -> list[dict[str, float] | None]:
    """Only the first process calls its model while it is watched; then none does."""
    model = plain()
    monitor = Monitor(model, IDS)
    with monitor.watch(0) as seen:
        if rank == 0:
            model(IDS)
    with monitor.watch(100) as unseen:
        pass
    return [None if watched.record is None else dict(watched.record) for watched in (seen, unseen)]


def watched_by_one() -> dict[str, float]:
    model = plain()
    with Monitor(model, IDS).watch(0) as seen:
        model(IDS)
    assert seen.record is not None
    return dict(seen.record)


def clipped(rank: int, size: int) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Largest logits of a training step of both processes, each with its rows, and the weights after they were clipped."""
    model = DistributedDataParallel(plain().train())
    own = share(rank, size)
    with Monitor(model, own).clip(0, 1.0) as found:
        model(own).square().mean().backward()
    return found.largest_logits, [parameter.detach() for parameter in model.module.parameters()]


def watched_and_clipped(model: Any, own: Tensor) -> tuple[dict[str, float], dict[str, Tensor], dict[str, Tensor]]:
    """The record of a training step that is watched, and what `clip` found and did in the next."""
    monitor = Monitor(model, own, every=1)
    with monitor.watch(0) as seen:
        model(own).square().mean().backward()
    with monitor.clip(0, 1.0) as found:
        model(own).square().mean().backward()
    assert seen.record is not None
    shown = {name: value for name, value in seen.record.items() if "gradient_norm" not in name}
    return shown, found.largest_logits, found.factors


def watched_fully_sharded(rank: int, size: int) -> Any:
    from torch.distributed.fsdp import fully_shard

    model: Any = plain().train()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return watched_and_clipped(model, share(rank, size))


def flat_shards(rank: int, size: int) -> tuple[list[Any], list[str], str]:
    """Under FullyShardedDataParallel: three records, what was warned of, and what `clip` says."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    inner: Any = plain().train()
    policy = ModuleWrapPolicy({type(inner.blocks[0])})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = FullyShardedDataParallel(
            inner, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True
        )
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        own = share(rank, size)
        monitor = Monitor(model, own, every=1, optimizer=optimizer, norms=True)
        records = []
        for step in range(3):
            model(own).square().mean().backward()
            norm = model.clip_grad_norm_(1e9)
            # Before the optimiser's step, which must change the shares and not what a forward pass has gathered.
            records.append(monitor(step, **({"gradient_norm": norm} if step else {})))
            optimizer.step()
            optimizer.zero_grad()
    refused = ""
    try:
        with monitor.clip(3, 1.0):
            model(own)
    except ValueError as error:
        refused = str(error)
    return [dict(each) for each in records], [str(each.message) for each in said], refused


def trained_by_one() -> list[tuple[dict[str, float], float]]:
    """The records in one process, each with the norm of all gradients."""
    model: Any = plain().train()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = Monitor(model, IDS, every=1)
    records = []
    for step in range(3):
        model(IDS).square().mean().backward()
        norm = explicit_norm(*(parameter.grad for parameter in model.parameters() if parameter.grad is not None))
        records.append((dict(found_at(monitor, step)), norm))
        optimizer.step()
        optimizer.zero_grad()
    return records


COMPILED = ("DDP around compiled", "compiled around DDP", "compiled blocks, sharded", "compiled around sharded")
"""How a model may be compiled and shared between processes."""


def compiled_and_shared(form: str) -> tuple[Any, Any]:
    """A model, and what is called for a training step; both are one where nothing is named."""
    from torch.distributed.fsdp import fully_shard

    torch._dynamo.reset()
    model: Any = gpt(fused=True).train()
    if not form:
        return model, model
    if form == "DDP around compiled":
        return model, DistributedDataParallel(torch.compile(model, backend="aot_eager"))
    if form == "compiled around DDP":
        return model, torch.compile(DistributedDataParallel(model), backend="aot_eager")
    for block in model.blocks:
        if form == "compiled blocks, sharded":
            block.compile(backend="aot_eager")
        fully_shard(block)
    fully_shard(model)
    called = torch.compile(model, backend="aot_eager") if form == "compiled around sharded" else model
    return model, called


def whole_weights(model: nn.Module) -> list[Tensor]:
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [weight.detach().clone() for weight in weights]


def compiled_steps(form: str, own: Tensor, watched: bool = True) -> list[Any]:
    """Weights after a training step; where it is watched, its logits too, and both of a second step, which is clipped."""
    model, called = compiled_and_shared(form)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train() -> None:
        optimizer.zero_grad()
        called(own).square().mean().backward()
        optimizer.step()

    if not watched:
        train()
        return [whole_weights(model)]
    monitor = Monitor(called, own, every=1)
    with monitor.watch(0) as seen:
        train()
    assert seen.record is not None
    first = whole_weights(model)
    with monitor.clip(1, 1.0) as found:
        train()
    return [first, seen.record.largest_logits, found.largest_logits, whole_weights(model)]


def compiled_training(rank: int, size: int) -> dict[str, tuple[list[Any], list[Any]]]:
    """Of each form the step alone, and the two steps."""
    warnings.simplefilter("ignore")  # of PyTorch's on itself, and that the stream is left out
    own = share(rank, size)
    return {form: (compiled_steps(form, own, watched=False), compiled_steps(form, own)) for form in COMPILED}


def clipped_by_one() -> tuple[dict[str, Tensor], list[Tensor]]:
    model = plain().train()
    with Monitor(model, IDS).clip(0, 1.0) as found:
        model(IDS).square().mean().backward()
    return found.largest_logits, [parameter.detach() for parameter in model.parameters()]


def with_gradient(gradient: Tensor) -> Tensor:
    """A parameter that has this gradient."""
    parameter = torch.zeros_like(gradient.to_dense() if gradient.is_sparse else gradient).requires_grad_()
    parameter.grad = gradient
    return parameter


def explicit_norm(*gradients: Tensor) -> float:
    """Of all of them together, in float64."""
    return math.sqrt(sum(float((each.double() ** 2).sum()) for each in gradients))


def gradients() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(*shape, generator=generator) for shape in ((6, 3), (4,), (5,)))  # type: ignore[return-value]


def sharded_gradients(rank: int, size: int) -> float | None:
    """The norm of a gradient of which each process has a part, one that each has whole, and one that is no DTensor."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (size,))
    first, second, third = gradients()
    placed = [distribute_tensor(first, mesh, [Shard(0)]), distribute_tensor(second, mesh, [Replicate()])]
    return gradient_norm(map(with_gradient, [*placed, third]))


def write_together(path: Path, rank: int, size: int) -> None:
    """Each process writes records with its own number to one file."""
    write = Outlets(path, SETTINGS)
    for step in range(20):
        write({"massieu/rank": float(rank)}, step)


WORK: dict[str, Callable[[int, int], Any]] = {
    each.__name__: each
    for each in (
        data_parallel, fully_sharded, fully_sharded_alone, tensor_parallel, uneven_shares, at_different_steps,
        watched_by_some, clipped, watched_fully_sharded, flat_shards, sharded_gradients,
    )
}  # fmt: skip


def everything(path: Path, rank: int, size: int) -> dict[str, Any]:
    """What each function of `WORK` returns; beside it, records are written to `path`."""
    write_together(path, rank, size)
    return {name: function(rank, size) for name, function in WORK.items()}
