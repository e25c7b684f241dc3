"""What reading the attention calls of hand-written code adds to the model's own forward pass.

    python benchmarks/tap.py

float32, one thread, no gradients; an encoder of MiniLM's shape (6 layers, 12 heads, width 384) on 8 sequences of 128 tokens.
Its attention is written out, or calls PyTorch's own function. Entering and leaving the tap counts; the calls are dropped, so
statistics do not. Memory is the largest sum of PyTorch's living allocations. About a minute and a half.
"""

import argparse
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import harness
from massieu.probing.capture.routes import capturing

TIME_BAR, MEMORY_BAR = 1.06, 1.1
LAYERS, WIDTH, HEADS, ROWS, LENGTH = 6, 384, 12, 8, 128
ROUNDS = 61
HOW = {"written out": False, "PyTorch's function": True}


class Block(nn.Module):
    """Attention and a feed-forward layer, each added and normalised after."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        if self.fused:
            mixed = F.scaled_dot_product_attention(query, key, value, mask)
        else:
            scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5 + mask
            mixed = F.dropout(F.softmax(scores, dim=-1), 0.1, self.training) @ value
        x = self.first(x + self.out(mixed.transpose(1, 2).flatten(2)))
        return self.second(x + self.feed(x))


class Encoder(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(fused) for _ in range(LAYERS))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, mask)
        return x


def sides(name: str) -> tuple[harness.Work, harness.Work]:
    """The forward pass as it is, and with the tap."""
    torch.manual_seed(0)
    model = Encoder(HOW[name]).eval()
    x = torch.randn(ROWS, LENGTH, WIDTH)
    mask = torch.zeros(ROWS, 1, 1, LENGTH)
    mask[-1, ..., LENGTH // 2 :] = torch.finfo(torch.float32).min
    read: list[int] = []

    @torch.no_grad()
    def plain() -> Tensor:
        return model(x, mask)

    @torch.no_grad()
    def tapped() -> Tensor:
        read.clear()
        with capturing(model, lambda call: read.append(call.query.shape[1])):
            return model(x, mask)

    if not torch.equal(plain(), tapped()) or read != [HEADS] * LAYERS:
        raise RuntimeError(f"{name}: the tap read {len(read)} of {LAYERS} calls, or the output changed")
    return plain, tapped


def allocated(work: harness.Work) -> float:
    """The most mebibytes that the work's own allocations take at once."""
    work()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    assert profiled.profiler is not None and profiled.profiler.kineto_results is not None
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    living = accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(living) / 2**20


def row(name: str, rounds: int) -> harness.Comparison:
    works = sides(name)
    timing = harness.compare_times(*works, rounds=rounds)
    before, after = (allocated(work) for work in works)
    found = timing.reference_seconds, timing.seconds, timing.ratio, timing.interval, TIME_BAR
    peaks = before, after, after / before, MEMORY_BAR
    return harness.Comparison(f"attention {name}: with the tap", "without it", *found, *peaks, rounds=rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    harness.write("tap", [row(name, arguments.rounds) for name in harness.steps(HOW)])


if __name__ == "__main__":
    main()
