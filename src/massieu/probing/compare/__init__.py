"""Two models beside each other, or many: the same text, paired errors, and which heads differ."""
