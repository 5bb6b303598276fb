"""What a plan will cost, computed before it runs. No torch, no communication."""
