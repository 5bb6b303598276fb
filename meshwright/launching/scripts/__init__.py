"""Job scripts for launchers of clusters, one file each: pure functions from numbers to text."""
