"""A whole cluster: configuration, command line, starting and watching it."""
