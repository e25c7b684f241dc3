"""Does everything compute on a device what it computes on the CPU?

    python -m scripts.check_device --device cuda

Every case of the conformance suites and every module of `massieu.nn`, forward and backward in float64, on the CPU and on the
device; then training runs with and without a Monitor, eager, compiled and under DDP, clipped logits of an adapter, and probes.
Prints a line for each difference and exits with 1 if there is one. `--only` takes some of the parts, by their names.
"""

import argparse
import copy
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from math import nan
from pathlib import Path
from typing import Any

import torch
from tests.energy import test_activation_conformance, test_conformance
from tests.measures.cases import CASES as MEASURES
from tests.nn import test_every_module
from tests.population import test_conformance as population
from tests.posteriors import test_conformance as posteriors
from tests.probing.monitor import test_clip
from tests.regression import test_conformance as regression
from torch import Tensor
from torch.utils import _pytree as pytree

from massieu.testing import activations, energies, kernels, operators, subject
from massieu.testing import posteriors as posterior_suite

TOLERANCE = 1e-8
"""Relative to the largest entry, in float64: iterations that stop at a tolerance may take one step more or less."""
SINGLE = 1e-3
"""The same of a probe, in float32."""
HALF = 0.03
"""Of means over a head's queries in bfloat16: eight roundings of 2⁻⁸."""
COUNTED = 0.1
"""The same of shares of queries, where a rounding may turn a sign, and of what follows from them."""

SUITES: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "energy": (test_conformance.CASES, energies._trial),
    "activation": (test_activation_conformance.CASES, activations._trial),
    "operator": (population.CASES, operators._trial),
    "posterior": (posteriors.CASES, posterior_suite._trial),
    "kernel": (regression.CASES, kernels._trial),
}


def moved(tree: Any, device: str) -> Any:
    """The same with leaves of its own there, whose gradients are kept."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        there = leaf.detach().to(device, copy=True)
        return there.requires_grad_() if there.is_floating_point() else there

    return pytree.tree_map(move, tree)


def both_ways(function: Callable[..., Any], arguments: Any) -> list[Tensor | None]:
    """The result and its gradient in every floating-point number, of the sum of the finite entries' sines."""
    result = function(*arguments)
    leaves = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor) and leaf.requires_grad]
    slopes: Sequence[Tensor | None] = []
    if result.requires_grad:
        total = torch.where(result.isfinite(), result, 0.0).sin().sum()
        slopes = torch.autograd.grad(total, leaves, allow_unused=True)
    return [result.detach(), *slopes]


def difference(here: Sequence[Tensor | None], there: Sequence[Tensor | None]) -> float:
    """The largest, relative to the largest entry of each tensor and to 1; infinite where NaN, ∞ or a gradient is missing."""
    worst = 0.0
    for one, other in zip(here, there, strict=True):
        if one is None or other is None:
            worst = worst if one is other else torch.inf
            continue
        other = other.to(one.device)
        same = torch.equal(one.isfinite(), other.isfinite()) and torch.equal(
            one[~one.isfinite()].nan_to_num(), other[~one.isfinite()].nan_to_num()
        )
        if one.shape != other.shape or not same:
            return torch.inf
        one, other = (torch.where(each.isfinite(), each, 0.0).double() for each in (one, other))
        if one.numel():
            worst = max(worst, float((one - other).abs().max() / (1 + one.abs().max())))
    return worst


def objects() -> Iterator[tuple[str, Callable[..., Any], Any]]:
    """By name: functions and their arguments on the CPU."""
    for kind, (cases, trial_of) in SUITES.items():
        for name, case in cases.items():
            trial = trial_of(case)
            for call, function in trial.functions.items():
                yield f"{kind} {name}: {call}", function, (trial.value, trial.points)
    for name, case in MEASURES.items():
        found = subject.subject_of(case)
        for call, function in subject.FUNCTIONS.items():
            yield f"measure {name}: {call}", function, (found.measure, found.eta, found.middle)


def compare_objects(device: str) -> Iterator[tuple[str, float | str]]:
    for name, function, arguments in objects():
        try:
            here = both_ways(function, moved(arguments, "cpu"))
        except Exception:  # what the CPU refuses, such as a divergence that has no closed form, is not compared
            continue
        try:
            yield name, difference(here, both_ways(function, moved(arguments, device)))
        except Exception as error:
            yield name, told(error)


