"""One model read, batch by batch."""
