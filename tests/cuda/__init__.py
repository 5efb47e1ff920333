"""What only a CUDA device can show: ``python -m pytest -m cuda``. All of it is skipped where there is none."""
