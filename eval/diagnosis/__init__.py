"""What the doctor knows: `evidence` gathers it, and each other file holds checks, functions of the evidence alone.

A check yields a `Finding` for each cause that it sees, with what the cause costs in tokens a step. Where it can, it
tries: the same head on the same texts with one thing changed. What such a change brings back is what the fault took.
"""
