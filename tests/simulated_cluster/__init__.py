"""A cluster in virtual time: the routers, workers and clients of the product, on simulated
processes over a simulated network, with faults as one orders them."""
