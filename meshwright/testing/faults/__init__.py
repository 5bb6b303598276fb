"""Known faults: loud ones of the network (`network`), and silent ones that only change numbers (`registry`)."""
