"""What a monitor warns of, most of it once."""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from massieu.probing.capture.sites import SiteInfo
from massieu.probing.checks.check import FirstLook
from massieu.probing.model.checkpoint import shortened
from massieu.probing.monitor.quantities import LARGEST, NEED_SCORES
from massieu.probing.monitor.site_numbers import SiteNumbers
from massieu.probing.monitor.stream_numbers import StreamNumbers
from massieu.probing.monitor.trouble import trouble
from massieu.probing.monitor.warning import warn

Item = TypeVar("Item", bound=Hashable)


class Notices:
    """The warnings of one monitor, and of what it has warned already.

    Args:
        model_name: what the model is called in them.
    """

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._noticed: dict[str, set[Hashable]] = {}  # by the kind of warning

    def _new(self, kind: str, items: Iterable[Item]) -> list[Item]:
        """The items of which there was no warning of this kind yet; from now on there was one."""
        noticed = self._noticed.setdefault(kind, set())
        new = [item for item in items if item not in noticed]
        noticed.update(new)
        return new

    def _is_new(self, kind: str) -> bool:
        """Whether there was no warning of this kind yet."""
        return bool(self._new(kind, [None]))

    # Of the model --------------------------------------------------------------------------------------------------

    def attention_left_out(self, look: FirstLook) -> None:
        """Attention that is not measured, or not wholly."""
        without_scores = [info.site.name for info in look.sites if info.grade == "scores"]
        if without_scores:
            warn(
                f"{', '.join(NEED_SCORES)} are left out of {len(without_scores)} attention modules ({without_scores[0]} is "
                "the first): their scores are not known apart from their biases, or go through no softmax"
            )
        for name, reason in look.refused.items():
            warn(f"{name or self._model_name} is not measured: {reason}")
        if look.silent:
            warn(
                f"{len(look.silent)} modules look like attention but were not seen attending, so they are not "
                f"measured: {shortened(look.silent, 5)}"
            )

    def sites_found_again(self) -> None:
        """The model has changed."""
        warn(f"{self._model_name} computes attention in other places than before; its sites are found again")

    def attention_elsewhere(self) -> None:
        """The training step attends where it did not before."""
        warn(
            f"{self._model_name} computes attention in other places than before, which watch and clip leave out; "
            "call the monitor, which finds its sites again"
        )

    def unseen_in_compiled_code(self, unseen: Sequence[SiteInfo]) -> None:
        """Sites of a compiled model that cannot be watched."""
        warn(
            f"watch and clip leave out {len(unseen)} attention modules of the compiled {self._model_name} "
            f"({unseen[0].site.name} is the first), which compute attention in another way than by "
            "scaled_dot_product_attention"
        )

    def stream_left_out(self) -> None:
        """A compiled model shows its attention alone."""
        if self._is_new("stream"):
            warn(
                "in compiled code watch sees attention alone: rank and spread of the stream are left out of its records"
            )

    def unknown_padding(self, lengths: Collection[int]) -> None:
        """Lengths at which padding counts as tokens, because nothing in one pass tells where it is."""
        new = self._new("padding", lengths)
        if new:
            words = " and ".join(str(length) for length in sorted(new))
            warn(
                f"the batch's mask does not fit sequences of length {words} inside {self._model_name}; "
                "where a layer shortens the text, its queries that are padding count too"
            )

    def failed_statistics(self, reasons: Mapping[str, str]) -> None:
        """Functions of the user's own that have failed: training goes on without their numbers."""
        for name in self._new("statistics", reasons):
            warn(f"{name} could not be computed and is left out of this record: {reasons[name]}")

    # Of a record ---------------------------------------------------------------------------------------------------

    def norms_left_out(self) -> None:
        """Weights of which no tensor tells how they are sharded."""
        if self._is_new("norms"):
            warn(
                "FullyShardedDataParallel gives each process a share of weights and gradients, so that their norms are left "
                "out; record the gradient norm with monitor(step, gradient_norm=norm), where norm is what the model's "
                "clip_grad_norm_ returned, or shard with torch.distributed.fsdp.fully_shard"
            )

    def clipped_norm(self, norm: float) -> None:
        """A gradient norm that looks as if it were measured after clipping."""
        warn(
            f"the gradient norm is {norm:.4g} again and again, as if it were measured after clipping; record the one "
            "before with monitor(step, gradient_norm=norm), where norm is what clip_grad_norm_ returned"
        )

    def of_record(self, step: int, sites: Sequence[SiteNumbers], stream: Mapping[str, StreamNumbers]) -> None:
        """What is wrong with the numbers of a record."""
        self._nonfinite(step, sites)
        for site in sites:
            self._beyond_limit(step, site)
        self._collapsed(step, stream)

    def _nonfinite(self, step: int, sites: Sequence[SiteNumbers]) -> None:
        """One warning for all heads whose numbers are not finite for the first time."""
        new = {site.place: self._new(f"nonfinite {site.place}", site.broken_heads()) for site in sites}
        if any(new.values()):
            warn(f"at step {step}, {trouble(sites, new)}")

    def _beyond_limit(self, step: int, site: SiteNumbers) -> None:
        """Heads whose logits are larger than their type holds; kernels that keep scores in it lose them."""
        new = self._new(f"limit {site.place}", site.heads_beyond_limit())
        if new:
            largest = site.values(LARGEST)[new].max()
            warn(
                f"at step {step}, {site.place} has logits up to {largest:.4g} in head {', '.join(map(str, new))}, and its "
                f"type holds {site.limit:.4g} at most"
            )

    def _collapsed(self, step: int, stream: Mapping[str, StreamNumbers]) -> None:
        """Layers behind which tokens have become one point."""
        new = self._new("collapsed", [layer for layer, numbers in stream.items() if numbers.collapsed])
        if new:
            warn(
                f"at step {step}, the tokens of a row are one point up to rounding behind {shortened(new, 5)}; its "
                "effective rank is recorded as 1"
            )

    # Of clipping logits --------------------------------------------------------------------------------------------

    def begins_clipping(self, frozen: bool) -> bool:
        """Whether no block was clipped yet, with this setting of ``frozen``."""
        return self._is_new(f"refusals {frozen}")

    def clip_refusals(self, reasons: Mapping[str, str]) -> None:
        """Modules that cannot be clipped, said before a logit is so large that it is an error."""
        if not reasons:
            return
        name, reason = next(iter(reasons.items()))
        warn(
            f"clip cannot scale the heads of {shortened(reasons, 3)}, and raises an error once a logit there is above the "
            f"bound; of {name or 'the model'}: {reason}"
        )

    def nothing_clipped(self, step: int, modules: Iterable[str]) -> None:
        """Modules whose largest logits are not finite."""
        new = self._new("unclipped", modules)
        if new:
            warn(
                f"at step {step} the largest logits of {shortened(new, 5)} are not finite; nothing is clipped while some are"
            )
