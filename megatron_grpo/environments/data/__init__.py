"""Rows of files as problems: reading, field mapping, filters, splits, mixing."""
