"""Other packages, end to end: bitwise equal to their programs without checkpointing. Tests skip where the package is absent."""
