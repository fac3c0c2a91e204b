"""Package data: found by name through headstart.recipe."""
