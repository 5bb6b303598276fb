"""The only package that talks to the network: meshes bound to process groups, operations, their log."""
