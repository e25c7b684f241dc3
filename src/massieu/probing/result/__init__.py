"""From running results to tables, findings and a stored result."""
