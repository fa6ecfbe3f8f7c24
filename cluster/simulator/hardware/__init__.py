"""How quick workers are, on hardware that is known by its data sheet or was measured."""
