"""Conversations to token batches: sources, rendering, loss masks, packing, distillation."""
