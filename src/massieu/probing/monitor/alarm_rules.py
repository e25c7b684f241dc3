"""When each quantity of a training run is in alarm, and what to do first."""

from dataclasses import dataclass

PAGE = "docs/how-to/alarms.md"


@dataclass(frozen=True)
class Rule:
    """When one quantity is in alarm.

    Attributes:
        title: what happens.
        quantity: a head's, a layer's, or the model's number; ``distance_from_uniform`` is 1 − ``entropy_fraction``.
        key: the quantity's name in a record, of the layer, or of the model.
        rises: whether it is outside above its history, or else below.
        factor: how far from its history it is at least.
        factor_at_first: the same from the first record, while there is no history; learning begins then.
        negligible: smaller numbers count as this one, since their changes do not matter.
        first_step: what to do first.
        over_mean: whether the mean over all heads is compared, rather than each number.
        bound: the number is compared with this from the beginning, and not with its history; None where it is not.
    """

    title: str
    quantity: str
    key: str
    rises: bool
    negligible: float
    first_step: str
    factor: float = 1.0
    factor_at_first: float = 1.0
    over_mean: bool = False
    bound: float | None = None

    @property
    def page(self) -> str:
        """Where the rule is explained."""
        return f"{PAGE}#{self.title.replace(' ', '-')}"


RULES = (
    Rule(
        "growing logits",
        quantity="largest_logit",
        key="largest_logit_max",
        rises=True,
        factor=3.0,
        factor_at_first=4.0,
        negligible=10.0,
        first_step="lower the learning rate, or clip with massieu.nn.clip_logits",
    ),
    Rule(
        "sharpening attention",
        quantity="selective_log_partition",
        key="selective_log_partition_mean",
        rises=True,
        factor=2.5,
        factor_at_first=3.0,
        negligible=1.0,
        over_mean=True,
        first_step="lower the learning rate",
    ),
    Rule(
        "entropy collapse",
        quantity="entropy",
        key="entropy_mean",
        rises=False,
        factor=1.5,
        factor_at_first=2.0,
        negligible=1e-3,
        over_mean=True,
        first_step="lower the learning rate",
    ),
    Rule(
        "uniform attention",
        quantity="distance_from_uniform",
        key="entropy_fraction_mean",
        rises=False,
        factor=1.3,
        factor_at_first=2.0,
        negligible=1e-3,
        over_mean=True,
        first_step="look whether tokens have become equal (spread), and go back to a checkpoint before it",
    ),
    Rule(
        "collapsing tokens",
        quantity="spread",
        key="spread",
        rises=False,
        factor=1.3,
        factor_at_first=20.0,
        negligible=1e-12,
        first_step="go back to a checkpoint before it, and lower the learning rate or warm up for longer",
    ),
    Rule(
        "falling rank",
        quantity="effective_rank",
        key="effective_rank",
        rises=False,
        factor=2.2,
        factor_at_first=4.0,
        negligible=1.0,
        first_step="go back to a checkpoint before it, and lower the learning rate or warm up for longer",
    ),
    Rule(
        "growing gradient",
        quantity="gradient_norm",
        key="gradient_norm",
        rises=True,
        factor=3.0,
        factor_at_first=5.0,
        negligible=1e-12,
        first_step="look at the batch, then lower the learning rate or clip gradients",
    ),
    Rule(
        "lost updates",
        quantity="unchanged_weights",
        key="unchanged_weights",
        rises=True,
        negligible=1e-3,
        first_step="keep the weights that the optimiser trains in float32, and compute in half precision by autocast",
        bound=0.5,
    ),
)
"""All rules."""
