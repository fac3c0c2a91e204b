"""Prompts written for headstart and the bundled target's own answers to them."""
