"""A model and one prompt or batch, of which the wanted attention weights are read, one site after the other."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from massieu.errors import InputError
from massieu.foundation.arguments import described
from massieu.foundation.transforms import in_autocast_dtype, without_autocast
from massieu.probing.capture.attention_call import AttentionCall, AttentionSite, explicit_weights
from massieu.probing.capture.routes import capturing
from massieu.probing.capture.sites import SiteInfo, stack_of
from massieu.probing.capture.tokens import BatchTokens
from massieu.probing.checks.check import check_evaluating, check_readable, first_look
from massieu.probing.checks.nonfinite import in_batch
from massieu.probing.data.prompt import is_messages, prompt_batch
from massieu.probing.data.text import token_strings
from massieu.probing.data.token_names import frames_of, token_names
from massieu.probing.model.forward import named_inputs, real_mask, run
from massieu.probing.model.given import Checkpoint, Model, given_model
from massieu.probing.model.model import load_model, load_tokenizer
from massieu.probing.model.model_inputs import model_inputs, with_target
from massieu.probing.model.positions import max_positions
from massieu.probing.model.tokenizers import check_ids, check_tokenizer
from massieu.probing.model.trunk import readable_trunk
from massieu.probing.model.unwrap import module_in, tokenizer_of
from massieu.probing.weights.site_weights import SiteAttention

SCORES = 2**22
"""Scores in float64 that are formed at a time."""


@dataclass(frozen=True, eq=False)
class WeightsReading:
    """A model, the batch that it is given, and where it attends.

    Attributes:
        name: what the model is called.
        inputs: what its forward is called with.
        sites: where it attends, in order.
        refused: modules whose attention cannot be read, with the reason.
    """

    module: nn.Module
    name: str
    tokenizer: Any
    inputs: dict[str, Any]
    sites: list[SiteInfo]
    refused: dict[str, str]

    @classmethod
    def create(cls, model: Model, inputs: Any, tokenizer: Any = None) -> "WeightsReading":
        """Load the model, make the prompt a batch, and check by one pass that attention is read as the model computes it.

        Args:
            inputs: a prompt, messages, or a batch in any form that the model's forward takes.
            tokenizer: a tokenizer, its folder or its name; None is the model's own.

        Raises:
            InputError: as `massieu.attention_weights`.
        """
        check_inputs(model, inputs)
        is_prompt = isinstance(inputs, str) or is_messages(inputs)
        module, name, tokenizer = _opened(given_model(model), tokenizer)
        check_evaluating(module.modules())
        if is_prompt:
            batch = _prompt_inputs(module, name, tokenizer, inputs)
        else:
            batch = with_target(module, named_inputs(module, inputs))
        check_ids(module, batch)
        look = first_look(module, batch)
        unseen = dict.fromkeys(look.silent, "it looks like attention, and was not seen attending")
        return cls(module, name, tokenizer, model_inputs(module, batch), look.sites, unseen | look.refused)

    def chosen(self, layers: Sequence[int] | None, heads: Sequence[int] | None) -> dict[AttentionSite, tuple[int, ...]]:
        """The heads of each site that is asked for.

        Raises:
            InputError: there is no such layer or head; the message says which there are.
        """
        all_layers = sorted({info.layer for info in self.sites})
        for layer in layers or ():
            if layer not in all_layers:
                raise InputError(
                    f"{self.name} has no layer {layer}; its layers are {all_layers[0]} to {all_layers[-1]}"
                )
        heads_of_site: dict[AttentionSite, tuple[int, ...]] = {}
        for info in self.sites:
            if layers is not None and info.layer not in layers:
                continue
            for head in heads or ():
                if head >= info.heads:
                    raise InputError(f"{info.site.name} has no head {head}; its heads are 0 to {info.heads - 1}")
            heads_of_site[info.site] = tuple(range(info.heads)) if heads is None else tuple(heads)
        return heads_of_site

    def layers_by_stack(self) -> dict[str, int]:
        """How many layers with self-attention each stack has."""
        places = {(stack_of(info.block), info.layer) for info in self.sites if info.itself}
        return dict(Counter(stack for stack, _ in places))

    def read(
        self,
        chosen: dict[AttentionSite, tuple[int, ...]],
        receive: Callable[[SiteAttention], None],
        before: Callable[[AttentionCall, tuple[int, ...]], None] = lambda call, heads: None,
    ) -> None:
        """Run the model and hand over the weights of the chosen heads, one site after the other.

        Args:
            before: is told of each chosen call before its weights are formed, and may refuse it.

        Warns:
            UserWarning: weights are NaN, with the place in the model where that begins.
        """
        sites = {info.site: info for info in self.sites}
        audio = frames_of(self.module, self.inputs)
        tokens = BatchTokens(self.inputs, frames=None if audio is None else audio.real)
        sites_with_nan: list[str] = []

        def observe(call: AttentionCall) -> None:
            info = sites.get(call.site)
            if info is None or call.repeated or call.site not in chosen:
                return
            # What is computed here is no part of the model, and no function mode is to see it.
            with torch._C.DisableTorchFunction():
                query, key = in_autocast_dtype(call.query, call.key)  # as the model's own attention casts them
                cast_call = replace(call, query=query, key=key)
                with without_autocast(query.device):
                    before(cast_call, chosen[call.site])
                    site = self._site_attention(info, cast_call, chosen[call.site], tokens)
                    if bool(site.has_nan().any()):
                        sites_with_nan.append(site.name)
                    receive(site)

        with torch.no_grad(), capturing(self.module, observe):
            run(self.module, self.inputs)
        if sites_with_nan:
            self._warn_of_nan(sites_with_nan)

    def _warn_of_nan(self, names: Sequence[str]) -> None:
        trouble = in_batch(self.module, self.inputs, real_mask(self.inputs, decoder=False), "this batch")
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        reason = "" if trouble is None else f"; {trouble.sentence}"
        warnings.warn(f"attention weights of {names[0]}{others} are NaN{reason}", stacklevel=3)

    def _site_attention(
        self, info: SiteInfo, call: AttentionCall, heads: tuple[int, ...], tokens: BatchTokens
    ) -> SiteAttention:
        cross = info.kind == "cross"
        queries = tokens.of(call, decoder=info.in_decoder, cross=cross)
        keys = tokens.of(call, decoder=info.in_decoder and not cross, keys=True, cross=cross)
        weights, sink = weights_of_heads(call, heads)
        batch = call.query.shape[0]
        length = call.query.shape[2]
        visible = call.visible().sum(-1).expand(batch, call.query.shape[1], length)
        return SiteAttention(
            name=info.site.name,
            layer=info.layer,
            stack=stack_of(info.block),
            kind=info.kind,
            heads=heads,
            num_heads=info.heads,
            weights=weights,
            sink=sink,
            no_distribution=call.no_distribution,
            same_tokens=info.itself,
            query_real=queries.real.cpu(),
            key_real=keys.real.cpu(),
            query_tokens=self._names(queries.ids, batch, length),
            key_tokens=self._names(keys.ids, batch, call.key.shape[2]),
            visible=visible[:, list(heads)].cpu(),
        )

    def _names(self, ids: Tensor | None, batch: int, length: int) -> list[list[str]] | None:
        """The tokens of each sequence: of a text by the tokenizer, of images and sounds by their places."""
        if ids is not None and self.tokenizer is not None:
            return [token_strings(self.tokenizer, row) for row in ids.tolist()]
        num_rows = next(len(value) for value in self.inputs.values() if isinstance(value, Tensor) and value.dim())
        if ids is not None or batch != num_rows:
            return None
        names: list[list[str]] = []
        for row in range(batch):
            names_of_row = next(iter(token_names(self.module, self.inputs, row).values()), None)
            if names_of_row is None or len(names_of_row) != length:
                return None
            names.append(names_of_row)
        return names


def check_inputs(model: Any, inputs: Any) -> None:
    """Raises:
    InputError: there is no prompt, or there are several.
    """
    if inputs is None:
        taken = f"; {model!r} was taken for the model, so write inputs= before it" if isinstance(model, str) else ""
        raise InputError(
            f"attention is about a prompt or a batch; give a text, a list of messages, or a batch of tensors{taken}"
        )
    if isinstance(inputs, list | tuple) and inputs and all(isinstance(each, str) for each in inputs):
        if len(inputs) == 1:
            raise InputError("a prompt is given as a text by itself, got a list of one text")
        raise InputError(f"one prompt is read at a time, got {len(inputs)} texts; call it for each of them")


def numbers_of(name: str, given: int | Iterable[int] | None) -> list[int] | None:
    """Numbers of layers or heads, each once and in the order given; None is all.

    Raises:
        InputError: they are not whole numbers from 0, or there is none.
    """
    if given is None:
        return None
    values = given.tolist() if isinstance(given, Tensor) else given
    listed = [values] if isinstance(values, Integral) else values
    if not isinstance(listed, Iterable) or isinstance(listed, str | bytes):
        raise InputError(f"{name} must be a whole number or a list of them, got {described(given)}")
    numbers: list[int] = []
    for number in listed:
        if not isinstance(number, Integral) or isinstance(number, bool) or int(number) < 0:
            raise InputError(f"{name} must be whole numbers from 0, got {described(number)}")
        numbers.append(int(number))
    if not numbers:
        raise InputError(f"{name} must name at least one; leave it out for all")
    return list(dict.fromkeys(numbers))


def weights_of_heads(call: AttentionCall, heads: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    """Weights (B, H, L, N) and the sink's share (B, H, L) of some heads, in main memory, formed in float64."""
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    device = call.query.device
    num_keys = call.key.shape[2]
    is_whole = tuple(heads) == tuple(range(call.query.shape[1]))
    chosen = call if is_whole else call.of_heads(torch.tensor(heads, device=device))
    batch, num_heads, length = chosen.query.shape[:3]
    weights = torch.empty(batch, num_heads, length, num_keys, dtype=dtype)
    sink = None if call.sink is None else torch.empty(batch, num_heads, length, dtype=dtype)
    queries_at_a_time = max(1, SCORES // max(1, batch * num_heads * num_keys))
    for positions in torch.arange(length, device=device).split(queries_at_a_time):
        part = slice(int(positions[0]), int(positions[-1]) + 1)
        of_keys, of_sink = explicit_weights(chosen.at(positions))
        weights[:, :, part] = of_keys.to("cpu", dtype)
        if sink is not None and of_sink is not None:
            sink[:, :, part] = of_sink.to("cpu", dtype)
    return weights, sink


def _opened(model: Checkpoint | nn.Module, tokenizer: Any) -> tuple[nn.Module, str, Any]:
    """A module, what it is called, and its tokenizer; None where there is none."""
    is_name = isinstance(tokenizer, str) or hasattr(tokenizer, "__fspath__")
    if isinstance(model, Checkpoint):
        if is_name:
            tokenizer = load_tokenizer(tokenizer, trust_remote_code=model.trust_remote_code)
        loaded = load_model(model, tokenizer=tokenizer is None)
        check_readable(loaded.module)
        return loaded.module, loaded.name, loaded.tokenizer if tokenizer is None else tokenizer
    if is_name:
        tokenizer = load_tokenizer(tokenizer)
    module = readable_trunk(model)
    return module, type(module_in(model)).__name__, tokenizer_of(model) if tokenizer is None else tokenizer


def _prompt_inputs(module: nn.Module, name: str, tokenizer: Any, prompt: Any) -> dict[str, Any]:
    """Raises:
    InputError: there is no tokenizer, or another model's; the prompt is empty, or longer than the model reads.
    """
    if tokenizer is None:
        raise InputError(f"{name} has no tokenizer to read a prompt with; give tokenizer=, or a batch of tensors")
    check_tokenizer(tokenizer, module, name)
    batch = prompt_batch(tokenizer, prompt)
    most = max_positions(module)
    length = batch["input_ids"].shape[1]
    if most is not None and length > most:
        raise InputError(f"the prompt has {length:,} tokens, and {name} has {most:,} positions; give a shorter one")
    return batch
