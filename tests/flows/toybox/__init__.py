"""Toy steps for the tests of flows: small, real functions under an address space of their own."""
