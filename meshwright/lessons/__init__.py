"""Runnable lessons: one idea each, measured on this machine, checked against one process."""
