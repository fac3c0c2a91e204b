"""The drafters: one small file each, all behind the same engine."""
