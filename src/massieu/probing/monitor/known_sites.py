"""Where a model attends, as one look at it has shown: the sites that a monitor measures."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from massieu.errors import InputError
from massieu.probing.capture.attention_call import AttentionSite
from massieu.probing.capture.compiled import fused_sites
from massieu.probing.checks.check import first_look
from massieu.probing.model.model_inputs import model_inputs
from massieu.probing.monitor.notices import Notices
from massieu.probing.monitor.places import layer_place, places
from massieu.probing.monitor.undisturbed import undisturbed


class KnownSites:
    """The attention sites of a model, and their places in records.

    Attributes:
        look: what the look at the model has shown.
        places: each site's place in records.

    Raises:
        InputError: a model that cannot be read, or whose recomputed attention differs from its own.
    """

    def __init__(self, model: nn.Module, inputs: dict[str, Any], notices: Notices) -> None:
        self._model = model
        self._notices = notices
        self.find(inputs)

    def find(self, inputs: dict[str, Any]) -> None:
        """Look at the model, which may have changed."""
        self.look = first_look(self._model, inputs)
        sites = [info.site for info in self.look.sites]
        self.places = dict(zip(sites, places(self.look.sites), strict=True))
        self._in_compiled_code: list[AttentionSite | None] | None = None
        self._notices.attention_left_out(self.look)

    @property
    def num_heads(self) -> int:
        """Of all sites together."""
        return sum(info.heads for info in self.look.sites)

    @property
    def num_layers(self) -> int:
        """Of all stacks together."""
        return len({(info.block, info.layer) for info in self.look.sites})

    def layer_names(self) -> dict[str, str]:
        """The name of each block's layer in records: of a block that is several layers, the first."""
        names: dict[str, str] = {}
        for info in self.look.sites:
            names.setdefault(info.block, layer_place(self.places[info.site], info))
        return names

    def have_blocks(self) -> bool:
        """Whether the model still has all blocks that hold sites."""
        names = {name for name, _ in self._model.named_modules()}
        return all(info.block in names for info in self.look.sites)

    def in_compiled_code(self, batch: Callable[[], dict[str, Any]]) -> Sequence[AttentionSite | None]:
        """The sites of the attention functions that compiled code calls, in order, as one pass without compilation shows them.

        Args:
            batch: gives the inputs of that pass, which is made at the first call.

        Raises:
            InputError: no site is among them.
        """
        if self._in_compiled_code is None:
            with undisturbed(self._model):
                sites = fused_sites(self._model, model_inputs(self._model, batch(), items=1))
            unseen = [info for info in self.look.sites if info.site not in sites]
            if len(unseen) == len(self.look.sites):
                raise InputError(
                    f"this compiled {type(self._model).__name__} cannot be watched: compiled code shows attention by "
                    "scaled_dot_product_attention alone, and it computes attention in another way; call the monitor, which "
                    "runs a batch uncompiled"
                )
            if unseen:
                self._notices.unseen_in_compiled_code(unseen)
            self._in_compiled_code = sites
        return self._in_compiled_code
