"""What a probe of a real decoder costs beside its own forward passes, as `benchmarks/probe.py` measures it of other models.

    python benchmarks/decoder.py

SmolLM2-135M-Instruct, which `make .venv/decoder` installs as a GGUF file, reads 256 windows of 512 tokens, without its
head. A forward pass of it fills a cache of keys and values, which a probe does without. About an hour.
"""

import torch

import harness
import probe

CASE = probe.Case("SmolLM2", 256, 512, 1)

if __name__ == "__main__":
    torch.set_num_threads(1)
    rates = harness.rates()
    harness.write("decoder", probe.beside_forward(CASE, rates), rates=rates)