def compare_modules(device: str) -> Iterator[tuple[str, float | str]]:
    for name in test_every_module.NAMES:
        found = []
        try:
            for place in ("cpu", device):
                module = test_every_module.made(name).double().to(place)
                given = test_every_module.tokens(torch.float64).to(place).requires_grad_()
                torch.manual_seed(0)
                result = test_every_module.output(module, given)
                result.sin().sum().backward()
                slopes = [parameter.grad for parameter in module.parameters()]
                found.append([result.detach(), given.grad, *slopes])
            yield f"module {name}", difference(*found)
        except Exception as error:
            yield f"module {name}", told(error)


def told(error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error).splitlines()[0][:200]} ({Path(place.filename).name}:{place.lineno})"


def language_model() -> Any:
    import transformers

    torch.manual_seed(0)
    configuration = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2
    )  # fmt: skip
    return transformers.LlamaForCausalLM(configuration)


def training(
    device: str, watched: bool, dtype: torch.dtype, wrap: Callable[[Any], Any] = lambda model: model
) -> list[Tensor]:
    """The losses and the final weights of twenty steps, of which the watched are also clipped, with a bound far above."""
    import massieu

    model = language_model().to(device)
    called = wrap(model)
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(97, (4, 48), generator=generator).to(device) for _ in range(20)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = massieu.Monitor(called, batches[0], every=5, optimizer=optimizer) if watched else None
    losses = []

    def step(number: int) -> Tensor:
        autocast = torch.autocast(torch.device(device).type, dtype) if dtype != torch.float32 else nullcontext()
        with autocast, monitor.watch(number) if monitor is not None else nullcontext():
            loss = called(batches[number], labels=batches[number]).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    for number in range(len(batches)):
        # A step is watched or clipped, not both.
        if monitor is not None and number % 5 == 1:
            with monitor.clip(number, 1e9) as clipped:
                losses.append(step(number))
            if not clipped.largest_logits or clipped.factors:
                raise RuntimeError(f"a clipped step has the logits {clipped.largest_logits}, factors {clipped.factors}")
        else:
            losses.append(step(number))
        if monitor is not None:
            monitor(number, loss=losses[-1])
        optimizer.zero_grad()
    return [torch.stack(losses), *(parameter.detach() for parameter in model.parameters())]


def compare_training(device: str) -> Iterator[tuple[str, float | str]]:
    """Bit for bit."""
    torch.use_deterministic_algorithms(True)
    for dtype in (torch.float32, torch.bfloat16):
        name = f"training in {dtype}"
        try:
            alone, again, watched = (training(device, watch, dtype) for watch in (False, False, True))
        except Exception as error:
            yield f"{name} with a monitor", told(error)
            continue
        yield f"{name}, twice without a monitor", 0.0 if all(map(torch.equal, alone, again)) else torch.inf
        yield f"{name}, with a monitor", 0.0 if all(map(torch.equal, alone, watched)) else torch.inf
    torch.use_deterministic_algorithms(False)


def compare_compiled_training(device: str) -> Iterator[tuple[str, float | str]]:
    """The same of models that `torch.compile` has made machine code of, and of one under DDP in a group of one process."""
    kinds: dict[str, tuple[torch.dtype, Callable[[Any], Any]]] = {
        "compiled": (torch.float32, torch.compile),
        "compiled, in bfloat16": (torch.bfloat16, torch.compile),
        "compiled under DDP": (torch.float32, lambda model: torch.compile(distributed(model))),
    }
    torch.use_deterministic_algorithms(True)
    for name, (dtype, wrap) in kinds.items():
        try:
            with one_process(device) if "DDP" in name else nullcontext():
                found = []
                for watched in (False, True):
                    torch._dynamo.reset()
                    found.append(training(device, watched, dtype, wrap))
        except Exception as error:
            yield f"training, {name}", told(error)
            continue
        yield f"training, {name}, with a monitor", 0.0 if all(map(torch.equal, *found)) else torch.inf
    torch.use_deterministic_algorithms(False)


