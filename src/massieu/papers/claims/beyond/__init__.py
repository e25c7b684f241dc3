"""Claims of later literature: N1 to N34."""
