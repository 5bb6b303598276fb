"""The fastest layout that fits: every legal way to do a job, bounded, priced, ordered and explained. No torch."""
