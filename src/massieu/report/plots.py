"""Figures of a result for a notebook: by plotly, or in axes of matplotlib that a user has made."""

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from massieu.errors import InputError
from massieu.foundation.arguments import of_class, whole_number
from massieu.foundation.doors import input_door, text
from massieu.report.axes_drawings import draw_depth, draw_distribution, draw_map
from massieu.report.matrix import matrix_of, rows_of, sites_with
from massieu.report.plot_data import DEPTH, Depth, Distribution, HeadMap
from massieu.report.plotly_figures import depth_figure, distribution_figure, map_figure
from massieu.report.tables import layer_columns, sublayers_of

if TYPE_CHECKING:
    import polars

    from massieu.storage.record import RunRecord, Statistic

_axes = partial(of_class, kind="Axes")


def check_axes(name: str, value: Any) -> None:
    """Raises:
    InputError: the value is no axes of matplotlib.
    """
    try:
        _axes(name, value)
    except TypeError as error:
        raise InputError(str(error)) from None


class ResultPlots:
    """Figures of a result, ``result.plot``: `map` of all heads, `head` for one, `depth` for the sublayers.

    Each returns a figure of plotly, which shows errors under the pointer and has ``write_html``. If axes of matplotlib are
    given as ``ax``, it draws there and returns them. ``result.plot("entropy")`` is ``result.plot.map("entropy")``.

    Example:
        >>> import massieu, torch
        >>> from transformers import BertConfig, BertModel
        >>> size = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 9}
        >>> model = BertModel(BertConfig(num_hidden_layers=3, **size)).eval()
        >>> result = massieu.probe(model, [{"input_ids": torch.arange(8)[None]}], statistics=["attention"])
        >>> figure = result.plot.map("entropy")  # figure.show(), figure.write_html("entropy.html")
        >>> len(figure.data[0].z)  # layers
        3
        >>> from matplotlib.figure import Figure
        >>> result.plot.head(2, 1, "entropy_fraction", ax=Figure().subplots()).get_ylabel()
        '% of tokens'
    """

    def __init__(
        self, run: "RunRecord", details: dict[str, Any], heads: "polars.DataFrame", layers: "polars.DataFrame"
    ) -> None:
        self._run = run
        self._details = details
        self._heads = heads
        self._layers = layers

    def __call__(self, statistic: str, *, attention: str | None = None, ax: Any = None) -> Any:
        """As `map`."""
        return self.map(statistic, attention=attention, ax=ax)

    def __repr__(self) -> str:
        return 'plots of a result: .map("entropy"), .head(layer, head), .depth(); with ax= in axes of matplotlib'

    @input_door(statistic=text, attention=text, ax=_axes)
    def map(self, statistic: str, *, attention: str | None = None, ax: Any = None) -> Any:
        """One statistic of every head: layers from top to bottom, heads from left to right.

        Args:
            statistic: a name of the table ``heads``, such as ``"entropy"`` or ``"entropy/reinitialised"``.
            attention: which kind, where a model has several, such as ``"decoder cross-attention"``.
            ax: axes of matplotlib to draw in.

        Returns:
            A figure of plotly, which shows the standard error of the head under the pointer, or `ax`.

        Raises:
            InputError: the result has no such statistic or attention; `ax` are no axes.
            MissingExtraError: plotly is not installed.
        """
        record = self._record(statistic)
        heads = HeadMap(
            values=matrix_of(self._run, self._heads, statistic, attention=attention),
            errors=matrix_of(self._run, self._heads, statistic, error=True, attention=attention),
            labels=[row.label for row in rows_of(self._run, self._heads, attention)],
            title=self._title(statistic),
            unit="" if record is None else record.unit,
            signed=record is not None and record.signed,
        )
        return map_figure(heads) if ax is None else draw_map(ax, heads)

    @input_door(layer=whole_number, head=whole_number, statistic=text, attention=text, ax=_axes)
    def head(
        self, layer: int, head: int, statistic: str | None = None, *, attention: str | None = None, ax: Any = None
    ) -> Any:
        """Distributions over tokens of one head's statistics, as the page has them.

        Args:
            layer, head: which head; numbers from 0.
            statistic: one of the distributions, such as ``"entropy_fraction"``; None is all of them.
            attention: as for `map`.
            ax: axes of matplotlib to draw in; one distribution, which `statistic` names, fits there.

        Returns:
            A figure of plotly, one panel below the other, or `ax`.

        Raises:
            InputError: the result has no such head or attention, or keeps no such distribution; several are to be drawn in
                one pair of axes.
            MissingExtraError: plotly is not installed.
        """
        sites = sites_with(self._run, self._heads, layer, head, attention)
        if len(sites) > 1:
            raise InputError(
                f"layer {layer} has {len(sites)} attention modules of this kind; result.show draws them all"
            )
        distributions = self._distributions(sites[0], head)
        names = ", ".join(distributions) or "none"
        if statistic is not None and statistic not in distributions:
            raise InputError(f"layer {layer}, head {head} has no distribution of {statistic!r}; it has {names}")
        if not distributions:
            raise InputError(
                f"the result keeps no distribution of layer {layer}, head {head}; probe with statistics=['attention']"
            )
        if statistic is not None:
            distributions = {statistic: distributions[statistic]}
        title = f"layer {layer}, head {head}"
        if ax is None:
            return distribution_figure(list(distributions.values()), title)
        if len(distributions) > 1:
            raise InputError(f"axes hold one distribution; name one with statistic=: {names}")
        (only,) = distributions.values()
        return draw_distribution(ax, only, title)

    @input_door(quantity=text)
    def depth(self, quantity: str = "pairwise_distance", *, ax: Any = None) -> Any:
        """A quantity of the hidden states through the depth: its level, and below it the change in each sublayer.

        The level is joined from before to after each sublayer. A grey × is the change in a re-initialised copy of the model,
        and bars are one standard error.

        Args:
            quantity: ``"pairwise_distance"``, ``"log_determinant"`` or ``"effective_rank"``.
            ax: axes of matplotlib to draw the level in, or two of them, for level and change.

        Returns:
            A figure of plotly, or `ax`.

        Raises:
            InputError: the result does not have this quantity; `ax` are neither one nor two axes.
            MissingExtraError: plotly is not installed.
        """
        sublayers = sublayers_of(self._run, self._layers)
        columns = layer_columns(sublayers, self._layers)
        present = [name for name, change in DEPTH.items() if f"{name}/after" in columns or change in columns]
        if quantity not in present:
            names = ", ".join(present) or "none: probe with statistics=['expansion']"
            raise InputError(f"the result has no quantity {quantity!r} through the depth; it has {names}")
        record = self._record(DEPTH[quantity])
        change_title = f"change ({record.unit})" if record is not None and record.unit else "change"
        depth = Depth.create(quantity, change_title, sublayers, columns)
        if ax is None:
            return depth_figure(depth)
        panels = list(np.ravel(ax)) if isinstance(ax, np.ndarray | list | tuple) else [ax]
        if len(panels) not in (1, 2):
            raise InputError(f"ax must be axes for the level, or two for level and change, got {len(panels)}")
        for each in panels:
            check_axes("ax", each)
        draw_depth(panels, depth)
        return ax

    def _record(self, statistic: str) -> "Statistic | None":
        name = statistic.partition("/")[0]
        return {entry.name: entry for entry in self._run.statistics}.get(name)

    def _title(self, statistic: str) -> str:
        record = self._record(statistic)
        if record is None:
            return statistic
        _, _, qualifier = statistic.partition("/")
        return f"{record.title} ({qualifier})" if qualifier else record.title

    def _distributions(self, site: int, head: int) -> dict[str, "Distribution"]:
        """The distributions of a head that have tokens, by statistic."""
        distributions = {}
        for name, histogram in (self._details.get("histograms") or {}).items():
            counts = histogram["counts"].get(str(site))
            if not counts or not sum(counts[head]):
                continue
            record = self._record(name)
            unit = "" if record is None else record.unit
            distributions[name] = Distribution(self._title(name), unit, histogram["edges"], counts[head])
        return distributions
