"""Comparisons of two or more models on one text: paired errors, and which heads differ."""
