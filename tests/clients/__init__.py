"""Tools that people use against a server, tried against ours; `make clients`."""
