"""Tree-attention decoding: trees, cache, attention, verification, the engine, the drafters."""
