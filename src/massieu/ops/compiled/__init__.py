"""Code in C for the CPU, compiled by the machine's own compiler when it is first needed."""
