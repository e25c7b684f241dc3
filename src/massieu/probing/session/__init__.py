"""One probe under way: which batches this process reads, and when sums are stored and added up."""
