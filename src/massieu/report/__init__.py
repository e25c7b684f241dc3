"""The page, and the small drawings a notebook shows. This room knows results, not models.

It reads what `massieu.probe` stored (two tables and two JSON documents) and imports nothing else of the package.
"""
