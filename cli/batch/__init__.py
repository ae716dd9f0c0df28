"""Rows of JSON lines: read, answered, and written so that a run can go on after any break."""
