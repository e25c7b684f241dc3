"""What a stored record has to hold: a file that lacks it is refused in a sentence, whatever else it says."""

from collections.abc import Iterator
from dataclasses import MISSING, Field, fields

from massieu.probing.result import stored
from massieu.storage.record import Entry

NULL_BUT_THERE = {
    "ModelRecord": {"name", "layers", "heads"},
    "TextRecord": {"source", "tokens", "windows"},
    "ErrorUnitRecord": {"unit", "count"},
    "SelfCheckRecord": {"error", "tolerance"},
}
"""What every version has written, if only as null."""


def _entries(base: type[Entry] = Entry) -> Iterator[tuple[str, list[Field]]]:
    for kind in base.__subclasses__():
        yield kind.__name__, [each for each in fields(kind) if each.init]
        yield from _entries(kind)


def _needed(each: Field) -> bool:
    return "needed" in each.metadata


def test_a_field_without_a_default_has_to_be_in_a_file():
    """A file that lacks it would else end in a traceback."""
    assert stored.Entry is Entry  # its entries are among those here
    wrong = []
    for name, parts in _entries():
        without_default = [each for each in parts if each.default is MISSING and each.default_factory is MISSING]
        wrong += [f"{name}.{each.name}" for each in without_default if not _needed(each)]
    assert not wrong


def test_what_every_version_has_written_has_to_be_there():
    result = {}
    for name, parts in _entries():
        if with_default := {each.name for each in parts if _needed(each) and each.default is not MISSING}:
            result[name] = with_default
    assert result == NULL_BUT_THERE
