"""What one call of a monitor found, as a flat dictionary that every logger takes."""

from torch import Tensor

from massieu.probing.monitor.alarms import Alarm


class MonitorRecord(dict[str, float]):
    """A flat dictionary of floats by names such as ``massieu/layer3/largest_logit_max``.

    Attributes:
        step: the step that was measured.
        largest_logits: by the name of each attention module the largest logit of each of its heads, shape (H,), before biases
            and caps; as `massieu.nn.clip_logits` takes it.
        alarms: what is far outside the run's own history, at most one for each rule: a
            `massieu.probing.monitor.alarms.Alarm` each.
    """

    def __init__(self, step: int, values: dict[str, float], largest_logits: dict[str, Tensor]) -> None:
        super().__init__(values)
        self.step, self.largest_logits = step, largest_logits
        self.alarms: list[Alarm] = []
