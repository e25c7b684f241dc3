"""Forward passes whose attention a monitor looks at, its own or those of the training step."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from massieu.probing.capture.attention_call import AttentionCall
from massieu.probing.capture.capture import recomputing
from massieu.probing.capture.compiled import CompiledPasses
from massieu.probing.capture.routes import capturing
from massieu.probing.capture.sites import SiteInfo
from massieu.probing.capture.tokens import BatchTokens, Tokens
from massieu.probing.checks.check import FirstLook
from massieu.probing.model.forward import called_with
from massieu.probing.model.watching import hooked


class WatchedPasses(ABC):
    """Forward passes whose attention calls are looked at: which known site each is of, and which tokens it has.

    Attributes:
        look: the sites that are known.
        tokens: of the pass that runs.
        elsewhere: the model attended at a place that is not known.
    """

    def __init__(self, model: nn.Module, look: FirstLook, inputs: dict[str, Any]) -> None:
        self.model = model
        self.look = look
        self.infos = {info.site: info for info in look.sites}
        self.elsewhere = False
        self.begin(inputs)

    def begin(self, inputs: dict[str, Any]) -> None:
        """A forward pass begins, which is given these inputs."""
        self.inputs = inputs
        self.tokens = BatchTokens(inputs)

    @contextmanager
    def of_training(self) -> Iterator[None]:
        """Take every call of the model for a forward pass of its own, and learn which tokens its batch has."""
        with capturing(self.model, self.observe) as capture:

            def before(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
                # What activation checkpointing computes again is no pass of its own.
                if not recomputing():
                    capture.begin_pass()
                    self._begin_with(arguments, keywords)

            with hooked([self.model], before=before):
                yield

    @contextmanager
    def of_compiled_training(self, passes: CompiledPasses) -> Iterator[None]:
        """The same of a model that is compiled."""
        with passes.reading(self.observe, before=self._begin_with):
            yield
        if passes.elsewhere:
            self.elsewhere = True
            self.forget()

    def _begin_with(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self.begin(called_with(self.model, arguments, keywords))

    @torch.no_grad()
    def observe(self, call: AttentionCall) -> None:
        """The observer of a capture."""
        info = self.infos.get(call.site)
        if info is None and call.site.module_name in self.look.refused:
            return
        if info is None or call.query.shape[1] != info.heads:
            self.elsewhere = True
            return
        if not call.repeated:
            queries = self.tokens.of(call, decoder=info.in_decoder, cross=info.kind == "cross")
            self.take(call, info, queries)

    @abstractmethod
    def forget(self) -> None:
        """Forget all calls that were taken."""

    @abstractmethod
    def take(self, call: AttentionCall, info: SiteInfo, queries: Tokens) -> None:
        """Look at the call of a known site."""
