"""Attention statistics of one model and text by `massieu.probe`, beside what people write by hand or with other packages.

    python benchmarks/peers.py [--packages FOLDER ...] [--windows 16] [--rounds 1] [--only NAME ...]

GPT-2 small's shape with random weights, without its head (12 layers, 12 heads, width 768), windows of 512 random tokens,
four a batch, float32, one thread. Each side runs in a process of its own; the sides take turns. Seconds are those of the
CPU; memory is the peak above that of a process that has only imported the packages, so the model's weights count. A peer's
packages are looked for in the folders that are given, so that two versions of one package can run; what is not installed is
skipped with a line. The numbers that a side finds are compared with the others'.
"""

import argparse
import importlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

LAYERS, HEADS, WIDTH, WORDS, LENGTH, BATCH = 12, 12, 768, 50257, 512, 4
SUMS = ("entropy", "largest weight", "sample size", "first token")
BARE = "no standard errors, controls, log Z or selective log Z"
MISSING = 3  # a process's status where a package is not installed
Side = Callable[[list[Tensor]], Tensor | None]


def model(implementation: str = "sdpa", head: bool = False) -> Any:
    """The same random weights each time."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_layer=LAYERS, n_head=HEADS, n_embd=WIDTH, attn_implementation=implementation
    )
    return (transformers.GPT2LMHeadModel if head else transformers.GPT2Model)(config).eval()


def sums(weights: Tensor) -> Tensor:
    """Sums over items and queries of what `SUMS` names, from attention weights (B, H, L, N); shape (4, H)."""
    logarithm = weights.clamp_min(1e-30).log()
    found = (
        -(weights * logarithm).sum(-1),
        weights.amax(-1),
        1 / weights.square().sum(-1),
        weights[..., 0],
    )
    return torch.stack([each.sum((0, 2), dtype=torch.float64) for each in found])


def means(total: Tensor, batches: list[Tensor]) -> Tensor:
    return total / sum(batch.numel() for batch in batches)


# --- the sides ---------------------------------------------------------------------------------------------------------


def forward() -> Side:
    net = model()

    def run(batches: list[Tensor]) -> None:
        for batch in batches:
            net(batch, use_cache=False)

    return run


def eager_outputs() -> Side:
    net = model("eager")

    def run(batches: list[Tensor]) -> Tensor:
        total = torch.zeros(LAYERS, len(SUMS), HEADS, dtype=torch.float64)
        for batch in batches:
            given = net(batch, use_cache=False, output_attentions=True).attentions
            total += torch.stack([sums(weights) for weights in given])
        return means(total, batches)

    return run


def _from_projection(projected: Tensor) -> Tensor:
    """Sums from a layer's queries, keys and values in one tensor."""
    query, key, _ = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in projected.split(WIDTH, dim=-1))
    hidden = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).triu(1)
    scores = (query @ key.mT).mul_(query.shape[-1] ** -0.5).masked_fill_(hidden, -torch.inf)
    return sums(scores.softmax(-1))


def own_hook() -> Side:
    net = model()
    total = torch.zeros(LAYERS, len(SUMS), HEADS, dtype=torch.float64)
    for layer, block in enumerate(net.h):
        # It keeps nothing of a batch; `place` is bound now.
        def look(_: Any, __: Any, projected: Tensor, place: Tensor = total[layer]) -> None:
            place.add_(_from_projection(projected))

        block.attn.c_attn.register_forward_hook(look)

    def run(batches: list[Tensor]) -> Tensor:
        for batch in batches:
            net(batch, use_cache=False)
        return means(total, batches)

    return run


def nnsight() -> Side:
    from nnsight import NNsight

    net = NNsight(model())

    def run(batches: list[Tensor]) -> Tensor:
        total = torch.zeros(LAYERS, len(SUMS), HEADS, dtype=torch.float64)
        for batch in batches:
            with net.trace(batch, use_cache=False):
                for layer in range(LAYERS):
                    total[layer].add_(_from_projection(net.h[layer].attn.c_attn.output))
        return means(total, batches)

    return run


def _transformer_lens() -> Any:
    """The same weights in TransformerLens: version 4's bridge, or version 3's own model."""
    import transformer_lens

    if "HookedTransformer" in dir(transformer_lens):  # version 4 raises where it is asked for
        config = transformer_lens.HookedTransformerConfig(
            n_layers=LAYERS, d_model=WIDTH, n_ctx=1024, d_head=WIDTH // HEADS, n_heads=HEADS, d_mlp=4 * WIDTH,
            d_vocab=WORDS, act_fn="gelu_new", normalization_type="LN", device="cpu", seed=0,
        )  # fmt: skip
        return transformer_lens.HookedTransformer(config).eval()
    net = model("eager", head=True)
    net.config.architectures = ["GPT2LMHeadModel"]
    with tempfile.TemporaryDirectory() as folder:
        net.config.save_pretrained(folder)
        return transformer_lens.TransformerBridge.boot_transformers(folder, hf_model=net)


def transformer_lens_hooks() -> Side:
    net = _transformer_lens()

    def run(batches: list[Tensor]) -> Tensor:
        total = torch.zeros(LAYERS, len(SUMS), HEADS, dtype=torch.float64)

        def look(pattern: Tensor, hook: Any) -> None:
            total[hook.layer()].add_(sums(pattern))

        # The logits are left out where it can: the forward pass that all are compared with has none.
        for batch in batches:
            wanted = [(lambda name: name.endswith("attn.hook_pattern"), look)]
            net.run_with_hooks(batch, return_type=None, fwd_hooks=wanted)
        return means(total, batches)

    return run


