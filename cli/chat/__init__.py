"""A conversation: its turns, at a terminal or line by line."""
