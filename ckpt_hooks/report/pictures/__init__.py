"""Pictures of ledgers and plans. Matplotlib, an extra, is imported when a picture is drawn."""
