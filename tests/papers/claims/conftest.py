"""A registry for the tests of the frame alone."""

import pytest

from massieu.papers.claims import registry


@pytest.fixture
def empty_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """No claim but those of the test is registered."""
    monkeypatch.setattr(registry, "_REGISTERED", {})
    monkeypatch.setattr(registry, "_load", lambda: None)
