"""Every claim of the papers as a function that measures it: what is stated, what is true, and by which numbers."""
