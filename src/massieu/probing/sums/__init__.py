"""Ratios with errors over units of the text, running results that can be stored and merged, and tests of significance."""
