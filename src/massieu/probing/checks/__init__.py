"""What is checked before and while a model is read."""
