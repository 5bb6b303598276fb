"""A model as plain data: tasks, values and their costs as formulas of batch and sequence. Imports no torch."""
