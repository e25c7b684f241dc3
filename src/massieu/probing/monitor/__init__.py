"""Attention's health while a model trains."""
