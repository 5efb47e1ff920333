"""Benchmarks of ckpt_hooks against torch's own checkpointing; README.md says how to run and to read them."""
