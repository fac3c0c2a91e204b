"""The trained heads: one file per architecture, losses, draft vocabulary, saving and loading."""
