"""Training loops as people write them, each with a monitor of its attention.

Take the loop that is most like yours, and copy the lines that name the monitor: one that makes it, and one that calls it or
hands over its callback. Training is the same with and without them, bit for bit; a test compares all weights of every loop.

`nanogpt` accumulates micro-batches under bfloat16 autocast, clips gradients and has a cosine rate. `trainer` is that of
transformers; `accelerate` and `lightning` are those packages' own. `lora` trains an adapter with PEFT, `vit` a vision
transformer on scikit-learn's digits, and `ddp` shares its batches between processes.

Run: python examples/training_loops.py --loop NAME
     torchrun --nproc-per-node 2 examples/training_loops.py --loop ddp
"""

import argparse
import math
from collections.abc import Callable
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import massieu
from massieu.probing.monitor.record import MonitorRecord

STEPS, EVERY, MICRO_BATCHES = 12, 4, 2
CHARACTERS, CONTEXT, WIDTH, HEADS = 256, 32, 32, 4
TEXT = torch.tensor(list("\n".join(topics.values()).encode()))
FIXED = TEXT[torch.arange(8)[:, None] * 10_000 + torch.arange(CONTEXT)]
"""The batch that every monitor of a language model measures."""

Target = Callable[[MonitorRecord, int], None] | None
"""Where records go; None trains without the monitor."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        heads = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.first(x)).chunk(3, dim=2))
        mixed = F.scaled_dot_product_attention(*heads, dropout_p=0.1 if self.training else 0.0, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.feed(self.second(x)))


class GPT(nn.Module):
    """A language model of characters, as nanoGPT writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(CHARACTERS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CHARACTERS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(ids) + self.places.weight[: ids.shape[1]])))


def windows(count: int) -> Tensor:
    """Pieces of the text, one character longer than the context, drawn at random."""
    return TEXT[torch.randint(len(TEXT) - CONTEXT - 1, (count, 1)) + torch.arange(CONTEXT + 1)]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def cosine(step: int) -> float:
    """A rate that rises for three steps and then falls to a tenth."""
    return min(1.0, (step + 1) / 3) * (0.1 + 0.9 * (1 + math.cos(math.pi * step / STEPS)) / 2)


def nanogpt(to: Target) -> nn.Module:
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    monitor = massieu.Monitor(model, FIXED, every=EVERY, optimizer=optimizer, to=to) if to else None
    for step in range(1, STEPS + 1):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * cosine(step)
        total = torch.tensor(0.0)
        for _ in range(MICRO_BATCHES):
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model, windows(8)) / MICRO_BATCHES
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if monitor:
            with torch.autocast("cpu", torch.bfloat16):  # as training computes
                monitor(step, loss=total, gradient_norm=norm)  # the norm before clipping
    return model


def trainer(to: Target) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": HEADS, "n_embd": WIDTH, "vocab_size": CHARACTERS, "n_positions": CONTEXT}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False))
    rows = [{"input_ids": row, "labels": row} for row in windows(64)[:, :-1]]
    monitor = massieu.Monitor(model, {"input_ids": FIXED}, every=EVERY, to=to) if to else None
    arguments = TrainingArguments(
        output_dir="massieu-results/trainer", max_steps=STEPS, per_device_train_batch_size=4, bf16=True, use_cpu=True,
        gradient_accumulation_steps=MICRO_BATCHES, learning_rate=1e-2, lr_scheduler_type="cosine", warmup_steps=3,
        logging_steps=1, report_to="none", save_strategy="no",
    )  # fmt: skip
    callbacks = [monitor.trainer_callback()] if monitor else []
    Trainer(model, arguments, train_dataset=rows, callbacks=callbacks).train()
    return model


