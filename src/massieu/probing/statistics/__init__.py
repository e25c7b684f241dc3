"""What the probe measures: the registry of statistics, and one file for each group of them."""
