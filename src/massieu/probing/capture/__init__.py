"""Attention calls as they happen, by two routes, and which tokens they are about."""
