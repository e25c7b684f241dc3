"""Reading a real model: capture, statistics, result."""
