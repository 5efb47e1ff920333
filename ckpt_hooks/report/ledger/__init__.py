"""The ledger of a step: every byte allocated, and what made it."""
