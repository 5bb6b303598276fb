"""Real models read into task graphs: by torch.export, by torch.fx, or module by module."""
