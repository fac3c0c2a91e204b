"""Entry scripts and the one training loop: recipe, target, heads, data, loop, save."""
