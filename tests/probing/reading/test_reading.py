"""What a reading does not do: nothing is followed, and no sums are kept, that no statistic was asked for."""

import pytest
from tests.support.probing import zoo
from tests.support.probing.readings import attention_of

import massieu
from massieu.probing.reading import reading as reading_file
from massieu.probing.reading.reading import Reading
from massieu.probing.stream.wiring import StreamTracer

BATCHES = [zoo.inputs("bert")]


@pytest.fixture
def readings(monkeypatch):
    """The readings that a probe has made: of the model, and of each draw of its control."""
    made = []

    class Noted(Reading):
        def finish(self):
            made.append(self)
            super().finish()

    for place in ("session", "draws"):
        monkeypatch.setattr(f"massieu.probing.session.{place}.Reading", Noted)
    return made


@pytest.mark.medium
@pytest.mark.parametrize(("name", "followed"), [("entropy", False), ("values", True)])
def test_the_stream_is_followed_where_a_statistic_wants_it(name, followed, readings, monkeypatch):
    passes = []

    class Counted(StreamTracer):
        def watching(self):
            passes.append(self.model)
            return super().watching()

    monkeypatch.setattr(reading_file, "StreamTracer", Counted)
    result = massieu.probe(zoo.model("bert"), BATCHES, statistics=[name], draws=2)
    assert len(readings) == 3
    assert bool(passes) == followed
    assert bool(result.run.sublayers) == followed


@pytest.mark.medium
def test_sums_are_kept_of_the_statistics_that_are_read(readings):
    massieu.probe(zoo.model("bert"), BATCHES, statistics=["weight_first"], draws=2)
    kept = {name for reading in readings for site in attention_of(reading) for name in site.names}
    assert kept == {"entropy", "weight_first"}, "the entropy tells how many units an error has"
