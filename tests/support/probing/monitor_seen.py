"""A monitor that keeps its records by step."""

from collections.abc import Iterable
from typing import Any

import massieu


class Seen(massieu.Monitor):
    def __init__(self, model: Any, batch: Any, every: int = 100, to: Iterable[Any] = (), **options: Any) -> None:
        self.seen: dict[int, dict[str, float]] = {}
        super().__init__(model, batch, every=every, to=[*to, self._keep], **options)

    def _keep(self, record: dict[str, float], step: int) -> None:
        self.seen[step] = dict(record)
