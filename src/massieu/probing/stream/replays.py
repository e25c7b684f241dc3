"""The replays of all attention sites of one model: for each site, the way from the stream to its queries is found once."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxtyping import Int
from torch import Tensor, nn

from massieu.probing.capture.capture import Capture
from massieu.probing.capture.sites import SiteInfo
from massieu.probing.stream.replay import HeadProjection, Replay
from massieu.probing.stream.wiring import Step

NO_ORDER = (
    "the batch has as many items as tokens, and the module does not say by batch_first which of its dimensions is which; "
    "batches of another length or size do"
)
SCORES_ONLY = (
    "its scores are not known as an affine function of queries and keys, so they cannot be told apart from log-weights"
)


def why_no_maps(info: SiteInfo) -> str | None:
    """Why a site's maps between stream and head cannot be known, as far as its first call shows; None if it shows nothing."""
    if info.grade == "scores":
        return SCORES_ONLY
    return NO_ORDER if info.tokens_first is None else None


def why_no_replay(info: SiteInfo) -> str | None:
    """Why a site's queries cannot be replayed, as far as its first call shows; None if it shows nothing."""
    reason = why_no_maps(info)
    if reason is None and info.moving:
        return "its log-weights are computed from the queries or keys, and move with them"
    return reason


@dataclass(eq=False)
class _Way:
    """The way from stream to query at one site, as far as it is known.

    Attributes:
        reason: why the queries cannot be replayed; None if they can, or before the first try.
        checked: whether a replay was tried.
        whole, affine, linear: of the replay; see `Replay`.
    """

    reason: str | None
    checked: bool = False
    whole: bool = False
    affine: HeadProjection | None = None
    linear: nn.Linear | None = None


class Replays:
    """Makes replays of steps, or says why they cannot be made."""

    def __init__(self, sites: Sequence[SiteInfo], *, keep: bool = True) -> None:
        """Start with what each site's first call has shown.

        Args:
            keep: whether the way that is found at a site serves its later steps. It may hold a copy of the site's weights.
        """
        self._keep = keep
        self._ways = {info.site.name: _Way(why_no_replay(info)) for info in sites}

    def of(self, capture: Capture, item: Step, positions: Int[Tensor, " S"]) -> Replay | str:
        """The queries of one row's step as functions of the stream; or one sentence that says why they cannot be replayed.

        The first replay of a site must reproduce the module's queries: on part of the sequence or, more slowly, on all of it.
        """
        assert item.read is not None
        way = self._ways[item.read.call.site.name]
        if way.reason is not None:
            return way.reason
        replay = Replay(capture, item.read, way.affine, way.whole, way.linear)
        if way.checked:
            return replay
        way.checked = self._keep
        # A map that is found has already reproduced the module's queries, and then the module is not called again.
        affine = replay.query_map(positions)
        if affine is None:
            reason = replay.why_not(positions)
            if reason is not None:
                replay = replace(replay, whole=True)
                if replay.why_not(positions) is not None:
                    way.reason = reason
                    return reason
                affine = replay.query_map(positions)
        replay = replace(replay, affine=affine).in_two_parts(positions)
        if self._keep:
            way.whole = replay.whole
            way.affine = replay.affine
            way.linear = replay.linear
        return replay
