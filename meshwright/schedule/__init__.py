"""Pipeline schedules as plain data: which rank computes what in which order. No torch, no communication."""
