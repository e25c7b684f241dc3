"""What one call of a monitor found, as a flat dictionary that every logger takes."""

from collections.abc import Mapping
from html import escape

import numpy as np
from torch import Tensor

from massieu.probing.monitor.alarm_history import Alarm

SUMMARY = (
    "loss",
    "gradient_norm",
    "unchanged_weights",
    "learning_rate",
    "largest_logit_max",
    "largest_logit_layer",
    "largest_logit_head",
    "largest_logit_mean",
    "largest_logit_above_mean_max",
    "selective_log_partition_mean",
    "selective_log_partition_max",
    "entropy_mean",
    "entropy_min",
    "entropy_fraction_mean",
    "entropy_fraction_min",
    "weight_first_mean",
    "weight_first_max",
)
"""The model's numbers that a summary has, where the record has them."""
LEAST_OF_LAYERS = ("effective_rank", "spread")
"""Of these a summary has the least over all layers, by the name with ``_min``."""


class MonitorRecord(dict[str, float]):
    """A flat dictionary of floats by names such as ``massieu/layer3/largest_logit_max``.

    Attributes:
        step: the step that was measured.
        largest_logits: by the name of each attention module the largest logit of each of its heads, shape (H,), before biases
            and caps; as `massieu.nn.clip_logits` takes it.
        where: whose numbers ``massieu/largest_logit_max`` and ``massieu/entropy_min`` are, by these names: ``layer3/head5``.
        alarms: what is far outside the run's own history, at most one for each rule: a
            `massieu.probing.monitor.alarm_history.Alarm` each.
    """

    def __init__(
        self,
        step: int,
        values: dict[str, float],
        largest_logits: dict[str, Tensor],
        where: Mapping[str, str],
        prefix: str,
    ) -> None:
        super().__init__(values)
        self.step = step
        self.largest_logits = largest_logits
        self.alarms: list[Alarm] = []
        self._prefix = f"{prefix}/" if prefix else ""
        self.where = {f"{self._prefix}{name}": head for name, head in where.items()}

    def _repr_html_(self) -> str:
        rows = [f"<tr><td>{escape(name)}</td><td>{value:.4g}</td></tr>" for name, value in self.summary().items()]
        alarms = [f"<li>{escape(str(alarm))}</li>" for alarm in self.alarms]
        heading = f"step {self.step}: {len(self)} numbers, of which these are the whole model's"
        return f"<p>{heading}</p><table>{''.join(rows)}</table><ul>{''.join(alarms)}</ul>"

    def summary(self) -> dict[str, float]:
        """The numbers of the whole model that one plots, at most 20, by the record's own names.

        They are loss, gradient norm and learning rate, as far as known; largest logit with its layer and head, selective
        log Z, entropy, the weight on the first token; and the least effective rank and spread of all layers, as
        ``massieu/effective_rank_min`` and ``massieu/spread_min``.
        """
        summary: dict[str, float] = {}
        for name in SUMMARY:
            key = f"{self._prefix}{name}"
            if key in self:
                summary[key] = self[key]
        for name in LEAST_OF_LAYERS:
            of_layers = [value for key, value in self.items() if key.endswith(f"/{name}")]
            if of_layers:
                # NaN where one of them is, which `min` would not promise.
                summary[f"{self._prefix}{name}_min"] = float(np.min(of_layers))
        return summary
