"""Commands that are run by hand: the quickstart, export, plans."""
