"""What differs from torch's own implementation, and is meant to."""
