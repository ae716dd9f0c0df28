"""Words in, words out: parses options and prints; knows no array."""
