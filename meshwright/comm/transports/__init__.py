"""How bytes travel. One file a transport, all with the interface of `base.Transport`."""
