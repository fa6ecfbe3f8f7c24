"""C++ that is compiled when it is first used, or shipped in an image."""
