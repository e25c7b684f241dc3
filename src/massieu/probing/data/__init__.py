"""From text, tables, pairs and images to batches."""