def accelerate(to: Target) -> nn.Module:
    from accelerate import Accelerator

    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=MICRO_BATCHES, cpu=True)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine)
    loader = DataLoader(TensorDataset(windows(8 * MICRO_BATCHES * STEPS)), batch_size=8, shuffle=True)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    monitor = massieu.Monitor(model, FIXED, every=EVERY, optimizer=optimizer, to=to) if to else None
    losses = []
    for number, (batch,) in enumerate(loader, 1):
        with accelerator.accumulate(model):
            loss = loss_of(model, batch)
            losses.append(loss.detach())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if monitor and accelerator.sync_gradients:
            mean = torch.stack(losses[-MICRO_BATCHES:]).mean()
            monitor(number // MICRO_BATCHES, loss=mean, gradient_norm=norm)
    return model


def lightning(to: Target) -> nn.Module:
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = GPT()

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return loss_of(self.network, batch[0])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    torch.manual_seed(0)
    module = Module()
    loader = DataLoader(TensorDataset(windows(8 * STEPS)), batch_size=8, shuffle=True)
    monitor = massieu.Monitor(module.network, FIXED, every=EVERY, to=to) if to else None
    callbacks = [monitor.lightning_callback()] if monitor else []
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "enable_progress_bar": False,
    }
    settings = {"max_epochs": 1, "precision": "bf16-mixed", "gradient_clip_val": 1.0, "accelerator": "cpu"}
    Trainer(callbacks=callbacks, **settings, **quiet).fit(module, loader)
    return module.network


def lora(to: Target) -> nn.Module:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "hidden_size": WIDTH, "intermediate_size": 64, "vocab_size": CHARACTERS}
    base = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=HEADS, num_key_value_heads=2, use_cache=False))
    model = get_peft_model(base, LoraConfig(target_modules=["q_proj", "v_proj"], r=4, lora_dropout=0.1))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    monitor = massieu.Monitor(model, {"input_ids": FIXED}, every=EVERY, optimizer=optimizer, to=to) if to else None
    for step in range(1, STEPS + 1):
        ids = windows(8)
        prompt = torch.arange(ids.shape[1]) < 10
        loss = model(input_ids=ids, labels=ids.masked_fill(prompt, -100)).loss  # the answer alone is learned
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if monitor:
            monitor(step, loss=loss)  # without clipping, the monitor takes the gradient norm itself
    return model


class ViT(nn.Module):
    """A vision transformer: 2 × 2 patches of images of 8 × 8, and a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, kernel_size=2, stride=2)
        self.first, self.places = nn.Parameter(torch.zeros(1, 1, WIDTH)), nn.Parameter(0.02 * torch.randn(17, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images[:, None]).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.first.expand(len(images), -1, -1), tokens], dim=1) + self.places
        return self.head(self.encoder(tokens)[:, 0])


def vit(to: Target) -> nn.Module:
    from sklearn.datasets import load_digits

    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32)
    loader = DataLoader(TensorDataset(images, torch.tensor(digits.target)), batch_size=64, shuffle=True)
    model = ViT()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=STEPS)
    monitor = massieu.Monitor(model, images[:16], every=EVERY, optimizer=optimizer, to=to) if to else None
    for step, (batch, targets) in zip(range(1, STEPS + 1), loader, strict=False):
        loss = F.cross_entropy(model(batch), targets, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if monitor:
            monitor(step, loss=loss, gradient_norm=norm)
    return model


def ddp(to: Target) -> nn.Module:
    rank, processes = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    network = GPT()
    torch.manual_seed(1 + rank)  # other batches and other dropout in every process
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    share = FIXED.chunk(processes)[rank]
    monitor = massieu.Monitor(model, share, every=EVERY, optimizer=optimizer, to=to) if to else None
    for step in range(1, STEPS + 1):
        loss = loss_of(model, windows(8))
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if monitor:  # in every process; the record is of all shares together
            monitor(step, loss=loss, gradient_norm=norm)
    return network


LOOPS = {loop.__name__: loop for loop in (nanogpt, trainer, accelerate, lightning, lora, vit, ddp)}


def shown(record: MonitorRecord, step: int) -> None:
    parts = {"loss": "loss", "gradient norm": "gradient_norm", "largest logit": "largest_logit_max"}
    known = {name: record[f"massieu/{key}"] for name, key in parts.items() if f"massieu/{key}" in record}
    numbers = ", ".join(f"{name} {value:.3f}" for name, value in known.items())
    print(f"step {step}: {numbers} in {record.where['massieu/largest_logit_max']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loop", choices=LOOPS, default="nanogpt", help="ddp is started by torchrun")
    name = parser.parse_args().loop
    if name == "ddp":
        dist.init_process_group("gloo")
    LOOPS[name](shown)
    if name == "ddp":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
