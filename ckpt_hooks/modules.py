"""``checkpoint_module`` and ``apply_checkpointing``: regions on a model, with all names as they are."""
