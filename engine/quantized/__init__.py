"""On-disk conventions for quantised weights, one a file."""