def distributed(model: Any) -> Any:
    """Under DDP."""
    return torch.nn.parallel.DistributedDataParallel(model)


@contextmanager
def one_process(device: str) -> Iterator[None]:
    """A process group of this process alone."""
    backend = "nccl" if torch.device(device).type == "cuda" else "gloo"
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def compare_clipping(device: str) -> Iterator[tuple[str, float | str]]:
    """The largest logits of an adapted model as `clip` finds them, and after it, beside those by hand in float64."""
    import massieu

    try:
        base, model = test_clip.llama_with_lora()
        ids = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(2))

        def exact() -> Tensor:
            return test_clip.LlamaLogits(copy.deepcopy(base).cpu().double()).of(ids)

        model, given = model.to(device), ids.to(device)
        before = exact()
        bound = float(before[0].median())
        with massieu.Monitor(model, {"input_ids": given}).clip(0, bound, frozen=True) as found:
            model(input_ids=given)
        seen = torch.stack([each.cpu() for each in found.largest_logits.values()])
        yield "clip: largest logits", difference([before.float()], [seen]) * TOLERANCE / SINGLE
        after, wanted = exact()[0].float(), before[0].clamp(max=bound).float()
        yield "clip: largest logits afterwards", difference([wanted], [after]) * TOLERANCE / SINGLE
    except Exception as error:
        yield "clip", told(error)


def compare_half_probe(device: str) -> Iterator[tuple[str, float | str]]:
    """A probe in bfloat16 beside all weights at once, of the same rounded model in float64 on the CPU."""
    import massieu

    try:
        model = language_model().eval().bfloat16()
        ids = torch.randint(97, (4, 64), generator=torch.Generator().manual_seed(0))
        wide = copy.deepcopy(model).double()
        wide.set_attn_implementation("eager")
        with torch.no_grad():
            weights = torch.stack(wide(ids, output_attentions=True).attentions)
        entropy = -torch.xlogy(weights, weights).sum(-1)
        exact = {
            "entropy": entropy[..., 1:].mean((1, 3)).flatten(),  # the first query sees one key
            "largest_weight": weights.amax(-1)[..., 1:].mean((1, 3)).flatten(),
        }
        heads = massieu.probe(model.to(device), [ids.to(device)], statistics="quick").heads
        for name, wanted in exact.items():
            rows = heads.filter(heads["statistic"] == name).sort("layer", "head")
            found = torch.tensor(rows["value"].to_list())
            yield f"probe in bfloat16: {name}", difference([wanted.float()], [found]) * TOLERANCE / HALF
    except Exception as error:
        yield "probe in bfloat16", told(error)


def compare_probes(device: str) -> Iterator[tuple[str, float | str]]:
    """In float32, of a model of three layers."""
    import massieu

    ids = [torch.randint(97, (4, 64), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    try:
        tables = [massieu.probe(language_model().eval().to(place), ids).heads for place in ("cpu", device)]
        for statistic in tables[0]["statistic"].unique(maintain_order=True):
            columns = [table.filter(table["statistic"] == statistic)["value"].to_list() for table in tables]
            here, there = (torch.tensor([nan if one is None else one for one in column]) for column in columns)
            allowed = COUNTED if "sharpens" in statistic or statistic.endswith("q_value") else SINGLE
            yield f"probe: {statistic}", difference([here], [there]) * TOLERANCE / allowed
    except Exception as error:
        yield "probe", told(error)


PARTS = (
    compare_modules,
    compare_training,
    compare_compiled_training,
    compare_clipping,
    compare_probes,
    compare_half_probe,
    compare_objects,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", action="append", choices=[part.__name__ for part in PARTS])
    given = parser.parse_args()
    device, parts = given.device, [part for part in PARTS if part.__name__ in (given.only or [part.__name__])]
    # Read when CUDA is first used: products in the same order at every call, for the training runs that are compared.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    wrong = count = 0
    for part in parts:
        for name, found in part(device):
            count += 1
            if isinstance(found, str) or not found <= TOLERANCE:
                wrong += 1
                print(f"{name}: {found}", flush=True)
        print(f"{part.__name__}: {count} compared so far, {wrong} differ", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
