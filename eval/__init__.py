"""Measuring: acceptance, speedup, tree tuning, reports."""
