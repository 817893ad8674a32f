"""Data -> tables, text and JSON. Views fetch nothing."""
