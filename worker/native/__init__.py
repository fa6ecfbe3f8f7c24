"""C++ code that is compiled at first use or shipped in an image."""
