"""Heads: modules that are trained to draft for one frozen target."""