def transformer_lens_cache() -> Side:
    net = _transformer_lens()

    def run(batches: list[Tensor]) -> Tensor:
        total = torch.zeros(LAYERS, len(SUMS), HEADS, dtype=torch.float64)
        for batch in batches:
            _, cache = net.run_with_cache(batch, return_type=None)
            total += torch.stack([sums(cache["pattern", layer]) for layer in range(LAYERS)])
        return means(total, batches)

    return run


def ours(**options: Any) -> Side:
    import massieu

    net, names = model(), ("entropy", "largest_weight", "effective_sample_size", "weight_first")

    def run(batches: list[Tensor]) -> Tensor:
        result = massieu.probe(
            net, massieu.Batches([{"input_ids": batch} for batch in batches], window=LENGTH), **options
        )
        table = {(r["layer"], r["statistic"], r["head"]): r["value"] for r in result.heads.rows(named=True)}
        found = [[[table[a, name, b] for b in range(HEADS)] for name in names] for a in range(LAYERS)]
        return torch.tensor(found, dtype=torch.float64)

    return run


# What is prepared, what it cannot give, and whether it reads the same weights as the others.
SIDES: dict[str, tuple[Callable[[], Side], str, bool]] = {
    "plain forward": (forward, "nothing is measured", False),
    "eager, output_attentions": (eager_outputs, BARE, True),
    "a hook of one's own": (own_hook, BARE, True),
    "nnsight": (nnsight, BARE, True),
    "TransformerLens, hooks": (transformer_lens_hooks, BARE, False),
    "TransformerLens, run_with_cache": (transformer_lens_cache, BARE, False),
    "massieu, quick": (lambda: ours(statistics="quick"), "standard errors and log Z, no controls", True),
    "massieu, attention": (lambda: ours(statistics=["attention"]), "all of these", True),
    "massieu, everything": (ours, "all of these", True),
}

PACKAGES = {
    "nnsight": ("nnsight",),
    "TransformerLens": ("transformer_lens",),
    "massieu": ("massieu.probing.run", "polars", "scipy.stats"),
}
"""What a side imports, at once or when it first needs it, by how its name begins: not in its seconds and its memory."""


# --- running them ------------------------------------------------------------------------------------------------------


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)


def alone(name: str, windows: int) -> None:
    """In a process of its own: one side, its seconds, gibibytes and numbers as a line of JSON."""
    torch.set_num_threads(1)
    try:
        for start, packages in PACKAGES.items():
            for package in packages if name.startswith(start) else ():
                importlib.import_module(package)
    except ModuleNotFoundError as error:
        print(f"{error.name} is not installed")
        raise SystemExit(MISSING) from error
    before = _peak()
    run = SIDES[name][0]()
    torch.manual_seed(1)
    batches = list(torch.randint(WORDS, (windows, LENGTH)).split(BATCH))
    started = time.process_time()
    # As a user does: ours looks after its modes itself.
    with torch.no_grad():
        found = run(batches)
    seconds = time.process_time() - started
    numbers = None if found is None else found.flatten().tolist()
    print(json.dumps({"seconds": seconds, "gibibytes": _peak() - before, "numbers": numbers}))


def started(name: str, windows: int, folder: str | None) -> dict[str, Any] | str:
    """What a side found in a process of its own, or why it was skipped."""
    path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--alone", name, "--windows", str(windows)]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    if ended.returncode == MISSING:
        return ended.stdout.splitlines()[-1]
    if ended.returncode:
        raise RuntimeError(f"{name} ended with status {ended.returncode}\n{ended.stderr}")
    return json.loads(ended.stdout.splitlines()[-1])


def compare(windows: int, rounds: int, folders: list[str], names: list[str]) -> list[dict[str, Any]]:
    """Every side, in turn; ratios are to the plain forward pass of the same run."""
    sides = [
        (n, f) for n in names for f in (folders if n.startswith(("nnsight", "TransformerLens")) and folders else [None])
    ]
    runs: dict[tuple[str, str | None], list[dict[str, Any]]] = {}
    for _ in range(rounds):
        for side in sides:
            found = started(side[0], windows, side[1])
            if isinstance(found, dict):
                runs.setdefault(side, []).append(found)
            else:
                print(f"{side[0]} is skipped: {found}{f' in {side[1]}' if side[1] else ''}", flush=True)
    reference = {key: statistics.median(r[key] for r in runs[names[0], None]) for key in ("seconds", "gibibytes")}
    numbers = next((found[0]["numbers"] for (name, _), found in runs.items() if SIDES[name][2]), None)
    rows = []
    for (name, folder), found in runs.items():
        row: dict[str, Any] = {"side": name, "packages": folder, "rounds": len(found), "gives": SIDES[name][1]}
        for key in reference:
            row[key] = statistics.median(each[key] for each in found)
            row[f"{key}_ratio"] = row[key] / reference[key]
        if SIDES[name][2] and numbers is not None:
            differences = torch.tensor(found[0]["numbers"]) / torch.tensor(numbers) - 1
            row["largest_difference"] = float(differences.abs().max())
        rows.append(row)
        said = "" if "largest_difference" not in row else f", differs by {row['largest_difference']:.0e} at most"
        print(
            f"{name:32} {row['seconds']:6.1f} s ({row['seconds_ratio']:.2f}×), "
            f"{row['gibibytes']:.2f} GiB ({row['gibibytes_ratio']:.2f}×){said}; {row['gives']}",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--packages", nargs="*", default=[], metavar="FOLDER")
    parser.add_argument("--only", nargs="*", choices=list(SIDES), help="these beside the plain forward pass")
    parser.add_argument("--alone", choices=list(SIDES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        alone(options.alone, options.windows)
        return
    first, *others = SIDES
    names = [first, *(name for name in others if options.only is None or name in options.only)]
    compare(options.windows, options.rounds, options.packages, names)


if __name__ == "__main__":
    main()
