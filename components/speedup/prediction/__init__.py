"""The speedup model S(k): acceptance, costs, and the flags of a prediction."""
