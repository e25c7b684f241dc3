"""What the probe measures: a file for each group of statistics."""

# Statistics are listed in the order of their registration, which is that of `GROUPS`.
# isort: off
from massieu.probing.statistics.attention import AttentionGroup
from massieu.probing.statistics.values import ValuesGroup
from massieu.probing.statistics.climb import ClimbGroup
from massieu.probing.statistics.maps import MapsGroup
from massieu.probing.statistics.expansion import ExpansionGroup
from massieu.probing.statistics import replacement as _replacement  # noqa: F401
from massieu.probing.statistics.repeated import RepeatedGroup
from massieu.probing.statistics.memory import MemoryGroup
from massieu.probing.statistics.feed_forward import FeedForwardGroup
from massieu.probing.statistics.conditional_mean import ConditionalMeanGroup
from massieu.probing.statistics.key_density import KeyDensityGroup
from massieu.probing.statistics.joint import JointGroup
from massieu.probing.statistics.uncertainty import UncertaintyGroup
from massieu.probing.statistics.metric import MetricGroup
from massieu.probing.statistics.flow import FlowGroup
from massieu.probing.statistics.residual import ResidualGroup
from massieu.probing.statistics.tap import TapGroup
from massieu.probing.statistics.response import ResponseGroup
from massieu.probing.statistics.symmetry import SymmetryGroup
from massieu.probing.statistics.sufficiency import SufficiencyGroup
from massieu.probing.statistics.own_groups import OwnSteps, OwnWindows

# isort: on
from massieu.probing.statistics.group import Group

GROUP_CLASSES: tuple[type[Group], ...] = (
    AttentionGroup,
    ValuesGroup,
    ClimbGroup,
    MapsGroup,
    ExpansionGroup,
    RepeatedGroup,
    MemoryGroup,
    FeedForwardGroup,
    ConditionalMeanGroup,
    KeyDensityGroup,
    JointGroup,
    UncertaintyGroup,
    MetricGroup,
    FlowGroup,
    ResidualGroup,
    TapGroup,
    ResponseGroup,
    SymmetryGroup,
    SufficiencyGroup,
    OwnWindows,
    OwnSteps,
)
"""Groups that are measured while the text is read; replaced attention is measured after it (`massieu.probing.replaced`)."""
