"""One weight format a file: its layout, its unpacking and its micro-kernel."""
