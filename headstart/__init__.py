"""headstart: train light draft heads for a frozen language model, decode with them exactly, report what was gained."""

__version__ = "0.1.0"
