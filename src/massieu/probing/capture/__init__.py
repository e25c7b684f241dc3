"""Attention calls as they happen, by three routes, and which tokens they are about."""
