"""How an unmodified module's calls are swapped: one ordered, reversible list of adaptations."""
