"""What to cut where, and what to keep: decisions as plain data, from costs that are passed in."""
