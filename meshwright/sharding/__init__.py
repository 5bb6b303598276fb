"""The bucket engine: one machine for ddp, zero1, zero2 and zero3; the policy is a row of a table."""
