"""What every other room stands on; no user imports it. Each module is imported by its own name, and this file loads nothing."""
