"""Public names that are loaded on first use."""

import sys

import pytest

from massieu.errors import MissingExtraError
from massieu.foundation.lazy_names import lazy_names

SOURCES = {"fsum": "math:fsum", "unfinished": "math:no_such_name", "this": "this"}


def test_a_name_is_what_its_module_defines_and_a_source_without_a_colon_is_the_module():
    get_attribute, list_names = lazy_names("house", ["fsum", "window"], SOURCES | {"window": "os.path"})
    assert get_attribute("fsum") is sys.modules["math"].fsum
    assert get_attribute("window") is sys.modules["os.path"]
    assert list_names() == ["fsum", "window"]


def test_nothing_is_loaded_before_it_is_used():
    lazy_names("house", ["this"], SOURCES)
    assert "this" not in sys.modules


def test_a_name_without_a_source_is_missing_as_in_any_module():
    get_attribute, _ = lazy_names("house", [], SOURCES)
    with pytest.raises(AttributeError, match="module 'house' has no attribute 'door'"):
        get_attribute("door")


def test_what_needs_an_extra_says_so_before_anything_is_loaded():
    get_attribute, _ = lazy_names("house", ["this"], SOURCES, extra="no_such_package")
    with pytest.raises(MissingExtraError, match=r"massieu\[no_such_package\]"):
        get_attribute("this")
    assert "this" not in sys.modules
