"""Pages and the small drawings of a notebook. This room knows results, not models.

It draws the stored result of a run (`massieu.storage`: two tables and two JSON documents), for which results call it
themselves, and the result of a flow, by `draw_flow`.
"""

from typing import TYPE_CHECKING

from massieu.foundation.lazy_names import lazy_names

if TYPE_CHECKING:
    from massieu.report.flow import draw_flow

__all__ = ["draw_flow"]

__getattr__, __dir__ = lazy_names(__name__, __all__, {"draw_flow": "massieu.report.flow:draw_flow"})
