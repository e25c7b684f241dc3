"""The command: which kernels have cases, drawing them, and telling those that are wrong."""

import argparse
import collections
import contextlib
import importlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

from tests.support.ops.fuzz import attention_kernels, loss_kernels
from tests.support.ops.fuzz.case import Case, errors
from tests.support.ops.fuzz.draws import Draws

from massieu import ops

GENERATORS: dict[str, Callable[[Draws], Case]] = {
    "Partial": attention_kernels.partial,
    "attention": attention_kernels.attention,
    "attention_moments": attention_kernels.attention_moments,
    "attention_received": attention_kernels.attention_received,
    "binary_nce": loss_kernels.binary_nce,
    "fisher_vp": attention_kernels.fisher_vp,
    "info_nce": loss_kernels.info_nce,
    "linear_cross_entropy": loss_kernels.linear_cross_entropy,
    "log_partition": attention_kernels.log_partition,
    "n_pairs": loss_kernels.n_pairs,
    "nca": loss_kernels.nca,
    "random_feature_log_partition": attention_kernels.random_feature_log_partition,
    "resample_attention": attention_kernels.resample_attention,
    "streaming": attention_kernels.streaming,
    "token_divergence": loss_kernels.token_divergence,
    "token_statistics": loss_kernels.token_statistics,
}
"""By the names of `massieu.ops`; a name that stands neither here nor below is told as not covered."""

NOT_KERNELS = {
    "AtomBlock": "what a store is written from; cases of streaming write one",
    "AtomStore": "keys in files; cases of streaming read one",
    "Documents": "boundaries of documents; an argument of other cases",
    "FalseNegatives": "which keys count; an argument of the cases of info_nce",
    "moments_backend": "returns a name",
    "sharded": "needs processes; tests/ops/test_sharded.py holds it against the kernels of one process",
}
"""Names that need no cases of their own, and why."""

FREQUENT = ("attention", "attention_moments", "attention_received")
"""Kernels of the most arguments, of which there are more cases."""


@dataclass(frozen=True)
class Failure:
    index: int
    kernel: str
    words: str
    wrong: list[str]


def uncovered() -> list[str]:
    """Names of `massieu.ops` without cases and without a reason for that."""
    return sorted(set(ops.__all__) - set(GENERATORS) - set(NOT_KERNELS))


def draw(seed: int, index: int, kernel: str | None = None) -> tuple[str, Draws, Case]:
    """Case number `index`, of this kernel or of any."""
    draws = Draws(seed, index)
    name = draws.choice([*GENERATORS, *FREQUENT])
    return (kernel or name), draws, GENERATORS[kernel or name](draws)


def failures(seed: int, indices: range, device: str, kernel: str | None = None) -> Iterator[Failure | str]:
    """For each case the kernel's name, or what was wrong."""
    for index in indices:
        name, draws, case = draw(seed, index, kernel)
        try:
            wrong = errors(case, device)
        except Exception as error:  # Whatever a kernel raises for arguments that are right is wrong.
            wrong = [f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"]
        yield Failure(index, name, " ".join(draws.words), wrong) if wrong else name


def main(arguments: list[str] | None = None) -> int:
    """Run the cases, print a line for each that is wrong, and a summary; 1 if any is."""
    parser = argparse.ArgumentParser(description="Random calls of massieu.ops against float64 on explicit matrices.")
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--kernel", choices=sorted(GENERATORS), help="this kernel alone")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no new case after so many seconds")
    parser.add_argument(
        "--compiled", action="store_true", help="by FlexAttention too: minutes of compilations on a device"
    )
    given = parser.parse_args(arguments)
    for name in uncovered():
        print(f"not covered: {name}")
    with contextlib.ExitStack() as stack:
        if not given.compiled:
            stack.enter_context(without_flex())
        return run(given)


def without_flex() -> contextlib.AbstractContextManager[object]:
    """Leave FlexAttention out of what "auto" prefers."""
    module = importlib.import_module("massieu.ops.attention")
    eager = tuple(backend for backend in module.BACKENDS if backend.name != "flex")
    return mock.patch.object(module, "BACKENDS", eager)


def run(given: argparse.Namespace) -> int:
    """The cases, one after the other."""
    start, counts, wrong = time.monotonic(), collections.Counter(), 0
    indices = range(given.first, given.first + given.cases)
    for found in failures(given.seed, indices, given.device, given.kernel):
        if time.monotonic() - start > given.seconds:
            break
        if isinstance(found, str):
            counts[found] += 1
            continue
        wrong += 1
        counts[found.kernel] += 1
        again = f"--seed {given.seed} --first {found.index} --cases 1"
        again += f" --kernel {given.kernel}" if given.kernel else ""
        again += f" --device {given.device}" if given.device != "cpu" else ""
        print(f"{again}: {found.kernel}({found.words}): {'; '.join(found.wrong)}", flush=True)
    table = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
    seconds = time.monotonic() - start
    print(f"{sum(counts.values())} cases on {given.device} in {seconds:.0f} s, {wrong} wrong: {table}")
    return int(wrong > 0 or bool(uncovered()))
